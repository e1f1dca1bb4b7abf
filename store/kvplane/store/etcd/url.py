"""The URL of an etcd store, in parts."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from kvplane.store.errors import StoreUrlError
from kvplane.store.etcd.password import password_in
from kvplane.store.etcd.settings import (
    DEFAULT_PREFIX,
    DEFAULT_TIMEOUT_S,
    MAX_PREFIX_BYTES,
    EtcdSettings,
    EtcdTls,
    EtcdTlsPaths,
)

SCHEMES = ("etcd", "etcd3")
DEFAULT_PORT = 2379
_TLS_OPTIONS = ("ca", "cert", "key", "server_name")
_OPTIONS = ("tls", *_TLS_OPTIONS, "password_file", "timeout")
_TIMEOUT_S = (0.1, 60.0)
_MAX_FILE_BYTES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_FORM = "etcd://[user@]host:port[,host:port...][/prefix][?options]"


def etcd_settings(url: str) -> EtcdSettings:
    """Return what `etcd://[user@]host:port[,host:port...][/prefix][?options]` says; files are read here.

    Raises StoreUrlError, which repeats nothing of the URL that could be secret.
    """
    rest, _, fragment = url.partition("://")[2].partition("#")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    if fragment:
        raise StoreUrlError(f"etcd:// takes no fragment; its form is {_FORM}")
    options = _options(query)
    user = _user(userinfo, options)
    return EtcdSettings(
        endpoints=_endpoints(hosts),
        prefix=_prefix(path),
        timeout_s=_timeout(options),
        tls=_tls(options),
        user=user,
        password=_password(options) if user else "",
        password_file=options["password_file"] if user else "",
    )


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise StoreUrlError(f"etcd:// has no option {name[:40]!r}; allowed: {', '.join(_OPTIONS)}")
        if name in options:
            raise StoreUrlError(f"etcd:// has the option {name} twice")
        if not text:
            raise StoreUrlError(f"etcd:// has the option {name} without a value")
        options[name] = text
    return options


def _user(userinfo: str, options: Mapping[str, str]) -> str:
    if ":" in userinfo:
        raise StoreUrlError("etcd:// takes no password; put it into a file, named by password_file=")
    user = unquote(userinfo)
    if user and "password_file" not in options:
        raise StoreUrlError("etcd:// with a user needs password_file=, the path of a file with the password")
    if not user and "password_file" in options:
        raise StoreUrlError(f"etcd:// has a password_file, but no user; its form is {_FORM}")
    return user


def _endpoints(hosts: str) -> tuple[str, ...]:
    endpoints = tuple(_endpoint(entry) for entry in hosts.split(","))
    if len(set(endpoints)) < len(endpoints):
        raise StoreUrlError("etcd:// names an endpoint twice")
    return endpoints


def _endpoint(entry: str) -> str:
    """Return host:port. Raises StoreUrlError."""
    if entry.startswith("["):
        address, closed, port = entry[1:].partition("]")
        try:
            host = f"[{ipaddress.IPv6Address(address)}]"
        except ValueError:
            closed = ""
        if not closed or (port and not port.startswith(":")):
            raise StoreUrlError("etcd:// has brackets around something that is no IPv6 address")
        port = port[1:] if port else str(DEFAULT_PORT)
    else:
        host, colon, port = entry.partition(":")
        port = port if colon else str(DEFAULT_PORT)
        if ":" in port:
            raise StoreUrlError("etcd:// needs brackets around an IPv6 address, e.g. etcd://[::1]:2379")
        if not host:
            raise StoreUrlError(f"etcd:// has an endpoint without a host; its form is {_FORM}")
        if not _HOST.fullmatch(host):
            raise StoreUrlError("etcd:// has a host that is neither a name nor an address")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise StoreUrlError("etcd:// has a port that is not a number from 1 to 65535")
    return f"{host}:{int(port)}"


def _prefix(path: str) -> bytes:
    stem = unquote_to_bytes(path).strip(b"/")
    prefix = b"/" + stem + b"/" if stem else DEFAULT_PREFIX
    if len(prefix) > MAX_PREFIX_BYTES:
        raise StoreUrlError(f"etcd:// takes a prefix of at most {MAX_PREFIX_BYTES} bytes, slashes included")
    return prefix


def _timeout(options: Mapping[str, str]) -> float:
    text = options.get("timeout", str(DEFAULT_TIMEOUT_S))
    least, most = _TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        raise StoreUrlError(f"etcd:// takes {least:g} to {most:g} seconds for timeout, not {text[:20]!r}")
    return seconds


def _tls(options: Mapping[str, str]) -> EtcdTls | None:
    given = [name for name in _TLS_OPTIONS if name in options]
    tls = options.get("tls", "true" if given else "false")
    if tls not in ("true", "false"):
        raise StoreUrlError(f"etcd:// takes true or false for tls, not {tls[:20]!r}")
    if tls == "false":
        if given:
            raise StoreUrlError(f"etcd:// has tls=false and {given[0]}, which is for TLS")
        return None
    if ("cert" in options) != ("key" in options):
        raise StoreUrlError("etcd:// needs cert and key together: the client's certificate and its key")
    return EtcdTls(
        ca=_pem(options, "ca"),
        cert=_pem(options, "cert"),
        key=_pem(options, "key"),
        server_name=options.get("server_name", ""),
        paths=EtcdTlsPaths(*(options.get(name, "") for name in ("ca", "cert", "key"))),
    )


def _pem(options: Mapping[str, str], name: str) -> bytes | None:
    if name not in options:
        return None
    content = _read(options, name)
    if b"-----BEGIN " not in content:
        raise StoreUrlError(f"etcd:// has a file for {name} that is not PEM")
    return content


def _password(options: Mapping[str, str]) -> str:
    content = _read(options, "password_file")
    try:
        return password_in(content)
    except ValueError as error:
        raise StoreUrlError(f"etcd:// has a password_file that is {error}") from None


def _read(options: Mapping[str, str], name: str) -> bytes:
    try:
        with Path(options[name]).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise StoreUrlError(f"etcd:// cannot read the file that {name} names: {reason}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise StoreUrlError(f"etcd:// has a file for {name} that is too large to be one")
    return content
