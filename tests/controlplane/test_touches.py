"""Wishes to keep a conversation: what they reach, and what they never do. Boundaries first."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvplane.client import model as cm
from kvplane.controlplane import model as m
from kvplane.v1 import location_pb2
from tests.controlplane.harness import Rig, announcement, key
from tests.controlplane.wire import KEY, SPEC, Wire, wire_key

NOTHING = m.Touched(noted=False)


async def test_nothing_is_touched_where_nothing_is(rig: Rig) -> None:
    assert await rig.touch() == NOTHING


@pytest.mark.parametrize(("passed_s", "left_ms"), [(8.999, 1), (9.0, None)])
async def test_at_its_deadline_there_is_nothing_to_touch(
    rig: Rig, passed_s: float, left_ms: int | None
) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=9)
    rig.clock.jump(passed_s)
    assert await rig.touch() == m.Touched(left_ms is not None, left_ms)
    rig.clock.jump(0.001)
    assert not isinstance(await rig.lookup(), m.Found)


async def test_a_touch_changes_no_deadline_and_a_renewal_no_wish(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    assert await rig.touch(300) == m.Touched(noted=True, remaining_ms=60_000)
    assert await rig.touch(300) == m.Touched(noted=True, remaining_ms=60_000)
    assert await rig.wanted_for_s() == 300
    await rig.plane.locations.renew(m.Holder("d", engine.engine_epoch, "q1"), 100)
    assert await rig.touch(10) == m.Touched(noted=True, remaining_ms=100_000)
    assert await rig.wanted_for_s() == 300


async def test_the_planes_longest_life_bounds_a_wish(rig: Rig) -> None:
    await rig.retain(await rig.engine(), "q1", ttl_s=60)
    await rig.touch(1e12)
    assert await rig.wanted_for_s() == 480


async def test_what_is_wanted_can_be_claimed_for_as_long(rig: Rig) -> None:
    """An engine asks a turn back when it can be claimed no more, which is before its record ends."""
    await rig.retain(await rig.engine(), "q1", ttl_s=30)
    await rig.plane.touches.touch(key(), 15)
    assert await rig.wanted_for_s() == 0
    await rig.plane.touches.touch(key(), 25)
    assert await rig.wanted_for_s() == 35


async def test_what_adds_little_is_not_written(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=290)
    revision = (await rig.store.scan(b"l/")).items[0].mod_revision
    for ttl_s in (10, 290, 304):
        assert (await rig.touch(ttl_s)).noted
    assert (await rig.store.scan(b"l/")).items[0].mod_revision == revision
    await rig.touch(310)
    await rig.touch(324)
    assert await rig.wanted_for_s() == 310
    await rig.touch(327)
    assert await rig.wanted_for_s() == 327


async def test_a_wish_while_the_turn_is_in_flight_goes_to_its_announcement(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.begin("q1")
    assert await rig.touch(300) == m.Touched(noted=True)
    await rig.keep_alive(engine, 100)
    await rig.announce(engine, announcement("q1", turn, ttl_s=60))
    assert await rig.wanted_for_s() == 200


async def test_it_is_over_with_the_turn_after_it(rig: Rig) -> None:
    engine = await rig.engine()
    first = await rig.begin("q1")
    assert (await rig.touch(turn=first)).noted
    second = await rig.begin("q2")
    assert await rig.touch(turn=first) == NOTHING
    await rig.announce(engine, announcement("q1", first))
    assert await rig.wanted_for_s() == 0
    await rig.announce(engine, announcement("q2", second))
    assert await rig.wanted_for_s() == 0


async def test_an_older_turns_announcement_leaves_the_wish_to_the_latest(rig: Rig) -> None:
    engine = await rig.engine()
    first, second = await rig.begin("q1"), await rig.begin("q2")
    await rig.touch(300, turn=second)
    await rig.announce(engine, announcement("q1", first, ttl_s=60))
    assert await rig.wanted_for_s() == 0
    await rig.announce(engine, announcement("q2", second, ttl_s=60))
    assert await rig.wanted_for_s() == 300


async def test_without_a_turn_both_the_retained_and_the_one_in_flight_are_meant(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    turn = await rig.begin("q2")
    assert await rig.touch(300) == m.Touched(noted=True, remaining_ms=60_000)
    assert await rig.wanted_for_s() == 300
    await rig.announce(engine, announcement("q2", turn, ttl_s=60))
    assert await rig.wanted_for_s() == 300


async def test_a_turn_that_is_not_waited_for_any_more_is_not_in_flight(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.begin("q1")
    await rig.keep_alive(engine, 600)
    assert await rig.touch() == NOTHING


async def test_what_is_claimed_is_not_there_to_be_kept(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.retain(engine, "q1")
    assert isinstance(await rig.claim(), m.Claim)
    assert await rig.touch() == NOTHING
    assert await rig.touch(turn=turn) == NOTHING


async def test_an_older_turns_touch_leaves_the_newer_one_alone(rig: Rig) -> None:
    engine = await rig.engine()
    first = await rig.retain(engine, "q1")
    second = await rig.retain(engine, "q2", ttl_s=60)
    assert await rig.touch(turn=first) == NOTHING
    assert await rig.touch(turn=second + 1) == NOTHING
    assert await rig.wanted_for_s() == 0
    assert (await rig.touch(turn=second)).noted


async def test_nothing_is_kept_on_an_engine_that_drains_or_began_anew(rig: Rig) -> None:
    await rig.engine()
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.retain(engine, "q2", key("other"))
    await rig.plane.engines.drain("d")
    assert await rig.touch() == NOTHING
    await rig.engine()
    assert await rig.touch(conversation=key("other")) == NOTHING


@pytest.mark.parametrize(
    "other", [key(tenant_id="other"), key(model="other"), key(adapter="other"), key("other")]
)
async def test_a_touch_of_anothers_conversation_is_one_of_nothing(rig: Rig, other: m.ConversationKey) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    await rig.begin("q2")
    assert await rig.touch(conversation=other) == NOTHING
    assert await rig.wanted_for_s() == 0


async def test_a_wish_survives_the_same_blocks_announced_by_a_new_incarnation(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.retain(engine, "q1", ttl_s=60)
    await rig.touch(300)
    engine = await rig.engine()
    await rig.announce(engine, announcement("q1", turn, ttl_s=60))
    assert await rig.wanted_for_s() == 300


async def test_a_touch_over_the_wire(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.retain(epoch)
    found = await wire.client.touch_conversation(KEY, 1.0)
    assert (found.noted, found.remaining_s) == (True, 400.0)
    other = cm.ConversationKey("other", KEY.model, KEY.conversation_id)
    assert await wire.client.touch_conversation(other, 450.0) == cm.Touched(False, None)
    await wire.client.begin_turn(other, "b", timeout_s=5.0)
    assert await wire.client.touch_conversation(other, 450.0) == cm.Touched(True, None)
    operation = location_pb2.TurnsOperation

    def touch(turn: int = 0) -> location_pb2.TouchConversationRequest:
        request = location_pb2.TouchConversationRequest(key=wire_key(), turn=turn)
        request.ttl.seconds = 450
        return request

    async def batches() -> AsyncIterator[list[location_pb2.TurnsOperation]]:
        yield [operation(id=1, touch=touch()), operation(id=2, touch=touch(turn=1))]
        yield [operation(id=3, touch=location_pb2.TouchConversationRequest(key=wire_key()))]

    results = {result.id: result async for batch in wire.client.turns(batches()) for result in batch}
    assert results[1].touch.noted
    assert results[1].touch.remaining.seconds == 400
    assert not results[2].touch.noted
    assert not results[2].touch.HasField("remaining")
    assert "ttl" in results[3].error.message
