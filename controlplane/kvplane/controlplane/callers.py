"""Callers: whom a call's certificate and token stand for, and whether what it asks for is its to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import orjson
import structlog

from kvplane.controlplane import roles
from kvplane.controlplane.access import ANY, AccessFileError, AccessList, Identity, host_of, load_access
from kvplane.controlplane.errors import (
    AddressNotAllowedError,
    EngineNotAllowedError,
    RoleNotAllowedError,
    TenantNotAllowedError,
    UnknownCallerError,
)
from kvplane.store.files import Watched

log = structlog.get_logger(__name__)

_BEARER = "bearer "
_MAX_TOKEN_LENGTH = 4096
_URI = "peer_uri"
_NAMES = (_URI, "peer_dns")
"""Properties of a connection: the names of kind URI and DNS of a certificate that was verified."""


class Caller:
    """Whom one call, or one stream, comes from. Found anew when the access file has changed."""

    __slots__ = ("_access", "_identity", "_names", "_peer", "_token", "_version")

    def __init__(self, access: Access, names: tuple[str, ...], token: str, peer: str) -> None:
        self._access = access
        self._names = names
        self._token = token
        self._peer = peer
        self._version = -1
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        """Who it is now. Raises UnknownCallerError."""
        if self._version != self._access.version:
            self._version = self._access.version
            self._identity = self._access.users.find(self._names, self._token)
        if self._identity is None:
            raise UnknownCallerError(self.problem)
        return self._identity

    @property
    def problem(self) -> str:
        """Why it is nobody."""
        if self._token:
            return "the token is nobody's in the access file, or belongs to another certificate"
        if self._names:
            return f"the access file names nobody with the certificate of {', '.join(self._names[:4])}"
        return "neither a token nor a certificate with a name was sent"

    def require_role(self, method: str) -> None:
        """Raise RoleNotAllowedError if it may not call a method, UnknownCallerError if it is nobody."""
        identity = self.identity
        if not roles.may_call(identity.role, method):
            raise RoleNotAllowedError(identity.name, identity.role, method.rpartition("/")[2])

    def require_engine(self, engine_id: str) -> None:
        """Raise EngineNotAllowedError if it may not speak for an engine."""
        identity = self.identity
        if identity.role is roles.Role.ENGINE and not identity.is_engine(engine_id):
            raise EngineNotAllowedError(identity.name, engine_id)

    def require_address(self, host: str) -> None:
        """Raise AddressNotAllowedError if it may not register a host. "" is not known, and not asked for."""
        identity = self.identity
        if (
            host
            and identity.role is roles.Role.ENGINE
            and not identity.has_address(host, host_of_peer(self._peer))
        ):
            raise AddressNotAllowedError(identity.name, host)

    def require_tenant(self, tenant_id: str) -> None:
        """Raise TenantNotAllowedError if it may not act for a tenant; "" stands for all of them."""
        identity = self.identity
        if identity.tenants and not (tenant_id and identity.has_tenant(tenant_id)):
            raise TenantNotAllowedError(identity.name)

    def require_announcement(self, announcement: Any) -> None:
        """Raise if it may not put such a location on record: a tenant's, to be read at an address."""
        self.require_tenant(announcement.key.tenant_id)
        if ANY in self.identity.addresses:
            return
        self.require_address(host_of(announcement.endpoint))
        try:
            params = orjson.loads(announcement.kv_transfer_params)
        except orjson.JSONDecodeError:
            return  # is refused for that
        host = params.get("remote_host") if isinstance(params, dict) else None
        self.require_address(host if isinstance(host, str) else "")

    def require(self, method: str, request: Any) -> None:
        """Raise if a request is not this caller's to make, by its fields."""
        _CHECKS[method](self, request)

    def require_operation(self, kind: str, operation: Any) -> None:
        """Raise what the call of its own would raise for an operation of a Turns stream."""
        method = roles.TURNS.get(kind, kind)
        self.require_role(method)
        if method in _CHECKS:
            _CHECKS[method](self, getattr(operation, kind))


CURRENT: ContextVar[Caller | None] = ContextVar("kvplane_caller", default=None)
"""The caller of the RPC that is being served; None: everything is allowed to everyone."""


class Access:
    """The access file as it is now. Raises AccessFileError when it is made."""

    def __init__(self, path: str) -> None:
        self._watched = Watched((path,))
        self._path = path
        self.users: AccessList = load_access(path)
        self.version = 0
        """Grows with each change."""

    async def look(self) -> None:
        """Take a changed file. One that cannot be used is logged, and the one before stays in force."""
        try:
            users = await asyncio.to_thread(self._look)
        except AccessFileError as error:
            log.error("access_file_not_reloaded", problem=str(error), effect="the one before stays in force")
            return
        if users is not None:
            self.users, self.version = users, self.version + 1
            log.info("access_file_reloaded", identities=len(users.identities))

    def _look(self) -> AccessList | None:
        return load_access(self._path) if self._watched.look() else None

    def knows(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether what comes with a call has somebody's token."""
        return self.users.has_token(_token(metadata))

    def caller(self, context: Any) -> Caller:
        """Return whom a call comes from, whoever that is."""
        shown: Mapping[str, Iterable[bytes]] = context.auth_context()
        names = tuple(
            name.decode("utf-8", "replace")
            for kind in _NAMES
            if kind in shown
            for name in shown[kind]
            if (b":" in name) is (kind == _URI)  # else a name of one kind that is written as one of the other
        )
        return Caller(self, names, _token(context.invocation_metadata()), context.peer())


def _token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
            return value[len(_BEARER) :].strip()[:_MAX_TOKEN_LENGTH]
    return ""


def host_of_peer(peer: str) -> str:
    """Return the address in gRPC's name for a caller, such as "ipv6:%5B::1%5D:4711"; "" if it has none."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = unquote(address).rpartition(":")[0].strip("[]")
    return host.removeprefix("::ffff:") if "." in host else host


def _engine(caller: Caller, request: Any) -> None:
    caller.require_engine(request.engine_id)


def _register(caller: Caller, request: Any) -> None:
    caller.require_engine(request.spec.engine_id)
    caller.require_address(host_of(request.spec.endpoint))


def _announce(caller: Caller, request: Any) -> None:
    caller.require_engine(request.engine_id)
    caller.require_announcement(request.announcement)


def _key(caller: Caller, request: Any) -> None:
    caller.require_tenant(request.key.tenant_id)


def _claim(caller: Caller, request: Any) -> None:
    """An engine claims for itself: what it takes is gone for everybody else."""
    caller.require_tenant(request.key.tenant_id)
    caller.require_engine(request.reader_engine_id)


def _release(caller: Caller, request: Any) -> None:
    """By its target. Whose a claim is, its owner's name says, which is checked where it is finished."""
    target = request.WhichOneof("target")
    identity = caller.identity
    if target and identity.role not in roles.RELEASES.get(target, ()):
        raise RoleNotAllowedError(identity.name, identity.role, f"ReleaseLocation ({target})")
    if target == "end_conversation":
        caller.require_tenant(request.end_conversation.key.tenant_id)
    elif target == "withdraw":
        caller.require_engine(request.withdraw.engine_id)


def _tenant(caller: Caller, request: Any) -> None:
    caller.require_tenant(request.tenant_id)


def _nothing(caller: Caller, request: Any) -> None:
    """The role is all that matters, or what it depends on comes on the stream."""


_E, _L = f"/{roles.ENGINE_SERVICE}", f"/{roles.LOCATION_SERVICE}"
_CHECKS: Mapping[str, Callable[[Caller, Any], None]] = MappingProxyType(
    {
        f"{_E}/RegisterEngine": _register,
        f"{_E}/RenewEngine": _engine,
        f"{_E}/AttachEngine": _nothing,
        f"{_E}/DrainEngine": _engine,
        f"{_E}/DeregisterEngine": _engine,
        f"{_E}/ListEngines": _nothing,
        f"{_L}/AnnounceLocation": _announce,
        f"{_L}/RenewLocations": _engine,
        f"{_L}/LookupLocation": _key,
        f"{_L}/BeginTurn": _key,
        f"{_L}/ClaimLocation": _claim,
        f"{_L}/TouchConversation": _key,
        f"{_L}/ReleaseLocation": _release,
        f"{_L}/Turns": _nothing,
        f"{_L}/ListLocations": _tenant,
        f"{_L}/WatchLocations": _tenant,
        f"/{roles.STATUS_SERVICE}/GetStatus": _nothing,
        **{f"/{service}/ServerReflectionInfo": _nothing for service in roles.REFLECTION_SERVICES},
    }
)
"""What of a request is compared with the caller's identity. As roles.TABLE, it names every method."""
