"""An engine's end of its stream: announces in batches, reads what comes back, frees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import grpc

from kvplane.bench import payload
from kvplane.bench.rig import DEADLINE_S, BenchError
from kvplane.v1 import common_pb2, engine_pb2, engine_pb2_grpc

BATCH = 64
"""Announcements of one message."""
WINDOW = 8
"""Messages on their way at once."""
_ATTACH = "/kvplane.v1.EngineService/AttachEngine"
_MOST = 1024
_START_S = 10.0
_ACCEPTED = common_pb2.ANNOUNCE_OUTCOME_ACCEPTED


async def pump(call: Any, messages: Sequence[bytes], window: int, answered: asyncio.Semaphore) -> None:
    """Write messages, never more than `window` ahead of the answers, for which `answered` is released."""
    async with asyncio.timeout(DEADLINE_S + len(messages)):
        for index, message in enumerate(messages):
            if index >= window:
                await answered.acquire()
            await call.write(message)
        for _ in range(min(window, len(messages))):
            await answered.acquire()


class Engine:
    """A registered engine with an open stream."""

    def __init__(self, call: Any, epoch: int) -> None:
        self._call = call
        self.epoch = epoch
        self._sequence = 0
        self._answered = asyncio.Semaphore(0)
        self._acks: list[bytes] = []
        self.orders: list[str] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def attached(cls, channel: grpc.aio.Channel) -> Self:
        """Register an engine and open its stream."""
        answer = await _registered(channel)
        engine = cls(channel.stream_stream(_ATTACH)(), answer.engine_epoch)
        hello = engine_pb2.EngineHello(engine_id=payload.ENGINE_ID, engine_epoch=engine.epoch)
        await engine.send([engine.message(hello=hello)])
        return engine

    async def aclose(self) -> None:
        """End the stream."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._call.cancel()

    def message(self, **members: Any) -> bytes:
        """Make the next message."""
        self._sequence += 1
        return engine_pb2.AttachEngineRequest(sequence=self._sequence, **members).SerializeToString()

    def announcements(self, announcements: Iterable[common_pb2.Announcement]) -> list[bytes]:
        """Make messages of BATCH announcements each."""
        return [self.message(announcements=batch) for batch in _batches(announcements, BATCH)]

    async def send(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send messages, WINDOW of them ahead; returns the acknowledgements once all are there."""
        self._acks = []
        sending = asyncio.create_task(pump(self._call, messages, WINDOW, self._answered))
        await asyncio.wait((sending, self._reading), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            sending.cancel()
            self._reading.result()
            raise BenchError("the engine's stream ended")
        sending.result()
        return self._acks

    async def retain(self, conversations: payload.Conversations, numbers: Sequence[int]) -> None:
        """Announce conversations, all of which have to be accepted."""
        for start in range(0, len(numbers), _MOST * BATCH):
            part = numbers[start : start + _MOST * BATCH]
            messages = self.announcements(conversations.announcement(number) for number in part)
            check_accepted(await self.send(messages), len(part))

    async def free(self, request_ids: Iterable[str]) -> None:
        """Report blocks as freed: whatever is on record of them goes."""
        freed = (engine_pb2.Freed(request_id=request_id) for request_id in request_ids)
        await self.send([self.message(freed=batch) for batch in _batches(freed, _MOST)])

    async def _read(self) -> None:
        while (raw := await self._call.read()) is not grpc.aio.EOF:
            answer = engine_pb2.AttachEngineResponse.FromString(raw)
            if answer.acknowledged_sequence:
                self._acks.append(raw)
                self._answered.release()
            self.orders += [order.request_id for order in answer.release_orders]


async def _registered(channel: grpc.aio.Channel) -> engine_pb2.RegisterEngineResponse:
    """Register; a control plane that has only begun to follow its store is given time."""
    stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
    request = engine_pb2.RegisterEngineRequest(spec=payload.spec())
    until = time.monotonic() + _START_S
    while True:
        try:
            answer: engine_pb2.RegisterEngineResponse
            answer = await stub.RegisterEngine(request, timeout=DEADLINE_S)
            return answer
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() >= until:
                raise
        await asyncio.sleep(0.1)


def check_accepted(acks: Sequence[bytes], expected: int) -> None:
    """Raise BenchError unless so many announcements were accepted, and none was not."""
    outcomes = [
        result.outcome
        for ack in acks
        for result in engine_pb2.AttachEngineResponse.FromString(ack).announcements
    ]
    accepted = outcomes.count(_ACCEPTED)
    if accepted != expected or len(outcomes) != expected:
        raise BenchError(f"{accepted} of {expected} announcements were accepted")


def _batches(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
