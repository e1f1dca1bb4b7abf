"""Request bodies, read within bounds of size, time and memory."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvplane.router.admission import OverloadedError

_SMALL = 64 * 1024
"""Smaller bodies are not counted: their number is bounded by that of requests."""


class Bodies:
    """Reads bodies. Those that are large are counted together until their requests are done.

    `max_bytes` bounds one (decompressed), `timeout_s` the time from its headers to its end, `budget_bytes`
    all of the large ones that are under way.
    """

    def __init__(self, *, max_bytes: int, timeout_s: float, budget_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._budget_bytes = budget_bytes
        self._by_request: dict[int, int] = {}
        self.held_bytes = 0
        """Of large bodies under way."""

    async def read(self, request: web.Request) -> bytes:
        """Return a request's body.

        Raises HTTPRequestEntityTooLarge, HTTPRequestTimeout, RequestPayloadError (it cannot be decoded) or
        OverloadedError (too much is under way). The caller calls `done` in any case.
        """
        if request.content.is_eof() and (request.content_length or _SMALL) < _SMALL:
            return await request.read()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(request)
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    async def _read(self, request: web.Request) -> bytes:
        length = request.content_length or 0
        if length > self._max_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_bytes, length)
        self._hold(request, length)
        body = bytearray()
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > self._max_bytes:
                raise web.HTTPRequestEntityTooLarge(self._max_bytes, len(body))
            self._hold(request, len(body))
        return bytes(body)

    def _hold(self, request: web.Request, size: int) -> None:
        held = self._by_request.get(id(request), 0)
        if size <= max(held, _SMALL):
            return
        if self.held_bytes - held + size > self._budget_bytes:
            raise OverloadedError("Too many large requests are under way; try again later.", 503, 1)
        self.held_bytes += size - held
        self._by_request[id(request)] = size

    def done(self, request: web.Request) -> None:
        """Count a request's body no longer. Idempotent."""
        self.held_bytes -= self._by_request.pop(id(request), 0)
