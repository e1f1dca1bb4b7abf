"""Replicas whose wall clocks differ by a minute: in one process, on a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvplane.controlplane import model as m
from kvplane.controlplane.server import ControlPlane
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from tests.controlplane.harness import SharedStore, SteppedClock, announcement, key, replica


class Pair:
    """A replica, its clock and store, and a second replica's clock."""

    def __init__(self, clock: ManualClock, store: SharedStore, first: ControlPlane) -> None:
        self.clock = clock
        self.store = store
        self.first = first

    async def retain(self, request_id: str, *, ttl_s: float, reannounced: bool = False) -> m.Engine:
        spec = m.EngineSpec("d", m.EngineRole.DECODE, m.EngineProfile(model="m", block_size=16))
        engine = await self.first.engines.register(spec, registration_id="one")
        turn = (await self.first.turns.begin(key(), f"b-{request_id}", 0.0)).turn
        value = announcement(request_id, turn, ttl_s=ttl_s, reannounced=reannounced)
        result = await self.first.locations.announce("d", engine.engine_epoch, value)
        assert result.outcome is m.AnnounceOutcome.ACCEPTED
        return engine

    async def pass_time(self, seconds: float, engine: m.Engine) -> None:
        """Let time pass in steps in which pulses, sweeps and the engine's renewals happen."""
        for _ in range(round(seconds * 4)):
            await self.clock.advance(0.25)
            await settle()
            await self.first.engines.renew("d", engine.engine_epoch)


async def claim(plane: ControlPlane, name: str = "k") -> m.Claim | m.MissReason:
    return await plane.claims.claim(key(), name, "r", wait_s=0.0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    clock = ManualClock()
    async with MemoryStore(clock) as memory:
        store = SharedStore(memory)
        async with replica(store, clock) as first:
            yield Pair(clock, store, first)


async def test_a_replica_that_starts_ahead_ends_no_claim_early(pair: Pair) -> None:
    engine = await pair.retain("q", ttl_s=300)
    assert isinstance(await claim(pair.first), m.Claim)
    async with replica(pair.store, SteppedClock(pair.clock, 60_000)):
        await pair.pass_time(5.0, engine)
        orders = await pair.first.attachments.waiting_orders("d", engine.engine_epoch)
        assert orders == [], "a reader has 30 s, and 10 s of grace"


async def test_a_replica_that_starts_ahead_ends_no_quarantine_early(pair: Pair) -> None:
    engine = await pair.retain("q", ttl_s=300, reannounced=True)
    assert await claim(pair.first) is m.MissReason.QUARANTINED
    async with replica(pair.store, SteppedClock(pair.clock, 60_000)) as second:
        await pair.pass_time(5.0, engine)
        assert await claim(pair.first) is m.MissReason.QUARANTINED
        assert await claim(second) is m.MissReason.QUARANTINED


@pytest.mark.parametrize("shift_s", [-60.0, 60.0])
async def test_a_replica_with_another_wall_clock_hands_out_nothing_late(pair: Pair, shift_s: float) -> None:
    engine = await pair.retain("q", ttl_s=20)
    async with replica(pair.store, SteppedClock(pair.clock, round(shift_s * 1000))) as second:
        await pair.pass_time(10.5, engine)
        for plane in (pair.first, second):
            assert isinstance(await claim(plane), m.MissReason), "9.5 s left, 10 s promised"


@pytest.mark.parametrize("shift_s", [-60.0, 60.0])
async def test_a_step_of_a_running_replicas_clock_moves_no_deadline(pair: Pair, shift_s: float) -> None:
    clock = SteppedClock(pair.clock)
    async with replica(pair.store, clock) as second:
        engine = await pair.retain("q", ttl_s=20)
        await pair.pass_time(1.0, engine)
        clock.step_ms = round(shift_s * 1000)
        await pair.pass_time(8.0, engine)
        assert isinstance(second.locations.lookup(key()), m.Found)
        assert isinstance(pair.first.locations.lookup(key()), m.Found)
        await pair.pass_time(1.5, engine)
        assert await claim(second) is m.MissReason.EXPIRING
        assert await claim(pair.first) is m.MissReason.EXPIRING


@pytest.mark.parametrize("shift_s", [-60.0, 60.0])
async def test_turns_increase_over_replicas_with_different_clocks(pair: Pair, shift_s: float) -> None:
    engine = await pair.retain("q", ttl_s=300)
    async with replica(pair.store, SteppedClock(pair.clock, round(shift_s * 1000))) as second:
        await pair.pass_time(1.0, engine)
        turns = list[int]()
        for number in range(6):
            plane = (pair.first, second)[number % 2]
            turns.append((await plane.turns.begin(key(), f"n{number}", 0.0)).turn)
        assert turns == sorted(set(turns))
