"""The access file: who may call, known by a certificate or a token, in which role, for what."""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from kvplane.controlplane.roles import Role
from kvplane.store.files import FileError, read

ANY = "*"
"""A glob that takes everything."""
PEER = "peer"
"""In `addresses`: the address that the caller calls from."""
_KEYS = ("name", "role", "certificates", "token_sha256", "engine_ids", "addresses", "tenants")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_IDENTITIES = 10_000


class AccessFileError(ValueError):
    """An access file cannot be used: one line that says where and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text if text.isprintable() else ascii(text)[1:-1])  # a name may hold a line's end


_OF_ADDRESSES = re.compile(r"[0-9.*?]*[0-9][0-9.*?]*|.*:.*")
"""A glob that stands for addresses: to 10.0.0.* a name such as 10.0.0.example does not fit."""


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    """Return a glob, of `*` and `?` only, as a pattern."""
    return re.compile("".join({"*": ".*", "?": "."}.get(c) or re.escape(c) for c in glob), re.DOTALL)


def _any_matches(globs: Iterable[str], text: str) -> bool:
    return any(_pattern(glob).fullmatch(text) for glob in globs)


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller.

    Attributes:
        name: for logs, unique.
        role: what it may call.
        certificates: names (SPIFFE URIs or DNS names) of which its certificate has one.
        token_sha256: SHA-256 of its tokens, in hexadecimal digits. Where there are certificates too, it needs
            both.
        engine_ids: an engine's: which it may register and speak for; `*` and `?` stand for anything.
        addresses: an engine's: hosts it may register and announce: globs, or "peer".
        tenants: whose conversations it may act for; globs. Empty: all.
        networks: more of its addresses.
    """

    name: str
    role: Role
    certificates: frozenset[str] = frozenset()
    token_sha256: frozenset[str] = frozenset()
    engine_ids: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()

    def is_engine(self, engine_id: str) -> bool:
        """Whether it may speak for an engine."""
        return _any_matches(self.engine_ids, engine_id)

    def has_tenant(self, tenant_id: str) -> bool:
        """Whether it may act for a tenant."""
        return not self.tenants or _any_matches(self.tenants, tenant_id)

    def has_address(self, host: str, peer: str) -> bool:
        """Whether a host may be registered by it, which calls from the address `peer`."""
        host = host.strip("[]").lower()
        for glob in self.addresses:
            if glob == PEER or not _pattern(glob).fullmatch(host):
                continue
            if _address(host) is not None or not _OF_ADDRESSES.fullmatch(glob):
                return True
        if PEER in self.addresses and _same_host(host, peer):
            return True
        if self.networks:
            address = _address(host)
            return address is not None and any(address in network for network in self.networks)
        return False


@lru_cache(maxsize=4096)  # engines say the same with every announcement
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _same_host(host: str, peer: str) -> bool:
    """Whether a host is the one at the address `peer`; one of loopback's names is as good as another."""
    at = _address(peer)
    if at is None:
        return False
    named = _address(host)
    if at.is_loopback:
        return host == "localhost" or (named is not None and named.is_loopback)
    return named == at


def host_of(url: str) -> str:
    """Return the host of a base URL, "" if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class AccessList:
    """All identities, found by what a caller shows."""

    def __init__(self, identities: Iterable[Identity]) -> None:
        self.identities = tuple(identities)
        self._by_token = {digest: one for one in self.identities for digest in one.token_sha256}
        self._by_certificate = {
            name: one for one in self.identities if not one.token_sha256 for name in one.certificates
        }

    def has_token(self, token: str) -> bool:
        """Whether a token is somebody's, "" is nobody's."""
        return bool(token) and token_digest(token) in self._by_token

    def find(self, names: Iterable[str], token: str) -> Identity | None:
        """Return who has a certificate with these names and this token ("" for none), None if nobody.

        A token goes first, and must then be somebody's: who has one says with it who it is.
        """
        if token:
            found = self._by_token.get(token_digest(token))
            if found is not None and found.certificates and found.certificates.isdisjoint(names):
                return None
            return found
        return next((one for name in names if (one := self._by_certificate.get(name)) is not None), None)


def token_digest(token: str) -> str:
    """Return what stands for a token in an access file. Tokens are long random texts: no salt is needed."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def load_access(path: str) -> AccessList:
    """Read an access file. Raises AccessFileError."""
    try:
        content = tomllib.loads(read(path).decode())
    except FileError as error:
        raise AccessFileError(str(error)) from None
    except UnicodeDecodeError:
        raise AccessFileError(f"{path}: not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise AccessFileError(f"{path}: not TOML: {error}") from None
    for name in content:
        if name != "identity":
            raise AccessFileError(f"{path}: {name} is unknown; each caller is a table [[identity]]")
    entries = content.get("identity", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise AccessFileError(f"{path}: identity: write [[identity]] with two brackets above each caller")
    if not entries:
        raise AccessFileError(f"{path}: names nobody; add a table [[identity]] for each caller")
    if len(entries) > _MAX_IDENTITIES:
        raise AccessFileError(f"{path}: has more than {_MAX_IDENTITIES} identities")
    identities = [_identity(entry, f"{path}: identity {number}") for number, entry in enumerate(entries, 1)]
    _check_unique(identities, path)
    return AccessList(identities)


def _identity(entry: Mapping[str, Any], where: str) -> Identity:
    for key in entry:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
            raise AccessFileError(f"{where}: {key} is unknown; {hint}")
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > 256:
        raise AccessFileError(f"{where}: name is missing: a text of 1 to 256 characters, for the log")
    where = f"{where} ({name})"
    try:
        role = Role(entry.get("role", ""))
    except ValueError:
        raise AccessFileError(f"{where}: role must be one of {', '.join(Role)}") from None
    lists = {key: _texts(entry, key, where) for key in _KEYS[2:]}
    tokens = frozenset(digest.lower() for digest in lists["token_sha256"])
    for digest in tokens:
        if not _DIGEST.fullmatch(digest):
            raise AccessFileError(
                f"{where}: token_sha256 takes the 64 hexadecimal digits of a token's SHA-256, as"
                " kvplane access token writes them"
            )
    if not lists["certificates"] and not tokens:
        raise AccessFileError(f"{where}: nobody can be it: give certificates, token_sha256, or both")
    for key in ("engine_ids", "addresses"):
        if role is Role.ENGINE and not lists[key]:
            raise AccessFileError(f'{where}: an engine needs {key}, those it may register; ["*"] allows any')
        if role is not Role.ENGINE and lists[key]:
            raise AccessFileError(f"{where}: {key} is for engines only; leave it out")
    globs, networks = _split_addresses(lists["addresses"], where)
    return Identity(
        name,
        role,
        frozenset(lists["certificates"]),
        tokens,
        lists["engine_ids"],
        globs,
        lists["tenants"],
        networks,
    )


def _texts(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise AccessFileError(f'{where}: {key} must be a list of texts, such as ["..."]')
    if key in entry and not texts:
        raise AccessFileError(f"{where}: {key} is empty; leave it out, or name something")
    return tuple(texts)


def _split_addresses(
    texts: Iterable[str], where: str
) -> tuple[tuple[str, ...], tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]]:
    globs, networks = list[str](), list[ipaddress.IPv4Network | ipaddress.IPv6Network]()
    for text in texts:
        if "/" in text:
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise AccessFileError(f"{where}: addresses: {error}; write 10.0.0.0/24, or a host") from None
        else:
            host = text.strip("[]").lower()
            if ":" in host and _address(host) is None and "*" not in host:
                raise AccessFileError(f"{where}: addresses: {text} has a port; name hosts without one")
            globs.append(host)
    return tuple(globs), tuple(networks)


def _check_unique(identities: Iterable[Identity], path: str) -> None:
    """Refuse what would leave open who a caller is."""
    names, digests, certificates = dict[str, str](), dict[str, str](), dict[str, str]()
    for one in identities:
        if one.name in names:
            raise AccessFileError(f"{path}: two identities are called {one.name}")
        names[one.name] = one.name
        for digest in one.token_sha256:
            if digest in digests:
                raise AccessFileError(f"{path}: {digests[digest]} and {one.name} have the same token")
            digests[digest] = one.name
        for certificate in one.certificates if not one.token_sha256 else ():
            if certificate in certificates:
                raise AccessFileError(
                    f"{path}: {certificates[certificate]} and {one.name} are both known by {certificate}"
                )
            certificates[certificate] = one.name
