"""Connections to engines."""

from __future__ import annotations

import ssl

import aiohttp

from kvplane.router.reach import CheckedResolver, Reach
from kvplane.router.settings import RouterSettings

_KEEPALIVE_S = 4.0
"""vLLM closes idle connections after 5 s; one that closes as we write costs a retry."""


def engine_session(settings: RouterSettings, context: ssl.SSLContext, reach: Reach) -> aiohttp.ClientSession:
    """Return what talks to engines; `context` is for those by https. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=context, resolver=CheckedResolver(reach)
        ),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.idle_timeout_s
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        # A chunk of a stream is never larger than this before it is passed on.
        read_bufsize=1 << 18,
    )
