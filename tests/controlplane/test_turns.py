"""What BeginTurn tells of the turns before, and what it asks of the engine that holds the last one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from kvplane.client import model as cm
from kvplane.client.errors import InvalidFieldError
from kvplane.controlplane import keys, records, turns
from kvplane.controlplane import model as m
from kvplane.controlplane.turns import BegunTurn
from kvplane.storage.v1 import records_pb2
from kvplane.store.base import Put
from kvplane.store.testing import settle
from tests.controlplane.harness import Rig, announcement, key
from tests.controlplane.wire import KEY, SPEC, Wire
from tests.controlplane.wire import announcement as wire_announcement


async def begin(rig: Rig, request_id: str, wait_s: float = 0.0) -> BegunTurn:
    return await rig.plane.turns.begin(key(), request_id, wait_s)


async def announce(rig: Rig, engine: m.Engine, begun: BegunTurn, **changes: Any) -> None:
    value = replace(announcement(f"q{begun.turn}", begun.turn), **changes)
    assert (await rig.announce(engine, value)).outcome is m.AnnounceOutcome.ACCEPTED


async def test_of_a_first_turn_there_is_nothing_to_tell(rig: Rig) -> None:
    begun = await begin(rig, "r1")
    assert (begun.turn_index, begun.idle_ms, begun.lease_class) == (1, None, 0)


async def test_turns_are_counted_and_the_time_between_them_is_told(rig: Rig) -> None:
    engine = await rig.engine()
    await announce(rig, engine, await begin(rig, "r1"), lease_class=8)
    await rig.keep_alive(engine, 12.5)
    second = await begin(rig, "r2")
    assert (second.turn_index, second.idle_ms, second.lease_class) == (2, 12_500, 8)
    await announce(rig, engine, second, lease_class=1024)
    third = await begin(rig, "r3")
    assert (third.turn_index, third.idle_ms, third.lease_class) == (3, 0, 1024)


async def test_it_outlives_the_location(rig: Rig) -> None:
    engine = await rig.engine()
    await announce(rig, engine, await begin(rig, "r1"), lease_class=8, ttl_s=60.0)
    await rig.keep_alive(engine, 300)
    begun = await begin(rig, "r2")
    assert begun.known is m.MissReason.UNKNOWN_CONVERSATION
    assert (begun.turn_index, begun.idle_ms, begun.lease_class) == (2, 300_000, 8)


async def test_a_turn_that_has_not_ended_leaves_no_idle_time(rig: Rig) -> None:
    engine = await rig.engine()
    await announce(rig, engine, await begin(rig, "r1"), lease_class=8)
    await begin(rig, "r2")
    third = await begin(rig, "r3")
    assert (third.turn_index, third.idle_ms, third.lease_class) == (3, None, 8)


async def test_a_turn_that_ends_during_the_wait_has_just_ended(rig: Rig) -> None:
    engine = await rig.engine()
    first = await begin(rig, "r1")
    waiting = asyncio.create_task(begin(rig, "r2", 1.0))
    await rig.clock.advance(0.5)
    await announce(rig, engine, first, lease_class=8)
    begun = await waiting
    assert (begun.turn_index, begun.idle_ms, begun.lease_class) == (2, 0, 8)


async def test_a_repeated_begin_counts_once(rig: Rig) -> None:
    engine = await rig.engine()
    await announce(rig, engine, await begin(rig, "r1"), lease_class=8)
    first, again = await begin(rig, "r2"), await begin(rig, "r2")
    assert (again.turn, again.turn_index, again.lease_class) == (first.turn, 2, 8)


async def put_turns(rig: Rig, raw: bytes) -> None:
    lease = await rig.store.grant_lease(1000)
    await rig.store.transact([], [Put(keys.turns(key()), raw, lease.lease_id)])


async def test_what_an_older_version_did_not_record_stays_unknown(rig: Rig) -> None:
    now = rig.clock.now_ms()
    record = records_pb2.TurnRecord(latest_turn=now - 9000, settled_turn=now - 9000, request_id="r")
    await put_turns(rig, record.SerializeToString())
    for number in range(2):
        begun = await begin(rig, f"r{number}")
        assert (begun.turn_index, begun.idle_ms, begun.lease_class) == (0, None, 0)
    engine = await rig.engine()
    await announce(rig, engine, begun, lease_class=8)
    begun = await begin(rig, "r3")
    assert (begun.turn_index, begun.idle_ms, begun.lease_class) == (0, 0, 8)


def turn_record(**numbers: Any) -> bytes:
    """Return a stored record; of two of them in a row, the second's numbers count."""
    return records_pb2.TurnRecord(**numbers).SerializeToString()


TURN_NUMBERS = ("latest_turn", "settled_turn", "claimed_turn", "ended_turn")
TIMES = ("in_flight_until_ms", "settled_at_ms", "wanted_until_ms")


@pytest.mark.parametrize("name", [*TURN_NUMBERS, *TIMES])
@pytest.mark.parametrize("number", [-5, 2**62, 2**63 - 1])
async def test_forged_numbers_are_no_record_and_the_next_turn_replaces_them(
    rig: Rig, name: str, number: int
) -> None:
    record = turn_record(latest_turn=5) + turn_record(**{name: number})
    with pytest.raises(records.UnreadableRecordError):
        records.load_turns(record)
    await put_turns(rig, record)
    await rig.retain(await rig.engine(), "q1")
    assert isinstance(await rig.claim(), m.Claim)
    assert await rig.begin("q2") == rig.clock.now_ms() + 1


@pytest.mark.parametrize("name", ["turn_index", "lease_class"])
async def test_negative_counts_are_no_record(name: str) -> None:
    with pytest.raises(records.UnreadableRecordError):
        records.load_turns(turn_record(**{name: -1}))


@pytest.mark.parametrize("name", ["settled_turn", "claimed_turn", "ended_turn"])
async def test_a_turn_is_newer_than_all_that_ended_whatever_was_begun(rig: Rig, name: str) -> None:
    later = rig.clock.now_ms() + 5000
    await put_turns(rig, turn_record(**{name: later}))
    assert await rig.retain(await rig.engine(), "q1") == later + 1


async def test_the_largest_number_of_all_is_followed_by_the_clocks(rig: Rig) -> None:
    await put_turns(rig, turn_record(latest_turn=2**62 - 1))
    assert await rig.begin("q1") == 2**62
    await rig.retain(await rig.engine(), "q2")


async def test_a_conversation_of_very_many_turns_goes_on(rig: Rig) -> None:
    now = rig.clock.now_ms()
    record = records_pb2.TurnRecord(latest_turn=now, request_id="r", turn_index=2**31 - 1)
    await put_turns(rig, record.SerializeToString())
    assert (await begin(rig, "r2")).turn_index == 2**31 - 1
    assert (await begin(rig, "r3")).turn_index == 2**31 - 1


async def test_a_turn_settled_by_an_older_version_is_not_described_by_the_one_before(rig: Rig) -> None:
    engine = await rig.engine()
    await announce(rig, engine, await begin(rig, "r1"), lease_class=8)
    await rig.keep_alive(engine, 30)
    stored = await rig.store.get(keys.turns(key()))
    assert stored is not None
    turn = rig.clock.now_ms()
    settled = replace(records.load_turns(stored.value), latest_turn=turn, settled_turn=turn)
    await put_turns(rig, records.dump_turns(settled))
    await rig.keep_alive(engine, 10)
    begun = await begin(rig, "r3")
    assert (begun.idle_ms, begun.lease_class) == (None, 0)


@pytest.mark.parametrize(("left_s", "wanted_s"), [(10.0, 40.0), (38.999, 40.0), (39.0, 0.0), (400.0, 0.0)])
async def test_a_location_that_would_not_outlive_a_claim_is_wanted_for_longer(
    rig: Rig, left_s: float, wanted_s: float
) -> None:
    await rig.retain(await rig.engine(), "q1", ttl_s=left_s)
    await begin(rig, "r2")
    assert await rig.wanted_for_s() == wanted_s


async def test_a_lookup_wants_nothing(rig: Rig) -> None:
    await rig.retain(await rig.engine(), "q1", ttl_s=20)
    await rig.lookup()
    assert await rig.wanted_for_s() == 0


async def test_what_is_not_offered_is_not_asked_for(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=9)
    begun = await begin(rig, "r2")
    assert begun.known is m.MissReason.EXPIRING
    stored = await rig.store.get(keys.location(key()))
    assert stored is not None
    assert records.load_location(stored.value).wanted_until_ms == 0


async def test_over_the_wire(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    other = cm.ConversationKey("t", "m", "other")
    first = await wire.client.begin_turn(other, "r1")
    assert (first.key, first.turn_index, first.idle_s, first.lease_class) == (other, 1, None, None)
    turn = (await wire.client.begin_turn(KEY, "r1")).turn
    value = dataclasses.replace(wire_announcement("q1", turn), lease_class=7)
    await wire.client.announce_location(SPEC.engine_id, epoch, value)
    wire.clock.jump(1.5)
    begun = await wire.client.begin_turn(KEY, "r2")
    assert (begun.key, begun.turn_index, begun.idle_s, begun.lease_class) == (KEY, 2, 1.5, 7)
    value = dataclasses.replace(value, request_id=cm.RequestId("q2"), lease_class=1024)
    with pytest.raises(InvalidFieldError, match="lease_class"):
        await wire.client.announce_location(SPEC.engine_id, epoch, value)


async def test_a_crowd_for_one_conversation_does_not_wait(rig: Rig) -> None:
    waiting = [asyncio.ensure_future(begin(rig, f"r{number}", wait_s=5.0)) for number in range(200)]
    await settle()
    left = [task for task in waiting if not task.done()]
    assert len(left) == turns._MAX_WAITS
    assert {task.result().known for task in waiting if task.done()} <= {
        m.MissReason.UNKNOWN_CONVERSATION,
        m.MissReason.TURN_IN_FLIGHT,
    }
    other = await rig.plane.turns.begin(key("other"), "r", 5.0)
    assert other.known is m.MissReason.UNKNOWN_CONVERSATION
    await rig.clock.advance(5.0)
    await asyncio.gather(*waiting)
    assert not rig.plane.mirror.waiting_for(keys.turns(key()))
