"""Quotas of tenants: a tenant pays for its own excess, with its oldest, and nobody else does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.quotas import Limits, TenantLimits, Usage
from kvplane.controlplane.server import ControlPlane
from kvplane.store.base import Compare, Operation, Transaction
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock, settle
from tests.controlplane.harness import Rig, SharedStore, announcement, key, replica, running

THREE = TenantLimits(Limits(conversations=3))


class OrdersRefused(FaultInjectingStore):
    """A store that can take everything but orders."""

    refusing = False

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        if self.refusing and any(operation.key.startswith(keys.ORDERS) for operation in operations):
            raise StoreUnavailableError("no orders today")
        return await super().transact(compares, operations)


@pytest.fixture
async def three() -> AsyncIterator[Rig]:
    async with running(limits=THREE) as rig:
        yield rig


async def retained(rig: Rig, tenant_id: str = "t") -> set[str]:
    found, _, _ = await rig.plane.locations.list(after=b"", limit=100_000, tenant_id=tenant_id, engine_id="")
    return {entry.location.key.conversation_id for entry, claimed in found if not claimed}


def usage(plane: ControlPlane, tenant_id: str = "t") -> tuple[int, int]:
    assert plane.quotas is not None
    mine = [each for each in plane.quotas.usage() if each.tenant_id == tenant_id]
    return (mine[0].conversations, mine[0].blocks) if mine else (0, 0)


async def retain(
    rig: Rig, engine: m.Engine, name: str, *, tenant_id: str = "t", blocks: int = 4
) -> m.Announced:
    at = key(name, tenant_id)
    turn = await rig.begin(f"begin-{tenant_id}-{name}", at)
    await rig.clock.advance(0.002)
    value = announcement(f"{tenant_id}-{name}", turn, conversation=at, block_count=blocks)
    return await rig.announce(engine, value)


async def test_up_to_the_quota_all_is_kept(three: Rig) -> None:
    engine = await three.engine()
    for number in range(3):
        await retain(three, engine, f"c{number}")
    assert await retained(three) == {"c0", "c1", "c2"}
    assert usage(three.plane) == (3, 12)
    assert await three.orders(engine) == {}


async def test_one_more_displaces_the_oldest_and_its_engine_is_told_why(three: Rig) -> None:
    engine = await three.engine()
    for number in range(4):
        assert (await retain(three, engine, f"c{number}")).outcome is m.AnnounceOutcome.ACCEPTED
    assert await retained(three) == {"c1", "c2", "c3"}
    assert await three.orders(engine) == {"t-c0": m.ReleaseReason.QUOTA}
    assert await three.lookup(key("c0")) is m.MissReason.QUOTA
    assert await three.claim(conversation=key("c0")) is m.MissReason.QUOTA
    assert three.plane.quotas is not None
    assert three.plane.quotas.displaced == 1


async def test_without_limits_nothing_is_counted(rig: Rig) -> None:
    engine = await rig.engine()
    for number in range(20):
        await retain(rig, engine, f"c{number}")
    assert len(await retained(rig)) == 20
    assert rig.plane.quotas is None


async def test_a_displaced_conversation_begins_anew_and_says_why(three: Rig) -> None:
    engine = await three.engine()
    for number in range(4):
        await retain(three, engine, f"c{number}")
    begun = await three.plane.turns.begin(key("c0"), "again", 0.0)
    assert begun.known is m.MissReason.QUOTA
    assert begun.idle_ms is not None  # its lease class is learned from all the same
    again = announcement("again", begun.turn, conversation=key("c0"))
    assert (await three.announce(engine, again)).outcome is m.AnnounceOutcome.ACCEPTED
    assert await retained(three) == {"c0", "c2", "c3"}
    late = announcement("t-c1", 1, conversation=key("c1"))
    assert (await three.announce(engine, late)).outcome is m.AnnounceOutcome.SUPERSEDED


async def test_a_next_turn_of_the_same_conversation_displaces_none(three: Rig) -> None:
    engine = await three.engine()
    for number in range(3):
        await retain(three, engine, f"c{number}")
    for turn in range(5):
        await three.retain(engine, f"more{turn}", key("c0"))
    assert await retained(three) == {"c0", "c1", "c2"}
    await retain(three, engine, "c3")
    assert await retained(three) == {"c0", "c2", "c3"}  # c0 has been heard of since


async def test_a_renewal_makes_none_younger_and_a_claim_makes_room(three: Rig) -> None:
    engine = await three.engine()
    for number in range(3):
        await retain(three, engine, f"c{number}")
    assert await three.plane.locations.renew(m.Holder("d", engine.engine_epoch, "t-c0"), 450.0) is not None
    await retain(three, engine, "c3")
    assert await retained(three) == {"c1", "c2", "c3"}
    assert isinstance(await three.claim(conversation=key("c1")), m.Claim)
    assert usage(three.plane) == (2, 8)
    await retain(three, engine, "c4")
    assert await retained(three) == {"c2", "c3", "c4"}


async def test_those_in_use_go_last(three: Rig) -> None:
    engine = await three.engine()
    for number in range(3):
        await retain(three, engine, f"c{number}")
    await three.begin("next", key("c0"))  # its next turn runs
    await three.touch(450.0, key("c1"))  # somebody waits for a tool
    await retain(three, engine, "c3")
    assert await retained(three) == {"c0", "c1", "c3"}
    await three.begin("next", key("c3"))
    await retain(three, engine, "c4")  # all others are in use: then the oldest of them
    assert await retained(three) == {"c1", "c3", "c4"}


@pytest.mark.parametrize(("blocks", "left"), [(1, {"c1", "c2", "new"}), (10, {"new"}), (5, {"c2", "new"})])
async def test_blocks_are_a_quota_too(blocks: int, left: set[str]) -> None:
    async with running(limits=TenantLimits(Limits(blocks=10))) as rig:
        engine = await rig.engine()
        for number, size in enumerate([2, 4, 4]):
            await retain(rig, engine, f"c{number}", blocks=size)
        await retain(rig, engine, "new", blocks=blocks)
        assert await retained(rig) == left
        assert usage(rig.plane)[1] <= 10


async def test_what_is_larger_than_the_quota_alone_is_refused_and_displaces_none() -> None:
    async with running(limits=TenantLimits(Limits(blocks=10))) as rig:
        engine = await rig.engine()
        await retain(rig, engine, "small", blocks=4)
        refused = await retain(rig, engine, "large", blocks=11)
        assert refused.outcome is m.AnnounceOutcome.REFUSED
        assert refused.detail == "quota: 11 blocks, of 10 that the tenant may retain"
        assert await retained(rig) == {"small"}
        begun = await rig.plane.turns.begin(key("large"), "again", 5.0)  # which waits for none
        assert begun.known is m.MissReason.QUOTA
        assert await rig.orders(engine) == {}  # the engine withdraws what is refused


async def test_a_refused_turn_leaves_the_conversations_last_one() -> None:
    async with running(limits=TenantLimits(Limits(blocks=10))) as rig:
        engine = await rig.engine()
        await retain(rig, engine, "c", blocks=8)
        turn = await rig.begin("second", key("c"))
        value = announcement("second", turn, conversation=key("c"), block_count=12)
        assert (await rig.announce(engine, value)).outcome is m.AnnounceOutcome.REFUSED
        found = await rig.lookup(key("c"))
        assert isinstance(found, m.Found)
        assert found.location.block_count == 8


async def test_a_tenant_that_may_retain_nothing_retains_nothing() -> None:
    async with running(limits=TenantLimits(tenants={"t": Limits(conversations=0)})) as rig:
        engine = await rig.engine()
        assert (await retain(rig, engine, "c")).outcome is m.AnnounceOutcome.REFUSED
        assert (await retain(rig, engine, "c", tenant_id="u")).outcome is m.AnnounceOutcome.ACCEPTED


async def test_a_tenant_a_hundred_times_as_noisy_costs_a_quiet_one_nothing() -> None:
    limits = TenantLimits(Limits(conversations=20, blocks=60), {"quiet": Limits(conversations=20)})
    async with running(limits=limits) as rig:
        engine = await rig.engine()
        for number in range(10):
            await retain(rig, engine, f"q{number}", tenant_id="quiet", blocks=50)
            for noise in range(100):
                await retain(rig, engine, f"n{number}-{noise}", tenant_id="noisy", blocks=1 + noise % 5)
                conversations, blocks = usage(rig.plane, "noisy")
                assert conversations <= 20
                assert blocks <= 60
        assert await retained(rig, "quiet") == {f"q{number}" for number in range(10)}
        assert {key for key in await rig.orders(engine) if key.startswith("quiet")} == set()


async def test_the_tenant_with_most_goes_first_where_all_are_too_many() -> None:
    async with running(m.Settings(max_conversations=50)) as rig:
        engine = await rig.engine()
        for number in range(10):
            await retain(rig, engine, f"q{number}", tenant_id="quiet")
        for number in range(500):
            await retain(rig, engine, f"n{number}", tenant_id="noisy")
            if not number % 100:
                await rig.clock.advance(0.5)
        await rig.clock.advance(0.5)
        assert await retained(rig, "quiet") == {f"q{number}" for number in range(10)}
        assert await retained(rig, "noisy") == {f"n{number}" for number in range(460, 500)}


async def test_lowered_limits_hold_without_another_announcement(three: Rig) -> None:
    engine = await three.engine()
    for number in range(3):
        await retain(three, engine, f"c{number}")
        await retain(three, engine, f"c{number}", tenant_id="other")
    assert three.plane.quotas is not None
    three.plane.quotas.set_limits(TenantLimits(Limits(), {"t": Limits(conversations=1)}))
    await three.clock.advance(0.5)
    assert await retained(three) == {"c2"}
    assert len(await retained(three, "other")) == 3
    three.plane.quotas.set_limits(TenantLimits())
    for number in range(5):
        await retain(three, engine, f"more{number}")
    assert len(await retained(three)) == 6
    assert Usage("t", 6, 24, Limits()) in list(three.plane.quotas.usage())


async def test_what_is_in_quarantine_is_displaced_and_kept_for_its_reader(three: Rig) -> None:
    engine = await three.engine()
    for number in range(4):
        at = key(f"c{number}")
        turn = await three.begin(f"b{number}", at)
        value = announcement(f"q{number}", turn, conversation=at, reannounced=True)
        assert (await three.announce(engine, value)).outcome is m.AnnounceOutcome.ACCEPTED
    assert await retained(three) == {"c1", "c2", "c3"}
    assert await three.orders(engine) == {}
    await three.keep_alive(engine, 41)
    assert (await three.orders(engine))["q0"] is m.ReleaseReason.CLAIM_TIMEOUT


async def test_a_store_that_fails_meanwhile_fails_no_announcement() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory:
        store = OrdersRefused(memory)
        async with replica(store, clock, limits=THREE) as plane:
            rig = Rig(plane, clock, memory)
            engine = await rig.engine()
            for number in range(3):
                await retain(rig, engine, f"c{number}")
            turn = await rig.begin("b", key("c3"))
            store.refusing = True
            value = announcement("t-c3", turn, conversation=key("c3"))
            assert (await rig.announce(engine, value)).outcome is m.AnnounceOutcome.ACCEPTED
            assert len(await retained(rig)) == 4
            store.refusing = False
            await clock.advance(0.5)
            assert await retained(rig) == {"c1", "c2", "c3"}


async def test_replicas_count_what_all_have_announced() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory, AsyncExitStack() as stack:
        rigs = [
            Rig(
                await stack.enter_async_context(replica(SharedStore(memory), clock, limits=THREE)),
                clock,
                memory,
            )
            for _ in range(2)
        ]
        engine = await rigs[0].engine()
        await settle()
        for number in range(12):
            await retain(rigs[number % 2], engine, f"c{number:02}")
            await settle()
        assert await retained(rigs[0]) == await retained(rigs[1]) == {"c09", "c10", "c11"}
        assert usage(rigs[0].plane) == usage(rigs[1].plane) == (3, 12)
        late = await stack.enter_async_context(replica(SharedStore(memory), clock, limits=THREE))
        assert usage(late) == (3, 12)
        await retain(Rig(late, clock, memory), engine, "aaa")  # whose key comes first
        await retain(Rig(late, clock, memory), engine, "bbb")
        assert await retained(rigs[0]) == {"c11", "aaa", "bbb"}  # what was read goes by age, too


async def test_a_replica_that_is_behind_displaces_nothing_twice() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory, AsyncExitStack() as stack:
        stores = [SharedStore(memory), SharedStore(memory)]
        rigs = [
            Rig(await stack.enter_async_context(replica(store, clock, limits=THREE)), clock, memory)
            for store in stores
        ]
        engine = await rigs[0].engine()
        await settle()
        for number in range(3):
            await retain(rigs[0], engine, f"c{number}")
        await settle()
        stores[1].watching.clear()
        await retain(rigs[0], engine, "c3")  # c0 goes
        await retain(rigs[1], engine, "c4")  # it takes c0 for the oldest, and finds it gone
        await settle()
        assert await retained(rigs[0]) == {"c1", "c2", "c3", "c4"}  # one more, for as long as it is behind
        stores[1].watching.set()
        await clock.advance(1.0)
        assert await retained(rigs[0]) == {"c2", "c3", "c4"}


async def test_counts_are_right_after_the_store_was_read_again() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory, replica(SharedStore(memory), clock, limits=THREE) as plane:
        rig = Rig(plane, clock, memory)
        engine = await rig.engine()
        for number in range(3):
            await retain(rig, engine, f"c{number}")
        await rig.plane.releases.end_conversation(key("c1"))
        plane.mirror.forget_everything()
        assert usage(plane) == (0, 0)
        plane.mirror.doubted.set()
        await settle()
        await clock.advance(1.0)
        assert usage(plane) == (2, 8)
