"""From a URL to a store."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from kvplane.store.base import Store
from kvplane.store.clock import Clock
from kvplane.store.errors import StoreUrlError
from kvplane.store.etcd import url as etcd_url
from kvplane.store.etcd.store import EtcdStore
from kvplane.store.memory import HISTORY_BYTES, HISTORY_REVISIONS, MemoryStore

__all__ = ["StoreUrlError", "open_store", "without_password"]

_MEMORY_PARAMETERS = ("history_revisions", "history_bytes")
_MAX_DIGITS = 18
_ALLOWED = "allowed: memory://, etcd:// and etcd3://"


def open_store(url: str, clock: Clock) -> Store:
    """Return the store that `url` names; nothing is connected yet.

    `memory://`, with the options `history_revisions` and `history_bytes`, is a new store in this process.
    `etcd://[user@]host:port[,host:port...][/prefix][?options]` (or `etcd3://`) is an etcd cluster; the
    options are `tls`, `ca`, `cert`, `key`, `server_name`, `password_file` and `timeout`. Files that it names
    are read here. Raises StoreUrlError.
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if not scheme:
        raise StoreUrlError(f"the store's URL has no scheme; {_ALLOWED}")
    if scheme in etcd_url.SCHEMES:
        return EtcdStore(etcd_url.etcd_settings(url), clock)
    if scheme != "memory":
        named = f" {scheme}://" if scheme.isalnum() else ""
        raise StoreUrlError(f"unknown store scheme{named}; {_ALLOWED}")
    return _memory_store(url, clock)


def without_password(url: str) -> str:
    """Return a store's URL as it may be shown: none needs a password, but somebody may have written one."""
    scheme, separator, rest = url.partition("://")
    userinfo, at, hosts = rest.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    return f"{scheme}{separator}{user}:***@{hosts}" if at and colon else url


def _memory_store(url: str, clock: Clock) -> Store:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreUrlError("the store's URL cannot be parsed; try memory://") from error
    if parts.netloc or parts.path or parts.fragment:
        raise StoreUrlError("memory:// takes no host, path or fragment, only options after a question mark")
    options = _options(parts.query)
    return MemoryStore(
        clock,
        history_revisions=options.get("history_revisions", HISTORY_REVISIONS),
        history_bytes=options.get("history_bytes", HISTORY_BYTES),
    )


def _options(query: str) -> dict[str, int]:
    """Return the options of a memory:// URL. Raises StoreUrlError."""
    options: dict[str, int] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _MEMORY_PARAMETERS:
            allowed = ", ".join(_MEMORY_PARAMETERS)
            raise StoreUrlError(f"memory:// has no option {name!r}; allowed: {allowed}")
        if name in options:
            raise StoreUrlError(f"memory:// has the option {name} twice")
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS) or int(text) < 1:
            short = text if len(text) <= _MAX_DIGITS else f"{text[:_MAX_DIGITS]}..."
            raise StoreUrlError(f"memory:// takes a whole number of at least 1 for {name}, not {short!r}")
        options[name] = int(text)
    return options
