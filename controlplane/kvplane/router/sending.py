"""Sending streams to clients, who may stop reading while engines are held up for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import web

_LARGE = 1 << 15
"""More than that may have to wait for its client although all before it is gone."""


class ClientStalledError(Exception):
    """A client takes no more of its stream."""


async def send(out: web.StreamResponse, request: web.Request, data: bytes, limit_s: float) -> None:
    """Send a part of a stream; wait for a client that is behind, at most `limit_s` seconds each time.

    Raises ClientStalledError, and ConnectionError for a client that has gone.
    """
    transport = request.transport
    if transport is None or (len(data) < _LARGE and not transport.get_write_buffer_size()):
        # What was sent before is gone, and this fits: it does not wait.
        await out.write(data)
    else:
        await _in_time(request, out.write(data), limit_s)


async def finish(out: web.StreamResponse, request: web.Request, limit_s: float) -> None:
    """End a stream in the same way."""
    await _in_time(request, out.write_eof(), limit_s)


async def _in_time(request: web.Request, sending: Awaitable[None], limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s) as patience:
            await sending
    except TimeoutError:
        if not patience.expired():
            raise
        if request.transport is not None:
            request.transport.abort()  # closing it would wait for the client as well
        raise ClientStalledError(f"the client took nothing for {limit_s:g} s") from None
