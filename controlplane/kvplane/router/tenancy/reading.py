"""The file of --tenants: read and checked. What is wrong is named by its table and key, or its line."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvplane.router.reloading import FileProblemError, read_file
from kvplane.router.tenancy.model import ASYMMETRIC, JwtSettings, Quota, Tenant, Tenants

OPTION = "--tenants"
_TOP = ("secret_file", "operators", "cache_salt", "default", "tenants", "jwt")
_QUOTA = ("requests_per_second", "burst", "concurrent_requests", "tokens_per_minute")
_JWT = (
    "issuer",
    "audience",
    "tenant_claim",
    "jwks_file",
    "jwks_url",
    "jwks_ca",
    "algorithms",
    "leeway",
    "refetch",
    "refresh",
    "unlisted",
)
_UNLIMITED = "unlimited"
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LEAST_SECRET = 32
_MOST_ID = 256


class _ProblemError(Exception):
    """What is wrong, after the file's name."""


def read_tenants(file: str) -> Tenants:
    """Return what the file says. Raises FileProblemError. Blocks."""
    try:
        tables = tomllib.loads(read_file(file, OPTION).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileProblemError(f"{OPTION} {file}: not TOML: {error}") from None
    try:
        return _tenants(file, tables)
    except _ProblemError as problem:
        raise FileProblemError(f"{OPTION} {file}: {problem}") from None


def _tenants(file: str, tables: Mapping[str, Any]) -> Tenants:
    _known("", tables, _TOP)
    default = _quota("[default]", _table("default", tables.get("default", {})), Quota())
    _known("[default]", tables.get("default", {}), _QUOTA)
    seen: dict[bytes, str] = {}
    operators = _hashes("operators", tables.get("operators", []), "operators", seen)
    tenants = dict[str, Tenant]()
    for name, entry in _table("tenants", tables.get("tenants", {})).items():
        at = f"[tenants.{name[:40]}]"
        if not 0 < len(name.encode()) <= _MOST_ID:
            raise _ProblemError(f"{at}: a tenant's name has 1 to {_MOST_ID} bytes")
        table = _table(at, entry)
        _known(at, table, ("keys", *_QUOTA))
        keys = _hashes(f"{at} keys", table.get("keys", []), name, seen)
        tenants[name] = Tenant(name, keys, _quota(at, table, default))
    jwt = _jwt(file, _table("[jwt]", tables["jwt"])) if "jwt" in tables else None
    if not tenants and jwt is None:
        raise _ProblemError("names no tenants: add [tenants.NAME] with keys, or [jwt]")
    if "secret_file" not in tables:
        raise _ProblemError(
            "secret_file is missing: make one with `kvplane tenant secret FILE`, the same for all routers"
        )
    secret_file = _path(file, "secret_file", tables["secret_file"])
    secret = read_file(secret_file, f"{OPTION} {file}: secret_file").strip()
    if len(secret) < _LEAST_SECRET:
        raise _ProblemError(f"secret_file {secret_file}: has fewer than {_LEAST_SECRET} bytes: make it anew")
    jwks = None
    if jwt is not None and jwt.jwks_file is not None:
        jwks = read_file(jwt.jwks_file, f"{OPTION} {file}: [jwt] jwks_file")
    return Tenants(
        file=file,
        tenants=tenants,
        default=default,
        secret_file=secret_file,
        secret=secret,
        operators=operators,
        cache_salt=_yes_or_no("cache_salt", tables.get("cache_salt", True)),
        jwt=jwt,
        jwks=jwks,
    )


def _known(at: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    names = list(known)
    for name in table:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise _ProblemError(f"{at} {name} is unknown; {hint}".lstrip())


def _table(at: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _ProblemError(f"{at} is no table")
    return value


def _texts(at: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _ProblemError(f"{at} must be a list of strings")
    return texts


def _text(at: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _ProblemError(f"{at} must be a string that is not empty")
    return value


def _path(file: str, at: str, value: object) -> str:
    """Return a path that is relative to the file it is written in."""
    return str(Path(file).parent / _text(at, value))


def _yes_or_no(at: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _ProblemError(f"{at} must be true or false")
    return value


def _hashes(at: str, value: object, owner: str, seen: dict[bytes, str]) -> tuple[bytes, ...]:
    hashes = list[bytes]()
    for number, text in enumerate(_texts(at, value), 1):
        found = _HASH.fullmatch(text)
        if found is None:
            # Not its text: somebody may have written the key itself.
            raise _ProblemError(
                f'{at}: number {number} is no "sha256:" with 64 hex digits: see `kvplane tenant key`'
            )
        digest = bytes.fromhex(found[1])
        if digest in seen:
            raise _ProblemError(f"{at}: number {number} is also a key of {seen[digest]}: each has one owner")
        seen[digest] = owner
        hashes.append(digest)
    return tuple(hashes)


def _number(at: str, value: object, *, whole: bool, least: float, most: float = 1e12) -> float:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise _ProblemError(f"{at} must be {kind} from {least:g} to {most:g}, not {value!r}")
    return value


def _quota(at: str, table: Mapping[str, Any], default: Quota) -> Quota:
    def limit(name: str, otherwise: float | None, *, whole: bool, least: float) -> float | None:
        value = table.get(name, otherwise)
        if value is None or value == _UNLIMITED:
            return None
        return _number(f"{at} {name}", value, whole=whole, least=least)

    def count(name: str, otherwise: int | None, least: int) -> int | None:
        value = limit(name, otherwise, whole=True, least=least)
        return None if value is None else int(value)

    return Quota(
        limit("requests_per_second", default.requests_per_s, whole=False, least=0.001),
        count("burst", default.burst, 1),
        count("concurrent_requests", default.concurrent, 1),
        count("tokens_per_minute", default.tokens_per_minute, 1),
    )


def _jwt(file: str, table: Mapping[str, Any]) -> JwtSettings:
    _known("[jwt]", table, _JWT)
    for name in ("issuer", "audience"):
        if name not in table:
            raise _ProblemError(f"[jwt] {name} is missing: without it tokens made for others would be taken")
    if ("jwks_file" in table) is ("jwks_url" in table):
        raise _ProblemError("[jwt] needs one of jwks_file and jwks_url")
    algorithms = tuple(_texts("[jwt] algorithms", table.get("algorithms", ["RS256", "ES256"])))
    for algorithm in algorithms:
        if algorithm not in ASYMMETRIC:
            raise _ProblemError(
                f"[jwt] algorithms: {algorithm[:20]!r} is not among {', '.join(sorted(ASYMMETRIC))}"
            )
    if not algorithms:
        raise _ProblemError("[jwt] algorithms must name at least one")
    url = table.get("jwks_url")
    if url is not None:
        _check_url(_text("[jwt] jwks_url", url))

    def path(name: str) -> str | None:
        return _path(file, f"[jwt] {name}", table[name]) if name in table else None

    def seconds(name: str, default: float, least: float) -> float:
        return _number(f"[jwt] {name}", table.get(name, default), whole=False, least=least, most=86_400)

    return JwtSettings(
        issuer=_text("[jwt] issuer", table["issuer"]),
        audience=tuple(_texts("[jwt] audience", table["audience"])),
        tenant_claim=_text("[jwt] tenant_claim", table.get("tenant_claim", "tenant")),
        jwks_url=url,
        algorithms=algorithms,
        unlisted=_yes_or_no("[jwt] unlisted", table.get("unlisted", False)),
        jwks_file=path("jwks_file"),
        jwks_ca=path("jwks_ca"),
        leeway_s=seconds("leeway", 30, 0),
        refetch_s=seconds("refetch", 60, 1),
        refresh_s=seconds("refresh", 3600, 1),
    )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.username is not None or parts.scheme not in ("http", "https"):
        raise _ProblemError("[jwt] jwks_url must be a URL as https://HOST/PATH")
    if parts.scheme == "http" and host not in ("127.0.0.1", "::1", "localhost"):
        raise _ProblemError("[jwt] jwks_url must be https: who can change the keys can be any tenant")
