"""A Turns stream for claimers: batches with a deadline; what was not answered in time is never heard."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import ControlPlaneError
from kvplane.v1 import location_pb2

OnResult = Callable[[location_pb2.TurnsResult, float], None]
"""Called with an answer and the time at which it came."""


_Outbox = asyncio.Queue[Sequence[location_pb2.TurnsOperation] | None]
"""What is to be sent; None ends the stream."""


class TurnStream:
    """One stream to one replica, opened anew after each failure. For one caller at a time.

    Args:
        address: of the replica.
        on_result: takes the answers, in the order in which they come.
        on_error: told the name of what ended a stream.
    """

    def __init__(self, address: str, on_result: OnResult, on_error: Callable[[str], None]) -> None:
        self.address = address
        self._on_result = on_result
        self._on_error = on_error
        self._client = ControlPlaneClient(address)
        self._outbox: _Outbox | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: set[int] = set()
        self._done = asyncio.Event()

    async def ask(self, operations: Sequence[location_pb2.TurnsOperation], timeout_s: float) -> int:
        """Send operations and wait for the answers; returns how many did not come."""
        if self._reading is None or self._reading.done():
            self._outbox = _Outbox()
            self._reading = asyncio.create_task(self._read(self._outbox))
        assert self._outbox is not None
        self._waiting = {operation.id for operation in operations}
        self._done.clear()
        self._outbox.put_nowait(operations)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        missing = len(self._waiting)
        if missing:
            await self._drop()
        return missing

    async def _read(self, outbox: _Outbox) -> None:
        async def batches() -> AsyncIterator[Sequence[location_pb2.TurnsOperation]]:
            while (batch := await outbox.get()) is not None:
                yield batch

        try:
            async for results in self._client.turns(batches()):
                at = time.monotonic()
                for result in results:
                    self._waiting.discard(result.id)
                    self._on_result(result, at)
                if not self._waiting:
                    self._done.set()
        except ControlPlaneError as error:
            self._on_error(error.reason or type(error).__name__)
        self._done.set()

    async def _drop(self) -> None:
        """End the stream, and a connection that may be dead with it."""
        self._waiting = set()
        if self._reading is not None:
            if self._outbox is not None:
                self._outbox.put_nowait(None)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    async def aclose(self) -> None:
        """End the stream and close the channel."""
        await self._drop()
        await self._client.aclose()
