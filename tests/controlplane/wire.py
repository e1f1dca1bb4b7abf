"""A server on a socket, clients of it, and an engine's end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from kvplane.client import model as cm
from kvplane.client.client import ControlPlaneClient, open_channel
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.model import Settings
from kvplane.controlplane.quotas import TenantLimits
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock
from kvplane.tracing.context import Tracer
from kvplane.v1 import common_pb2, engine_pb2, location_pb2
from tests.controlplane.harness import PARAMS

KEY = cm.ConversationKey("t", "m", "c")
SPEC = cm.EngineSpec(cm.EngineId("d"), cm.EngineRole.DECODE, cm.EngineProfile(model="m", block_size=16))


class Wire:
    """A server over a store that can fail, and clients of it."""

    def __init__(
        self,
        limits: TenantLimits | None = None,
        *,
        metered: bool = False,
        tracer: Tracer | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.memory = MemoryStore(self.clock)
        self.store = FaultInjectingStore(self.memory)
        self.meter = Meter(self.clock) if metered else None
        store = self.store if self.meter is None else self.meter.instrument(self.store)
        self.server = ControlPlaneServer(
            store, self.clock, settings, limits=limits, meter=self.meter, tracer=tracer
        )
        self.address = ""

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1:0')}"
        self.client = ControlPlaneClient(self.address, timeout_s=10)
        self.channel = open_channel(self.address)

    async def stop(self) -> None:
        await self.channel.close()
        await self.client.aclose()
        await self.server.stop(0)
        await self.memory.aclose()

    async def call(self, method: str, request: Any) -> Any:
        """Call a method by name, as the wire has it."""
        service, name = ("EngineService" if "Engine" in method else "LocationService"), method
        descriptor = descriptor_pool.Default().FindServiceByName(f"kvplane.v1.{service}")
        answer_type = message_factory.GetMessageClass(descriptor.methods_by_name[name].output_type)
        call = self.channel.unary_unary(
            f"/kvplane.v1.{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer_type.FromString,
        )
        return await call(request, timeout=10)

    async def retain(self, epoch: int, request_id: str = "q1", key: cm.ConversationKey = KEY) -> int:
        turn = (await self.client.begin_turn(key, f"begin-{request_id}")).turn
        result = await self.client.announce_location(
            SPEC.engine_id, epoch, announcement(request_id, turn, key)
        )
        assert result.outcome is cm.AnnounceOutcome.ACCEPTED
        return turn


def announcement(request_id: str, turn: int, key: cm.ConversationKey = KEY) -> cm.Announcement:
    print_ = cm.Fingerprint(64, b"x" * 16)
    return cm.Announcement(key, cm.RequestId(request_id), turn, 100, 4, PARAMS, print_, 400.0)


def wire_key(**parts: str) -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(**{"tenant_id": "t", "model": "m", "conversation_id": "c", **parts})


def wire_begin(**parts: str) -> location_pb2.BeginTurnRequest:
    return location_pb2.BeginTurnRequest(key=wire_key(**parts), request_id="r")


class Stream:
    """An engine's end of its stream."""

    def __init__(self, wire: Wire) -> None:
        self._queue: asyncio.Queue[engine_pb2.AttachEngineRequest | None] = asyncio.Queue()
        self._answers = wire.client.attach_engine(self._requests())
        self._sequence = 0

    async def _requests(self) -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        while (request := await self._queue.get()) is not None:
            yield request

    def send(self, **members: Any) -> None:
        self._sequence += 1
        self._queue.put_nowait(engine_pb2.AttachEngineRequest(sequence=self._sequence, **members))

    def hello(self, epoch: int) -> None:
        self.send(hello=engine_pb2.EngineHello(engine_id="d", engine_epoch=epoch))

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def next(self) -> engine_pb2.AttachEngineResponse:
        return await asyncio.wait_for(anext(self._answers), 60)

    async def until(
        self, found: Callable[[engine_pb2.AttachEngineResponse], bool]
    ) -> engine_pb2.AttachEngineResponse:
        while not found(answer := await self.next()):
            pass
        return answer
