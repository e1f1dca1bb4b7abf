"""How many connections a server takes."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 16_384
_OTHER_FILES = 128
"""For the store, logs, metrics and files that are read again."""
_LEAST = 16


def most_connections(limit: int | None = None) -> int:
    """Return how many connections to take of a process that may have `limit` files open; None: this one.

    What is beyond is closed at once, so that strangers who connect take away neither the store's
    connections nor the files of certificates.
    """
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(_LEAST, min(MAX_CONNECTIONS, limit - _OTHER_FILES))
