"""Request bodies, read within bounds of size, time and memory."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvplane.router.admission import TENANT, OverloadedError
from kvplane.router.shares import Shares

_SMALL = 64 * 1024
"""Smaller bodies that came with their headers are not counted: their requests are."""
_ENCODINGS = ("", "identity", "gzip", "deflate", "br", "zstd")
"""Of a body, as the server unpacks them; what it has no library for it cannot decode."""


class BodyError(Exception):
    """A body cannot be read, by the client's fault; `status` is 400, 408, 413 or 415."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Bodies:
    """Reads bodies. Those that are large, or not there yet, are counted until their requests are done.

    `max_bytes` bounds one (decompressed), `timeout_s` the time from its headers to its end, `budget_bytes`
    all that are counted.
    """

    def __init__(self, *, max_bytes: int, timeout_s: float, budget_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._by_request: dict[int, int] = {}
        self._held = Shares(budget_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies that are counted."""
        return self._held.taken

    async def read(self, request: web.Request) -> bytes:
        """Return a request's body.

        Raises BodyError or OverloadedError (too much is under way). The caller calls `done` in any case.
        """
        encoding = request.headers.get("Content-Encoding", "").strip()
        if encoding.lower() not in _ENCODINGS:
            raise BodyError(f"The Content-Encoding {encoding[:100]!r} is not supported.", 415)
        try:
            if request.content.is_eof() and (request.content_length or _SMALL) < _SMALL:
                return await request.read()
            async with asyncio.timeout(self._timeout_s):
                return await self._read(request)
        except TimeoutError:
            raise BodyError("The request body did not come in time.", 408) from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError:
            raise BodyError("The request body cannot be decoded.", 400) from None

    def _too_large(self) -> BodyError:
        return BodyError(f"The request body is larger than {self._max_bytes} bytes.", 413)

    async def _read(self, request: web.Request) -> bytes:
        length = request.content_length or 0
        if length > self._max_bytes:
            raise self._too_large()
        self._hold(request, length)
        body = bytearray()
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > self._max_bytes:
                raise self._too_large()
            self._hold(request, len(body))
        return bytes(body)

    def _hold(self, request: web.Request, size: int) -> None:
        held = self._by_request.get(id(request), 0)
        if size <= held:
            return
        tenant = TENANT.get()
        if not self._held.may_take(tenant, size - held):
            raise OverloadedError("Too many bytes of requests are under way; try again later.", 503, 1)
        self._held.take(tenant, size - held)
        self._by_request[id(request)] = size

    def done(self, request: web.Request) -> None:
        """Count a request's body no longer. Idempotent."""
        self._held.give(TENANT.get(), self._by_request.pop(id(request), 0))
