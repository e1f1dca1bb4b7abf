"""Hours without a control plane, or with one that comes and goes: memory, log and queues stay as they are."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import structlog

from kvplane.client import events as ev
from kvplane.client.errors import ControlPlaneUnavailableError, from_rpc_error
from kvplane.client.model import ConversationKey, EngineId, EngineLoad, EngineRole, EngineSpec, Registration
from kvplane.client.outbox import Outbox
from kvplane.client.session import EngineSession
from kvplane.client.sparing import LINES
from kvplane.client.sync import EngineSessionThread
from kvplane.connector.chains import ChainCache
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.envelope import Envelope
from kvplane.connector.fingerprint import Context
from kvplane.connector.keeper import FinishedTurn, Keeper
from kvplane.connector.retention import Retention
from kvplane.v1 import engine_pb2

HOUR_S = 3600.0
SPEC = EngineSpec(EngineId("d0"), EngineRole.DECODE)


class Gone:
    """A control plane that nobody can reach, for changing reasons."""

    connected = False

    def __init__(self) -> None:
        self.attempts = 0

    async def wait_connected(self) -> None:
        self.attempts += 1
        await asyncio.sleep(0)
        if self.attempts % 3:
            raise ControlPlaneUnavailableError("no connection")
        raise from_rpc_error(
            grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, grpc.aio.Metadata(), grpc.aio.Metadata())
        )

    async def aclose(self) -> None:
        pass


class Flapping(Gone):
    """A control plane that takes a registration, answers once, and is gone again."""

    connected = True

    async def wait_connected(self) -> None:
        self.attempts += 1
        await asyncio.sleep(0)

    async def register_engine(self, spec: EngineSpec, *, request_id: str) -> Registration:
        return Registration(self.attempts, 10.0, 480.0, 30.0)

    async def attach_engine(
        self, requests: AsyncIterator[engine_pb2.AttachEngineRequest]
    ) -> AsyncIterator[engine_pb2.AttachEngineResponse]:
        message = await anext(requests)
        yield engine_pb2.AttachEngineResponse(acknowledged_sequence=message.sequence)
        await requests.aclose()  # type: ignore[attr-defined]  # it is a generator
        raise ControlPlaneUnavailableError("gone again")

    async def deregister_engine(self, engine_id: EngineId, engine_epoch: int) -> None:
        pass


class Engine(EngineSessionThread):
    """An engine with its session on the test's own loop and clock, running turns all the time."""

    def __init__(self, plane: Gone) -> None:
        self.now = 1000.0
        super().__init__("127.0.0.1:1", SPEC, monotonic=self.clock)
        self.plane = plane
        self.session = EngineSession(
            plane,  # type: ignore[arg-type]  # what a session calls
            SPEC,
            self._outbox,
            self._events.push,
            monotonic=self.clock,
            sleep=self.sleep,
        )
        self._session = self.session
        self.keeper = Keeper(
            ConnectorConfig("127.0.0.1:1"),
            self,
            Retention(1000, monotonic=self.clock),
            monotonic=self.clock,
            chains=ChainCache(),
        )
        self.turns = itertools.count()
        self.held: dict[str, float] = {}
        self.kinds: Counter[str] = Counter()
        self.busy: Callable[[], None] = self.turn
        self.until = self.next_turn = 0.0
        self.done = asyncio.Event()

    def clock(self) -> float:
        return self.now

    def drain_events(self) -> list[ev.Event]:
        events = super().drain_events()
        self.kinds.update(type(event).__name__ for event in events)
        return events

    @property
    def outbox(self) -> Outbox:
        return self._outbox

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.busy()
        await asyncio.sleep(0)
        if self.now >= self.until:
            self.done.set()
            await asyncio.Event().wait()

    def turn(self) -> None:
        """A step of the engine, in which a turn finishes, every few seconds."""
        if self.now < self.next_turn:
            return
        self.next_turn = self.now + 20.0
        number = next(self.turns)
        name = f"r{number}"
        kept = self.keeper.finish(
            FinishedTurn(
                request_id=name,
                envelope=Envelope(ConversationKey("t", "m", f"c{number % 50}"), number + 1),
                context=Context("m"),
                tokens=range(64),
                items=(),
                blocks=[number % 900, number % 900 + 1],
                params={},
            )
        )
        if kept is not None:
            self.held[name] = self.now + 480
        freed = {*self.keeper.step(500), *(held for held, end in self.held.items() if end <= self.now)}
        for gone in freed:
            self.held.pop(gone, None)
        self.keeper.freed(freed)
        self.keeper.report_load(running=number % 7, waiting=0, free_blocks=500)

    def idle(self) -> None:
        """A step of nothing: the engine does not even look."""
        self.set_load(EngineLoad(next(self.turns) % 2))

    async def run(self, hours: float) -> None:
        self.until = self.now + hours * HOUR_S
        self.done.clear()
        task = asyncio.create_task(self.session.run())
        await self.done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def sizes(engine: Engine) -> dict[str, int]:
    return {**engine.queues, "held": len(engine.outbox), "retained": len(engine.keeper.retention)}


@pytest.mark.parametrize("plane", [Gone, Flapping])
@pytest.mark.parametrize("busy", [True, False])
async def test_hours_of_trouble_fill_neither_memory_nor_log(plane: type[Gone], busy: bool) -> None:
    engine = Engine(plane())
    if not busy:
        engine.busy = engine.idle
    hours = 4.0 if plane is Gone else 0.25
    with structlog.testing.capture_logs() as logs:
        await engine.run(hours / 2)
        gc.collect()
        tracemalloc.start()
        try:
            await engine.run(hours / 2)
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        entries = list(logs)
        logs.clear()
    assert engine.plane.attempts > 1000 * hours
    written = Counter(entry["event"] for entry in entries)
    assert max(written.values()) <= max(LINES, 6) * (hours + 1)
    assert sum(written.values()) <= 4 * LINES * (hours + 1)
    assert all(size <= 64 for size in sizes(engine).values()), sizes(engine)
    assert grown < 512 << 10, f"{grown} bytes more after {hours / 2} hours"


async def test_an_engine_that_never_met_a_control_plane_retains_nothing() -> None:
    engine = Engine(Gone())
    await engine.run(1.0)
    assert sizes(engine) == dict.fromkeys(sizes(engine), 0)
    assert engine.keeper.counts["retained"] == 0
    assert engine.keeper.counts["not_retained:no_control_plane"] > 100


async def test_it_connects_when_there_is_one_at_last() -> None:
    engine = Engine(Gone())
    await engine.run(3.0)
    plane: Any = Flapping()
    engine.session._client = plane
    await engine.run(0.01)
    assert engine.registration is not None
    assert engine.keeper.counts["retained"] > 0
    assert (
        any(isinstance(event, ev.Registered) for event in engine.drain_events()) or engine.attached is False
    )
