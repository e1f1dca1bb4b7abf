"""A Turns stream to a control plane in the same process: like gRPC's, without the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import copy_context
from typing import Any

import grpc

from kvplane.controlplane.turn_streams import Write
from kvplane.tracing.context import CURRENT
from kvplane.v1 import location_pb2 as pb

Serve = Callable[[AsyncIterator[pb.TurnsRequest], Write], Coroutine[Any, Any, None]]
"""Performs the operations of a stream as they come, and writes their answers."""


class LocalTurns:
    """One stream, with what kvplane.client's TurnsStream uses of grpc.aio's calls.

    It is served from when it is made until it is cancelled or `serve` fails. Whoever holds it is trusted.
    """

    def __init__(self, serve: Serve) -> None:
        self._requests: asyncio.Queue[pb.TurnsRequest] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.TurnsResponse | None] = asyncio.Queue()
        context = copy_context()
        context.run(CURRENT.set, None)  # operations say themselves which trace they are of
        serving = serve(self._operations(), self._answers.put)
        self._serving = asyncio.create_task(serving, name="local-turns", context=context)
        self._serving.add_done_callback(lambda _: self._answers.put_nowait(None))

    async def _operations(self) -> AsyncIterator[pb.TurnsRequest]:
        while True:
            yield await self._requests.get()

    async def write(self, request: pb.TurnsRequest) -> None:
        """Send operations. Raises asyncio.InvalidStateError once the stream has ended, as gRPC does."""
        if self._serving.done():
            raise asyncio.InvalidStateError("the stream has ended")
        self._requests.put_nowait(request)

    async def read(self) -> pb.TurnsResponse | object:
        """Return the next answers, grpc.aio.EOF when there are none to come."""
        answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)  # for the next one
            return grpc.aio.EOF
        return answer

    async def code(self) -> grpc.StatusCode:
        """Return how it has ended, or will."""
        await asyncio.wait([self._serving])
        cancelled = self._serving.cancelled()
        return grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.INTERNAL

    def cancel(self) -> None:
        """End it; operations under way are given up."""
        self._serving.cancel()
