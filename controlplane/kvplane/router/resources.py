"""What a router runs out of itself: not a fault of the engine whose turn it was."""

from __future__ import annotations

import errno
import os
import resource

import aiohttp

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NOT_CONNECTED = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
    UnicodeError,  # a host name that IDNA cannot encode
)
"""What is raised where no connection came about: nobody has seen anything of the request."""
_OTHER_FILES = 128
_MOST_FILES = 1 << 20


def exhausted(error: BaseException) -> bool:
    """Tell whether a connection failed for want of something that this process or machine has run out of."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, OSError) and cause.errno in _EXHAUSTED


def told(error: BaseException) -> str:
    """Return what to say of an error.

    aiohttp's words for a connection that did not come about name TLS even where the URL is plain http.
    """
    if not isinstance(error, aiohttp.ClientConnectorError) or isinstance(error, aiohttp.ClientSSLError):
        return str(error)
    cause = error.os_error
    why = cause.strerror or str(cause)
    if why.startswith("Connect call failed") and cause.errno:
        why = os.strerror(cause.errno)
    return f"cannot connect to {error.host}:{error.port}: {why}"


def raise_file_limit() -> None:
    """Have this process use as many files as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def too_few_files(max_requests: int) -> str | None:
    """Return what is wrong if this process may not open enough files for so many requests (0: no bound)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max_requests + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed or not max_requests:
        return None
    return (
        f"this process may open {soft} files, and {max_requests} requests (--max-requests) need {needed}:"
        " raise the limit (ulimit -n, LimitNOFILE=)"
    )
