"""Connections to engines, and to what tells of engines: none is waited for that has broken."""

from __future__ import annotations

import functools
import ssl
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from kvplane.router.reach import CheckedResolver, Reach
from kvplane.router.settings import RouterSettings

_KEEPALIVE_S = 4.0
"""vLLM closes idle connections after 5 s; one that closes as we write costs a retry."""


class _Handler(ResponseHandler):
    """Reads answers. aiohttp (3.14) forgets who reads a body whose chunks turn out to be malformed.

    It closes the connection, with it the limit on silence ends, and what has come of the body never ends.
    """

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """Note what has broken, and tell who reads the body."""
        super().set_exception(exc, *cause)
        body = self._payload
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError(f"the answer broke off: {exc}"))


class Connector(aiohttp.TCPConnector):
    """A pool of connections as aiohttp's, with readers that hear of what has broken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        make: functools.partial[Any] = functools.partial(_Handler, loop=self._loop)
        self._factory = make


MAX_ANSWER_BYTES = 256 << 20
"""Of an engine's answer that is not streamed."""
MAX_LIST_BYTES = 8 << 20
"""Of an engine's list of models, its version, and a page of pods."""


async def read_answer(
    response: aiohttp.ClientResponse, most: int = MAX_ANSWER_BYTES, first: bytes = b""
) -> bytes:
    """Return what is left of an answer's body, after what has been read `first`.

    Raises aiohttp's ClientError, also for one that is too large, which it closes.
    """
    pieces, size = [first], len(first)
    while piece := await response.content.readany():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            response.close()
            raise aiohttp.ClientPayloadError(f"the answer is larger than {most} bytes")
    return b"".join(pieces)


def engine_session(settings: RouterSettings, context: ssl.SSLContext, reach: Reach) -> aiohttp.ClientSession:
    """Return what talks to engines; `context` is for those by https. The caller closes it."""
    return aiohttp.ClientSession(
        connector=Connector(
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
