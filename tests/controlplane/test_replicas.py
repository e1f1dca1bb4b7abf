"""Several replicas over one store: one truth, bounded staleness, one time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from kvplane.cli.run import NotNowError, _until
from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane import server as server_module
from kvplane.controlplane.errors import StaleEpochError, SupersededStreamError
from kvplane.controlplane.fleet_time import FleetTime
from kvplane.controlplane.replicas import TermsDifferError
from kvplane.controlplane.schema import read_schema
from kvplane.controlplane.server import ControlPlane, ControlPlaneServer
from kvplane.store.base import Delete, KeyValue, Put
from kvplane.store.errors import StoreFullError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from kvplane.v1 import engine_pb2
from tests.controlplane.harness import (
    MovableClock,
    Rig,
    SharedStore,
    SteppedClock,
    announcement,
    key,
    replica,
)

LOCATION = m.Location(
    key("due"), m.Holder("d", -1, "q" * 5000), 1, 1, 1, b"{}", m.Fingerprint(64, b"x" * 8), deadline_ms=1
)
"""What no replica would write."""


class Fleet:
    """Replicas that share a store."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.clock = ManualClock()
        self.memory = MemoryStore(self.clock)
        self.stores: list[SharedStore] = []
        self.rigs: list[Rig] = []
        self._stack = stack

    async def add(self, clock: MovableClock | None = None) -> Rig:
        store = SharedStore(self.memory)
        plane = await self._stack.enter_async_context(replica(store, clock or self.clock))
        self.stores.append(store)
        rig = Rig(plane, self.clock, self.memory)
        self.rigs.append(rig)
        return rig


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack)
        await stack.enter_async_context(fleet.memory)
        for _ in range(2):
            await fleet.add()
        yield fleet


async def test_what_one_knows_the_other_offers(fleet: Fleet) -> None:
    one, other = fleet.rigs
    engine = await one.engine()
    await one.retain(engine, "q1")
    await settle()
    assert isinstance(await other.lookup(), m.Found)
    assert isinstance(await other.claim(), m.Claim)
    assert await one.claim("rival") is m.MissReason.CLAIMED


async def test_a_thousand_double_claims_on_two_replicas_have_one_winner_each(fleet: Fleet) -> None:
    one, other = fleet.rigs
    engine = await one.engine()
    for number in range(1000):
        conversation = key(f"c{number}")
        await fleet.rigs[number % 2].retain(engine, "q" + str(number), conversation)
        attempts = [
            rig.claim(f"{name}/{number}", name, conversation) for name, rig in (("a", one), ("b", other))
        ]
        outcomes = await asyncio.gather(*attempts)
        assert sum(isinstance(outcome, m.Claim) for outcome in outcomes) == 1
        assert m.MissReason.CLAIMED in outcomes


async def test_a_replica_that_is_behind_decides_right_all_the_same(fleet: Fleet) -> None:
    ahead, behind = fleet.rigs
    engine = await ahead.engine()
    await ahead.retain(engine, "q0", key("gone"))
    await settle()
    fleet.stores[1].watching.clear()
    assert isinstance(await ahead.claim("a", conversation=key("gone")), m.Claim)
    assert await behind.claim("b", conversation=key("gone")) is m.MissReason.CLAIMED
    turn = await ahead.retain(engine, "q1")
    begun = await behind.plane.turns.begin(key(), "next", 0.0)
    assert begun.turn > turn
    assert isinstance(begun.known, m.Found)
    withdrawn = await behind.plane.releases.withdraw(m.Holder("d", engine.engine_epoch, "q1"))
    assert withdrawn is m.ReleaseOutcome.RELEASED
    newer = await ahead.engine()
    result = await behind.announce(newer, announcement("q2", await behind.begin("q2")))
    assert result.outcome is m.AnnounceOutcome.ACCEPTED
    with pytest.raises(StaleEpochError):
        await behind.announce(engine, announcement("q3", await behind.begin("q3")))


async def test_a_replica_cut_off_for_too_long_gives_no_answers_and_comes_back(fleet: Fleet) -> None:
    one, other = fleet.rigs
    engine = await one.engine()
    await one.retain(engine, "q1")
    await settle()
    fleet.stores[1].watching.clear()
    await fleet.clock.advance(1.9)
    assert isinstance(await other.lookup(), m.Found)
    await fleet.clock.advance(1.0)
    assert other.plane.mirror.staleness_s > 2.0
    with pytest.raises(StoreUnavailableError):
        await other.lookup()
    with pytest.raises(StoreUnavailableError):
        await other.claim()
    assert one.plane.mirror.staleness_s < 2.0
    fleet.stores[1].watching.set()
    await fleet.clock.advance(1.0)
    assert isinstance(await other.lookup(), m.Found)


async def test_a_pulse_that_cannot_be_written_makes_the_replica_stale_too(fleet: Fleet) -> None:
    """It may hear of others' changes still, but cannot know that it heard of all."""
    fleet.stores[1].fail_next("transact", times=100)
    await fleet.clock.advance(3.0)
    with pytest.raises(StoreUnavailableError):
        await fleet.rigs[1].lookup()


async def test_a_full_store_is_said_to_be_full(fleet: Fleet) -> None:
    fleet.stores[1].fail_next("transact", times=100, error=StoreFullError("no space"))
    await fleet.clock.advance(3.0)
    with pytest.raises(StoreFullError):
        await fleet.rigs[1].begin("q1")


@pytest.mark.parametrize("step_ms", [-60_000, 60_000])
async def test_a_replica_whose_clock_is_wrong_hands_nothing_out_late(fleet: Fleet, step_ms: int) -> None:
    clock = SteppedClock(fleet.clock, step_ms)
    wrong = await fleet.add(clock)
    await fleet.clock.advance(1.0)
    right = fleet.rigs[0]
    engine = await right.engine()
    for number, rig in enumerate((right, wrong)):
        await rig.retain(engine, f"q{number}", key(f"c{number}"), ttl_s=70)
    clock.step_ms = -step_ms
    await right.keep_alive(engine, 59.0)
    for number in range(2):
        assert isinstance(await wrong.lookup(key(f"c{number}")), m.Found)
    await right.keep_alive(engine, 2.0)
    for rig in (right, wrong):
        for number in range(2):
            claimed = await rig.claim(f"x{number}", conversation=key(f"c{number}"))
            assert claimed is m.MissReason.EXPIRING


def test_fleet_time_follows_the_one_ahead_and_no_step() -> None:
    manual = ManualClock()
    clock = SteppedClock(manual)
    time = FleetTime(clock, patience_s=80.0)
    start = manual.now_ms()
    clock.step_ms = -60_000
    assert time.now_ms() == start
    time.heard(start - 5)
    assert time.now_ms() == start
    time.heard(start + 500)
    manual.jump(1.0)
    assert (time.now_ms(), time.patient_ms()) == (start + 1500, start + 1000)


def test_a_move_ahead_counts_late_for_what_must_not_be_over_early() -> None:
    manual = ManualClock()
    time = FleetTime(manual, patience_s=80.0)
    start = time.now_ms()
    time.heard(start + 60_000)
    manual.jump(79.0)
    assert (time.now_ms(), time.patient_ms()) == (start + 139_000, start + 79_000)
    manual.jump(1.0)
    assert time.patient_ms() == time.now_ms() == start + 140_000
    time.distrust()
    manual.jump(79.0)
    assert time.patient_ms() < start
    manual.jump(1.0)
    assert time.patient_ms() == time.now_ms()
    time.adopt(start)
    assert time.now_ms() == start


async def test_a_fleet_that_restarts_frees_nothing_early_though_its_clock_is_ahead() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory:
        async with replica(SharedStore(memory), clock) as plane:
            rig = Rig(plane, clock, memory)
            engine = await rig.engine()
            await rig.retain(engine, "q1")
            assert isinstance(await rig.claim(), m.Claim)
        async with replica(SharedStore(memory), SteppedClock(clock, 3_600_000)) as plane:
            rig = Rig(plane, clock, memory)
            await rig.keep_alive(engine, 39.0)
            assert await rig.orders(engine) == {}
            await rig.keep_alive(engine, 60.0)
            assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_TIMEOUT}


async def test_only_the_first_living_replica_sweeps_at_once(fleet: Fleet) -> None:
    await fleet.clock.advance(1.0)
    ranks = [rig.plane.replicas.rank() for rig in fleet.rigs]
    assert sorted(ranks) == [0, 1]
    fleet.stores[ranks.index(0)].set_unavailable(True)  # the first is no more
    await fleet.clock.advance(7.0)
    assert fleet.rigs[ranks.index(1)].plane.replicas.rank() == 0


async def test_whoever_lives_sweeps_in_the_end(fleet: Fleet) -> None:
    one = fleet.rigs[0]
    engine = await one.engine()
    await one.retain(engine, "q1", ttl_s=5)
    await fleet.clock.advance(1.0)
    ranks = [rig.plane.replicas.rank() for rig in fleet.rigs]
    fleet.stores[ranks.index(0)].set_unavailable(True)
    living = fleet.rigs[ranks.index(1)]
    await living.keep_alive(engine, 9.0)
    assert await living.orders(engine) == {"q1": m.ReleaseReason.EXPIRED}


async def attach(plane: ControlPlane, engine: m.Engine) -> tuple[AsyncIterator[object], asyncio.Event]:
    """Attach the engine at a replica; returns the stream, and what ends it when set."""
    ended = asyncio.Event()

    async def requests() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=engine.engine_epoch)
        yield engine_pb2.AttachEngineRequest(sequence=1, hello=hello)
        await ended.wait()

    stream = plane.attachments.serve(requests())
    await anext(stream)
    return stream, ended


async def test_an_engine_that_attaches_elsewhere_voids_its_stream_here(fleet: Fleet) -> None:
    one, other = fleet.rigs
    engine = await one.engine()
    old, _ = await attach(one.plane, engine)
    fleet.stores[0].watching.clear()  # the first replica does not hear of it
    new, ended = await attach(other.plane, engine)
    turn = await one.begin("q1")
    with pytest.raises(SupersededStreamError):
        await one.plane.locations.announce("d", engine.engine_epoch, announcement("q1", turn), stream=1)
    result = await other.plane.locations.announce(
        "d", engine.engine_epoch, announcement("q1", turn), stream=2
    )
    assert result.outcome is m.AnnounceOutcome.ACCEPTED
    fleet.stores[0].watching.set()
    with pytest.raises(SupersededStreamError):
        await anext(old)
    await settle()
    assert isinstance(await one.lookup(), m.Found), "the end of the old stream says nothing"
    ended.set()
    with pytest.raises(StopAsyncIteration):
        await anext(new)


async def test_all_replicas_hear_of_a_broken_stream(fleet: Fleet) -> None:
    one, other = fleet.rigs
    engine = await one.engine()
    await one.retain(engine, "q1")
    stream, ended = await attach(one.plane, engine)
    await settle()
    assert isinstance(await other.lookup(), m.Found)
    ended.set()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await settle()
    assert await other.lookup() is m.MissReason.ENGINE_GONE
    again, ended = await attach(other.plane, engine)
    await settle()
    assert isinstance(await one.lookup(), m.Found)
    ended.set()
    with pytest.raises(StopAsyncIteration):
        await anext(again)


async def test_a_drain_and_a_load_are_known_to_all(fleet: Fleet) -> None:
    one, other = fleet.rigs
    engine = await one.engine()
    await one.plane.engines.renew("d", engine.engine_epoch, m.EngineLoad(running_requests=7))
    await other.plane.engines.drain("d")
    await settle()
    [live], _ = await one.plane.engines.list(after=b"", limit=10)
    assert live.engine.draining
    assert live.load == m.EngineLoad(running_requests=7)


async def test_what_a_message_spent_on_its_way_is_taken_off_the_life_it_announces(fleet: Fleet) -> None:
    rig = fleet.rigs[0]
    engine = await rig.engine()
    at = ("d", engine.engine_epoch)
    attachments = rig.plane.attachments
    assert attachments.delay_s(at, sent_at_ms=5_000) == 0.0
    await fleet.clock.advance(1.0)
    assert attachments.delay_s(at, sent_at_ms=6_000) == pytest.approx(0.0)
    await rig.keep_alive(engine, 30.0)
    assert attachments.delay_s(at, sent_at_ms=7_000) == pytest.approx(29.0)
    assert attachments.delay_s(at, sent_at_ms=0) == 0.0, "not said"


async def test_a_replica_that_promises_other_durations_does_not_run_next_to_others(fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        other = ControlPlane(SharedStore(fleet.memory), fleet.clock, m.Settings(claim_timeout_s=300))
        tasks = other.start()
        for task in tasks:
            stack.callback(task.cancel)
        await fleet.clock.advance(3.0)
        failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        assert [type(error) for error in failed] == [TermsDifferError]
        assert "--claim-timeout 300: the replicas that run have 30 (seconds)" in str(failed[0])
        with pytest.raises(StoreUnavailableError):
            other.mirror.require_fresh()


async def test_other_durations_that_are_found_late_are_no_fault_of_ours(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_FIRST_READ_S", 0.0)
    server = ControlPlaneServer(
        SharedStore(fleet.memory), fleet.clock, m.Settings(claim_timeout_s=300, engine_lease_s=5)
    )
    with capture_logs() as logs:
        await server.start("127.0.0.1:0")
        await fleet.clock.advance(3.0)
        with pytest.raises(NotNowError, match=r"--claim-timeout 300, --engine-lease 5: .* have 30, 10 "):
            await _until(asyncio.Event(), server)
        await server.stop(0)
    assert "task_failed" not in [line["event"] for line in logs]


async def test_a_store_that_was_emptied_gets_its_schema_again(fleet: Fleet) -> None:
    assert await read_schema(fleet.memory) is not None
    await fleet.memory.transact([], [Delete(keys.schema())])
    await fleet.clock.advance(1.0)
    assert await read_schema(fleet.memory) is not None


async def test_before_it_has_agreed_on_the_time_a_replica_answers_nothing(fleet: Fleet) -> None:
    one = fleet.rigs[0]
    engine = await one.engine()
    await one.retain(engine, "q1")
    assert isinstance(await one.claim(), m.Claim)
    store = SharedStore(fleet.memory)
    ahead = ControlPlane(store, SteppedClock(fleet.clock, 3_600_000), m.Settings())
    tasks = ahead.start()
    store.fail_next("transact", times=3)  # not even the pulses get through
    await settle()
    assert ahead.mirror.listed.is_set()
    with pytest.raises(StoreUnavailableError):
        await ahead.engines.register(engine.spec, "again")
    with pytest.raises(StoreUnavailableError):
        await ahead.engines.drain("d")
    await one.keep_alive(engine, 6.0)
    assert await one.orders(engine) == {}, "a reader has 30 s, and 10 s of grace"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_pulse_that_was_long_on_its_way_sets_no_clock_back(fleet: Fleet) -> None:
    store = SharedStore(fleet.memory)
    plane = ControlPlane(store, fleet.clock, m.Settings())
    tasks = plane.start()
    await settle()
    late = m.Pulse(fleet.clock.now_ms() - 60_000, "0", None)
    await fleet.memory.transact([], [Put(keys.pulse("late"), records.dump_pulse(late))])
    await fleet.clock.advance(2.0)
    assert plane.replicas._time.now_ms() == fleet.clock.now_ms()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_store_that_began_anew_unnoticed_is_found_out_by_the_next_pulse(fleet: Fleet) -> None:
    """Emptied, and by now with a longer history than the one that a replica knows."""
    one, other = fleet.rigs
    engine = await one.engine()
    await one.retain(engine, "q1")
    await fleet.clock.advance(1.0)
    mirror, pulse = other.plane.mirror, keys.pulse(other.plane.replicas.replica_id)
    ghost = KeyValue(b"l/ghost", b"", 1, 1)
    mirror._items[ghost.key] = ghost
    await fleet.memory.transact([], [Delete(pulse)])
    fleet.stores[1].watching.clear()  # the watch goes on in a history that is not its own
    await fleet.clock.advance(0.6)
    fleet.stores[1].watching.set()
    await fleet.clock.advance(1.0)
    assert mirror.get(ghost.key) is None
    assert mirror.get(pulse) is not None
    await one.keep_alive(engine, 6.0)
    assert isinstance(await other.lookup(), m.Found), "an engine that lives is not taken for gone"


async def test_the_status_leaves_out_a_replica_whose_pulse_is_damaged(fleet: Fleet) -> None:
    rig, other = fleet.rigs
    ids = [rig.plane.replicas.replica_id, other.plane.replicas.replica_id]
    await fleet.clock.advance(1.0)
    assert set(rig.plane.replicas.pulses()) == set(ids)
    await fleet.memory.transact([], [Put(keys.pulse(ids[1]), b"\xff\xff")])
    await fleet.clock.advance(0.01)
    assert set(rig.plane.replicas.pulses()) == {ids[0]}


@pytest.mark.parametrize(
    ("store_key", "value"),
    [
        (b"l/garbage", b"\xff\xff"),
        (b"c/\xff\xfe", b"\xff"),
        (b"t/garbage", b"\xff\xff"),
        (b"x/\x00\x01d" + bytes(8) + b"\xff", b"\xff\xff"),
        (b"o/\x00\x01d" + bytes(7) + b"\x01q", b"\xff\xff"),
        (b"o/x", b""),
        (b"e/garbage", b"\xff\xff"),
        (b"n/d", b"\xff\xff"),
        (b"w/d", b"\xff\xff"),
        (b"h/garbage", b"\xff\xff"),
        (b"h/far", records.dump_pulse(m.Pulse(2**62, "0", None))),
        (keys.location(key("due")), records.dump_location(LOCATION)),
        (keys.claim("due"), records.dump_claim(m.Claim("due", "r", LOCATION, 1))),
        (b"?/unknown", b"x"),
    ],
)
async def test_one_bad_record_takes_nothing_else_with_it(store_key: bytes, value: bytes) -> None:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack)
        await stack.enter_async_context(fleet.memory)
        await fleet.memory.transact([], [Put(store_key, value)])
        rig = await fleet.add()
        engine = await rig.engine()
        await rig.retain(engine, "q1", ttl_s=20)
        await rig.retain(engine, "q2", key("other"), ttl_s=300)
        again = await rig.engine()
        await rig.retain(again, "q3", ttl_s=20)
        await rig.keep_alive(again, 25.0)
        assert await rig.orders(again) == {"q3": m.ReleaseReason.EXPIRED}
        found, _, _ = await rig.plane.locations.list(after=b"", limit=100, tenant_id="t", engine_id="d")
        assert [item.location.holder for item, _ in found if item.location.key == key()] == []
        engines, _ = await rig.plane.engines.list(after=b"", limit=10)
        assert "d" in [live.engine.spec.engine_id for live in engines]
        rig.plane.mirror.require_fresh()
