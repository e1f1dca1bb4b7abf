"""What is wanted for longer than it lives is asked of its engine, over its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from kvplane.controlplane import attachments as module
from kvplane.controlplane import model as m
from kvplane.controlplane.server import ControlPlane
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from kvplane.v1 import common_pb2, engine_pb2
from tests.controlplane.harness import Rig, SharedStore, announcement, key, replica


class Attached:
    """An engine's end of a stream, without a socket."""

    def __init__(self, plane: ControlPlane, engine: m.Engine) -> None:
        self._requests: asyncio.Queue[engine_pb2.AttachEngineRequest] = asyncio.Queue()
        self._numbers = count(1)
        self._serving = asyncio.create_task(self._serve(plane))
        self.orders: list[tuple[str, float]] = []
        self.messages: list[engine_pb2.AttachEngineResponse] = []
        self.send(hello=engine_pb2.EngineHello(engine_id="d", engine_epoch=engine.engine_epoch))

    def send(
        self, *, hello: engine_pb2.EngineHello | None = None, renewals: dict[str, int] | None = None
    ) -> None:
        request = engine_pb2.AttachEngineRequest(sequence=next(self._numbers), hello=hello)
        for request_id, seconds in (renewals or {}).items():
            renewal = common_pb2.Renewal(request_id=request_id)
            renewal.ttl.FromSeconds(seconds)
            request.renewals.append(renewal)
        self._requests.put_nowait(request)

    async def _ask(self) -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        while True:
            yield await self._requests.get()

    async def _serve(self, plane: ControlPlane) -> None:
        async for answer in plane.attachments.serve(self._ask()):
            self.messages.append(answer)
            for order in answer.renewal_orders:
                self.orders.append((order.request_id, order.ttl.ToTimedelta().total_seconds()))

    def taken(self) -> list[tuple[str, float]]:
        """Return the orders that came since this was last asked."""
        orders, self.orders = self.orders, []
        return orders

    async def detach(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


@asynccontextmanager
async def attached(plane: ControlPlane, engine: m.Engine) -> AsyncIterator[Attached]:
    stream = Attached(plane, engine)
    await settle()
    try:
        yield stream
    finally:
        await stream.detach()


async def test_a_wish_becomes_an_order_and_a_renewal_answers_it(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    async with attached(rig.plane, engine) as stream:
        await rig.touch(300)
        await settle()
        assert stream.taken() == [("q1", 300.0)]
        stream.send(renewals={"q1": 300})
        await settle()
        assert stream.messages[-1].renewals[0].renewed
        assert stream.taken() == []
        found = await rig.lookup()
        assert isinstance(found, m.Found)
        assert found.location.deadline_ms - rig.clock.now_ms() == 300_000


async def test_an_engine_that_grants_less_is_not_asked_again_until_more_is_wanted(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    async with attached(rig.plane, engine) as stream:
        await rig.touch(300)
        stream.send(renewals={"q1": 100})
        await settle()
        stream.taken()
        stream.send(renewals={"q1": 90})
        await rig.touch(300)
        await settle()
        assert stream.taken() == []
        await rig.touch(400)
        await settle()
        assert stream.taken() == [("q1", 400.0)]


async def test_what_it_lives_for_anyway_is_not_ordered(rig: Rig) -> None:
    engine = await rig.engine()
    async with attached(rig.plane, engine) as stream:
        await rig.retain(engine, "q1", ttl_s=400)
        await rig.touch(300)
        await settle()
        assert stream.taken() == []


async def test_a_wish_from_before_the_announcement_is_ordered_with_it(rig: Rig) -> None:
    engine = await rig.engine()
    async with attached(rig.plane, engine) as stream:
        turn = await rig.begin("q1")
        await rig.touch(300)
        await settle()
        assert stream.taken() == []
        await rig.announce(engine, announcement("q1", turn, ttl_s=60))
        await settle()
        assert stream.taken() == [("q1", 300.0)]


async def test_a_turn_that_finds_too_little_life_orders_enough_for_its_claim(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=20)
    async with attached(rig.plane, engine) as stream:
        await rig.begin("r2")
        await settle()
        assert stream.taken() == [("q1", 40.0)]


async def test_at_each_attach_all_that_is_due_is_ordered_again(rig: Rig) -> None:
    engine = await rig.engine()
    other = await rig.engine("other")
    for number in range(4):
        await rig.retain(engine, f"q{number}", key(f"c{number}"), ttl_s=60)
    await rig.retain(other, "q9", key("c9"), ttl_s=60)
    for conversation in ("c0", "c1", "c2", "c9"):
        await rig.touch(300, key(conversation))
    assert isinstance(await rig.claim(conversation=key("c0")), m.Claim)
    for passed_s in (0, 3):
        await rig.keep_alive(other, passed_s)
        async with attached(rig.plane, engine) as stream:
            assert sorted(stream.taken()) == [("q1", 300.0 - passed_s), ("q2", 300.0 - passed_s)]
    async with attached(rig.plane, engine) as stream:
        stream.send(renewals={"q1": 300})
        await settle()
        stream.taken()
    async with attached(rig.plane, engine) as stream:
        assert stream.taken() == [("q2", 297.0)]


async def test_a_draining_engine_is_asked_for_nothing(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    await rig.touch(300)
    await rig.plane.engines.drain("d")
    async with attached(rig.plane, engine) as stream:
        await rig.touch(400)
        await settle()
        assert stream.taken() == []


async def test_a_claimed_location_is_not_renewed(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    async with attached(rig.plane, engine) as stream:
        await rig.touch(300)
        assert isinstance(await rig.claim(), m.Claim)
        stream.send(renewals={"q1": 300})
        await settle()
        assert not stream.messages[-1].renewals[0].renewed


async def test_many_orders_go_in_few_messages(rig: Rig) -> None:
    engine = await rig.engine()
    most = module._MAX_ORDERS
    for number in range(most + 1):
        await rig.retain(engine, f"q{number}", key(f"c{number}"), ttl_s=60)
        await rig.touch(300, key(f"c{number}"))
    async with attached(rig.plane, engine) as stream:
        while len(stream.orders) <= most:
            await settle()
        assert [len(message.renewal_orders) for message in stream.messages if message.renewal_orders] == [
            most,
            1,
        ]


async def test_a_touch_at_one_replica_reaches_an_engine_at_another() -> None:
    clock = ManualClock()
    async with (
        MemoryStore(clock) as memory,
        replica(SharedStore(memory), clock) as here,
        replica(SharedStore(memory), clock) as there,
    ):
        rig = Rig(here, clock, memory)
        engine = await rig.engine()
        async with attached(there, engine) as stream:
            await rig.retain(engine, "q1", ttl_s=60)
            await rig.touch(300)
            await settle()
            assert stream.taken() == [("q1", 300.0)]
            await rig.claim()
            await rig.retain(engine, "q2", ttl_s=20)
            await rig.begin("q3")
            await settle()
            assert stream.taken() == [("q2", 40.0)]
