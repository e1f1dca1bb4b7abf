"""From a URL to a store."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from kvplane.store.base import Store
from kvplane.store.clock import Clock
from kvplane.store.memory import HISTORY_BYTES, HISTORY_REVISIONS, MemoryStore

_MEMORY_PARAMETERS = ("history_revisions", "history_bytes")
_MAX_DIGITS = 18
_ETCD_SCHEMES = ("etcd", "etcd3")


class StoreUrlError(ValueError):
    """A store's URL that cannot work. One line that says why and what would; never repeats the URL itself,
    which may hold a password.
    """


def open_store(url: str, clock: Clock) -> Store:
    """Return the store that `url` names; nothing is connected yet.

    `memory://`, with the options `history_revisions` and `history_bytes`, is a new store in this process.
    Raises StoreUrlError.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreUrlError("the store's URL cannot be parsed; try memory://") from error
    if "://" not in url or not parts.scheme:
        raise StoreUrlError("the store's URL has no scheme; allowed: memory://")
    if parts.scheme in _ETCD_SCHEMES:
        raise StoreUrlError(
            f"{parts.scheme}:// cannot be used: this version of kvplane has no etcd backend yet;"
            " allowed: memory://"
        )
    if parts.scheme != "memory":
        raise StoreUrlError(f"unknown store scheme {parts.scheme}://; allowed: memory://")
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
