"""Callers for a control plane with an access file: known ones of each role, strangers, and forged tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from kvplane.controlplane.access import token_digest
from kvplane.controlplane.roles import RELEASES, TABLE, TURNS, Role
from tests.fuzz.chance import Chance
from tests.fuzz.core import Wrong

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Caller:
    """Whom a call comes from. Without a role it is nobody."""

    name: str
    role: Role | None = None
    engine_ids: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    metadata: Metadata = ()
    names: tuple[str, ...] = ()
    """Of its certificate."""

    def entry(self) -> str:
        """Return its table of the access file."""
        lists = {
            "token_sha256": [token_digest(_token(self.name))] if self.metadata else [],
            "certificates": list(self.names),
            "engine_ids": list(self.engine_ids),
            "addresses": ["10.0.0.7", "127.0.0.*", "*.example"] if self.role is Role.ENGINE else [],
            "tenants": list(self.tenants),
        }
        shown = "".join(f"{key} = {values}\n" for key, values in lists.items() if values)
        return f'[[identity]]\nname = "{self.name}"\nrole = "{self.role}"\n{shown}'


def _token(name: str) -> str:
    return f"token-of-{name}"


def _shown(name: str) -> Metadata:
    return (("x-other", b"\xff"), ("authorization", f"Bearer {_token(name)}"))


KNOWN = (
    Caller("d1", Role.ENGINE, ("d1",), (), _shown("d1")),
    Caller("any", Role.ENGINE, ("*",), ("t1",), _shown("any")),
    Caller("router", Role.ROUTER, (), (), _shown("router")),
    Caller("router1", Role.ROUTER, (), ("t1",), _shown("router1")),
    Caller("viewer", Role.VIEWER, (), ("t2", "def*"), _shown("viewer")),
    Caller("admin", Role.ADMIN, (), (), _shown("admin")),
    Caller("spiffe", Role.ROUTER, (), ("t2",), (), ("spiffe://x/router",)),
    Caller("both", Role.ENGINE, ("p1",), (), _shown("both"), ("spiffe://x/p1",)),
)
NOBODY = (
    Caller("nothing"),
    Caller("stranger", metadata=_shown("stranger")),
    Caller("half", metadata=_shown("both")),  # its certificate is missing
    Caller("other", names=("spiffe://x/other", "router")),
    Caller("basic", metadata=(("authorization", "Basic token-of-router"),)),
    Caller("empty", metadata=(("authorization", "Bearer "),)),
    Caller("bytes", metadata=(("authorization", b"Bearer token-of-router"),)),
    Caller("long", metadata=(("authorization", "Bearer " + "x" * 9000),)),
)
ACCESS = "\n".join(caller.entry() for caller in KNOWN)


def access_without(gone: str) -> str:
    """Return the access file without a caller."""
    return "\n".join(caller.entry() for caller in KNOWN if caller.name != gone)


def some_caller(chance: Chance) -> Caller:
    """Return somebody; most are somebody known."""
    return chance.pick(KNOWN if chance.odds(0.8) else NOBODY)


def denied(caller: Caller, method: str, request: Any) -> str:
    """Return why a caller may not make a request of a method, by this table of ours; "" if it may."""
    if caller.role is None:
        return "nobody"
    if caller.role not in TABLE[f"/kvplane.v1.{method}"]:
        return "role"
    if request is None or isinstance(request, Exception):
        return ""
    return next(_refusals(caller, method.rpartition("/")[2], request), "")


def _refusals(caller: Caller, name: str, request: Any) -> Iterator[str]:
    tenants, engines = list[str](), list[str]()
    if name in ("ListLocations", "WatchLocations"):
        tenants.append(request.tenant_id)
    elif name == "AnnounceLocation":
        tenants.append(request.announcement.key.tenant_id)
    elif hasattr(request, "key"):
        tenants.append(request.key.tenant_id)
    if name == "ReleaseLocation":
        target = request.WhichOneof("target")
        if target and caller.role not in RELEASES[target]:
            yield "role"
        if target == "end_conversation":
            tenants.append(request.end_conversation.key.tenant_id)
        elif target == "withdraw":
            engines.append(request.withdraw.engine_id)
    elif name == "RegisterEngine":
        engines.append(request.spec.engine_id)
    elif name == "ClaimLocation":
        engines.append(request.reader_engine_id)
    elif hasattr(request, "engine_id"):
        engines.append(request.engine_id)
    if caller.tenants and not all(_fits(tenant, caller.tenants) for tenant in tenants):
        yield "tenant"
    if caller.role is Role.ENGINE and not all(_fits(engine, caller.engine_ids) for engine in engines):
        yield "engine"


def _fits(text: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, glob) for glob in globs)


def check_operations(caller: Caller, requests: list[Any], answers: list[Any]) -> None:
    """Raise Wrong if an operation of a Turns stream was done for a caller that may not."""
    asked = dict[int, list[Any]]()
    for request in requests:
        for operation in request.operations:
            asked.setdefault(operation.id, []).append(operation)
    for answer in answers:
        for result in answer.results:
            made = asked.get(result.id, [])
            if result.WhichOneof("result") == "error" or len(made) != 1:  # ids that come twice tell nothing
                continue
            kind = made[0].WhichOneof("operation")
            method = TURNS[kind].removeprefix("/kvplane.v1.")
            if why := denied(caller, method, getattr(made[0], kind)):
                raise Wrong(f"an operation {kind} was done for one who may not: {why}")
