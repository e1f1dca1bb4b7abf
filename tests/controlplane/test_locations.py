"""Rules of locations: deadlines, turns, epochs, isolation. Boundaries first."""

from __future__ import annotations

import asyncio

import pytest

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import (
    EngineDrainingError,
    InvalidFieldError,
    LateRegistrationError,
    StaleEpochError,
    UnknownEngineError,
)
from kvplane.store.base import Delete, Page, Put
from tests.controlplane.harness import PARAMS, Rig, announcement, key, running


async def test_nothing_is_known_at_first(rig: Rig) -> None:
    assert await rig.lookup() is m.MissReason.UNKNOWN_CONVERSATION
    assert await rig.claim() is m.MissReason.UNKNOWN_CONVERSATION


async def test_what_was_announced_comes_back_byte_for_byte(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.retain(engine, "q1")
    found = await rig.lookup()
    assert isinstance(found, m.Found)
    assert found.location.kv_transfer_params == PARAMS
    assert found.location.turn == turn
    assert found.location.holder == m.Holder("d", engine.engine_epoch, "q1")


@pytest.mark.parametrize(("left_s", "handed_out"), [(10.0, True), (9.999, False), (6.0, False), (1.0, False)])
async def test_a_location_is_withheld_below_the_margin(rig: Rig, left_s: float, handed_out: bool) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=left_s)
    found = await rig.lookup()
    assert isinstance(found, m.Found) == handed_out
    if not handed_out:
        assert found is m.MissReason.EXPIRING
        assert await rig.claim() is m.MissReason.EXPIRING


async def test_the_engines_ttl_bounds_the_record_and_the_planes_does_too(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.begin("q1")
    short = await rig.announce(engine, announcement("q1", turn, ttl_s=60))
    assert short.granted_ttl_s == 60
    long = await rig.announce(engine, announcement("q2", await rig.begin("q2"), ttl_s=10_000))
    assert long.granted_ttl_s == 480


async def test_an_expired_location_is_gone_and_its_engine_is_told(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    await rig.keep_alive(engine, 60)
    assert await rig.lookup() is m.MissReason.UNKNOWN_CONVERSATION
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.EXPIRED}


async def test_each_location_goes_at_its_own_time(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "long", key("long"), ttl_s=480)
    for number in range(5):
        await rig.retain(engine, f"short{number}", key(f"short{number}"), ttl_s=30)
    await rig.keep_alive(engine, 31)
    assert len(await rig.orders(engine)) == 5
    assert isinstance(await rig.lookup(key("long")), m.Found)


async def test_a_newer_turn_replaces_and_the_old_one_is_released(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    newer = await rig.retain(engine, "q2")
    found = await rig.lookup()
    assert isinstance(found, m.Found)
    assert found.location.turn == newer
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.SUPERSEDED}


async def test_an_older_turn_never_replaces_a_newer_one(rig: Rig) -> None:
    engine, other = await rig.engine("d"), await rig.engine("d2")
    first, second = await rig.begin("q1"), await rig.begin("q2")
    assert second > first
    await rig.announce(engine, announcement("q2", second))
    late = await rig.announce(other, announcement("q1", first))
    assert late.outcome is m.AnnounceOutcome.SUPERSEDED
    assert await rig.orders(other) == {"q1": m.ReleaseReason.SUPERSEDED}
    found = await rig.lookup()
    assert isinstance(found, m.Found)
    assert found.location.turn == second


async def test_an_older_turn_stays_out_even_after_the_newer_one_was_read(rig: Rig) -> None:
    engine = await rig.engine()
    first, second = await rig.begin("q1"), await rig.begin("q2")
    await rig.announce(engine, announcement("q2", second))
    assert isinstance(await rig.claim(), m.Claim)
    late = await rig.announce(engine, announcement("q1", first))
    assert late.outcome is m.AnnounceOutcome.SUPERSEDED
    assert await rig.lookup() is m.MissReason.CLAIMED


async def test_announcing_again_changes_nothing(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.retain(engine, "q1")
    found = await rig.lookup()
    again = await rig.announce(engine, announcement("q1", turn))
    assert again.outcome is m.AnnounceOutcome.ACCEPTED
    assert await rig.lookup() == found
    assert await rig.orders(engine) == {}


async def test_a_request_belongs_to_one_conversation(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    with pytest.raises(InvalidFieldError, match="another conversation"):
        await rig.announce(engine, announcement("q1", 1, conversation=key("other")))


async def test_a_new_incarnation_makes_older_locations_vanish_at_once(rig: Rig) -> None:
    old = await rig.engine()
    await rig.retain(old, "q1")
    new = await rig.engine()
    assert new.engine_epoch > old.engine_epoch
    assert await rig.lookup() in (m.MissReason.ENGINE_GONE, m.MissReason.UNKNOWN_CONVERSATION)
    with pytest.raises(StaleEpochError):
        await rig.announce(old, announcement("q2", 99))
    await rig.clock.advance(0.5)
    assert (await rig.plane.locations.list(after=b"", limit=10, tenant_id="", engine_id=""))[0] == []


async def test_a_lost_lease_makes_locations_vanish(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.clock.advance(10)
    assert await rig.lookup() in (m.MissReason.ENGINE_GONE, m.MissReason.UNKNOWN_CONVERSATION)
    with pytest.raises(UnknownEngineError):
        await rig.announce(engine, announcement("q2", 99))
    with pytest.raises(UnknownEngineError):
        await rig.plane.engines.renew("d", engine.engine_epoch)


async def test_epochs_of_very_many_engine_ids_are_forgotten_but_not_those_of_live_engines() -> None:
    async with running(m.Settings(max_epochs=50)) as rig:
        live = await rig.engine("live")
        gone = [await rig.engine(f"pod-{number}") for number in range(200)]
        for engine in gone:
            await rig.plane.engines.deregister(engine.spec.engine_id, engine.engine_epoch)
        await rig.keep_alive(live, 3)
        left = {item.key for item in (await rig.store.scan(keys.EPOCHS)).items}
        assert left == {keys.epoch(engine.spec.engine_id) for engine in (live, *gone[150:])}
        more = [await rig.engine(f"more-{number}") for number in range(60)]
        await rig.clock.advance(0.5)
        left = {item.key for item in (await rig.store.scan(keys.EPOCHS)).items}
        assert left == {keys.epoch(engine.spec.engine_id) for engine in (live, *more)}
        await rig.keep_alive(live, 12)
        left = {item.key for item in (await rig.store.scan(keys.EPOCHS)).items}
        assert len(left) == 50 + 1
        assert keys.epoch("live") in left
        assert (await rig.engine("live")).engine_epoch > live.engine_epoch
        assert (await rig.engine("pod-0")).engine_epoch > gone[0].engine_epoch


async def test_an_epoch_is_larger_than_the_live_ones_though_it_was_forgotten(rig: Rig) -> None:
    first = await rig.engine()
    await rig.store.transact([], [Delete(keys.epoch("d"))])
    assert (await rig.engine()).engine_epoch > first.engine_epoch


async def test_epochs_rise_even_when_the_clock_does_not(rig: Rig) -> None:
    epochs = [(await rig.engine()).engine_epoch for _ in range(5)]
    assert epochs == sorted(set(epochs))


async def test_registering_again_with_the_same_id_is_the_same_incarnation(rig: Rig) -> None:
    spec = m.EngineSpec("d", m.EngineRole.DECODE)
    first = await rig.plane.engines.register(spec, "start-1")
    assert await rig.plane.engines.register(spec, "start-1") == first
    assert (await rig.plane.engines.register(spec, "start-2")).engine_epoch > first.engine_epoch


async def test_a_late_duplicate_of_an_earlier_registration_does_not_end_the_later_one(rig: Rig) -> None:
    spec = m.EngineSpec("d", m.EngineRole.DECODE)
    await rig.plane.engines.register(spec, "process#9")
    live = await rig.plane.engines.register(spec, "process#10")
    with pytest.raises(LateRegistrationError):
        await rig.plane.engines.register(spec, "process#9")
    assert await rig.plane.engines.register(spec, "process#10") == live
    for next_id in ("process#11", "another#1", "process#1", "process", "process#x", "#", ""):
        engine = await rig.plane.engines.register(spec, next_id)
        assert engine.engine_epoch > live.engine_epoch
        live = engine


async def test_a_late_registration_of_a_process_that_lives_no_more_begins_anew(rig: Rig) -> None:
    spec = m.EngineSpec("d", m.EngineRole.DECODE)
    later = await rig.plane.engines.register(spec, "process#2")
    await rig.clock.advance(11)
    assert (await rig.plane.engines.register(spec, "process#1")).engine_epoch > later.engine_epoch


async def test_a_draining_engine_takes_and_gives_nothing_new(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.retain(engine, "q1")
    await rig.retain(engine, "q2", key("other"))
    claim = await rig.claim(conversation=key("other"))
    assert isinstance(claim, m.Claim)
    assert await rig.plane.engines.drain("d") == 1
    assert await rig.claim("another") is m.MissReason.ENGINE_DRAINING
    with pytest.raises(EngineDrainingError):
        await rig.announce(engine, announcement("q3", turn + 1))
    assert await rig.plane.releases.finish_claim("claim", "r") is m.ReleaseOutcome.RELEASED


async def test_a_damaged_record_does_not_keep_an_engine_from_draining(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    assert isinstance(await rig.claim(), m.Claim)
    damaged = keys.holding(m.Holder("d", engine.engine_epoch, "q2"))
    await rig.store.transact([], [Put(damaged, b"\xff")])
    assert await rig.plane.engines.drain("d") == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key("c", tenant_id="a/b"), key("b/c", tenant_id="a")),
        (key("c", tenant_id="t1"), key("c", tenant_id="t2")),
        (key("c", model="m1"), key("c", model="m2")),
        (key("c", adapter=""), key("c", adapter="lora")),
        (key("bc", adapter="a"), key("c", adapter="ab")),
        (key("c\x00"), key("c")),
    ],
)
async def test_keys_that_differ_anywhere_are_separate(
    rig: Rig, one: m.ConversationKey, other: m.ConversationKey
) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", one)
    assert await rig.lookup(other) is m.MissReason.UNKNOWN_CONVERSATION
    assert isinstance(await rig.lookup(one), m.Found)


async def test_renewing_sets_the_life_and_never_revives(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=60)
    holder = m.Holder("d", engine.engine_epoch, "q1")
    await rig.keep_alive(engine, 50)
    assert await rig.plane.locations.renew(holder, 100) == 100
    await rig.keep_alive(engine, 60)
    assert isinstance(await rig.lookup(), m.Found)
    rig.clock.jump(0)
    await rig.keep_alive(engine, 40)
    assert await rig.plane.locations.renew(holder, 100) is None
    assert not isinstance(await rig.lookup(), m.Found)


async def test_exactly_at_its_deadline_a_location_is_not_renewed(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=9)
    rig.clock.jump(9)
    assert await rig.plane.locations.renew(m.Holder("d", engine.engine_epoch, "q1"), 100) is None


async def test_a_reannounced_location_waits_for_readers_of_an_earlier_life(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.begin("q1")
    await rig.announce(engine, announcement("q1", turn, reannounced=True))
    assert await rig.claim() is m.MissReason.QUARANTINED
    await rig.keep_alive(engine, 39)
    assert await rig.claim() is m.MissReason.QUARANTINED
    await rig.keep_alive(engine, 1)
    assert isinstance(await rig.claim(), m.Claim)


async def test_what_is_withdrawn_in_quarantine_is_kept_until_it_is_over(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.announce(engine, announcement("q1", await rig.begin("q1"), reannounced=True))
    holder = m.Holder("d", engine.engine_epoch, "q1")
    assert await rig.plane.releases.withdraw(holder) is m.ReleaseOutcome.CLAIMED
    await rig.keep_alive(engine, 39)
    assert await rig.orders(engine) == {}
    await rig.keep_alive(engine, 2)
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_TIMEOUT}


async def test_what_is_superseded_in_quarantine_is_kept_until_it_is_over(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.announce(engine, announcement("q1", await rig.begin("q1"), reannounced=True))
    await rig.retain(engine, "q2")
    assert await rig.orders(engine) == {}
    await rig.keep_alive(engine, 41)
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_TIMEOUT}


async def test_two_holders_in_quarantine_have_two_claims_whatever_their_names(rig: Rig) -> None:
    """Joined by slashes, the parts of their names are equal."""
    first = await rig.engine("a")
    second = await rig.engine(f"a/{first.engine_epoch}/x")
    for engine, request_id in ((first, f"x/{second.engine_epoch}/y"), (second, "y")):
        conversation = key(engine.spec.engine_id)
        turn = await rig.begin(request_id, conversation)
        value = announcement(request_id, turn, conversation=conversation, reannounced=True)
        await rig.announce(engine, value)
        await rig.plane.releases.end_conversation(conversation)
    for _ in range(14):
        await rig.keep_alive(first, 1.5)
        await rig.keep_alive(second, 1.5)
    assert await rig.orders(first) == {f"x/{second.engine_epoch}/y": m.ReleaseReason.CLAIM_TIMEOUT}
    assert await rig.orders(second) == {"y": m.ReleaseReason.CLAIM_TIMEOUT}


async def test_quarantine_that_an_older_replica_began_ends_too(rig: Rig) -> None:
    """Its claim has another kind of name."""
    engine = await rig.engine()
    await rig.announce(engine, announcement("q1", await rig.begin("q1"), reannounced=True))
    found, _, _ = await rig.plane.locations.list(after=b"", limit=1, tenant_id="", engine_id="")
    location = found[0][0].location
    older = m.Claim(f"quarantine/d/{engine.engine_epoch}/q1", "", location, location.not_before_ms - 10_000)
    points_to_it = Put(keys.holding(location.holder), records.dump_holding(claim_id=older.claim_id))
    claim = Put(keys.claim(older.claim_id), records.dump_claim(older))
    await rig.store.transact([], [Delete(keys.location(key())), claim, points_to_it])
    again = announcement("q1", location.turn, reannounced=True)
    assert (await rig.announce(engine, again)).outcome is m.AnnounceOutcome.CLAIMED
    await rig.keep_alive(engine, 39)
    assert await rig.orders(engine) == {}
    await rig.keep_alive(engine, 2)
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_TIMEOUT}


async def test_a_million_invented_ids_leave_a_bounded_record() -> None:
    async with running(m.Settings(max_conversations=50)) as rig:
        engine = await rig.engine()
        for number in range(200):
            await rig.retain(engine, f"q{number}", key(f"c{number}"))
        await rig.clock.advance(0.5)
        found, _, _ = await rig.plane.locations.list(after=b"", limit=1000, tenant_id="", engine_id="")
        assert {entry.location.key.conversation_id for entry, _ in found} == {
            f"c{n}" for n in range(150, 200)
        }
        orders = await rig.orders(engine)
        assert orders == {f"q{n}": m.ReleaseReason.CAPACITY for n in range(150)}


async def test_ending_a_conversation_frees_it_on_its_engine(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    assert await rig.plane.releases.end_conversation(key()) is m.ReleaseOutcome.RELEASED
    assert await rig.plane.releases.end_conversation(key()) is m.ReleaseOutcome.NOTHING
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CONVERSATION_ENDED}


async def test_a_turn_under_way_when_its_conversation_is_ended_is_not_retained(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    turn = await rig.begin("q2")
    assert await rig.plane.releases.end_conversation(key()) is m.ReleaseOutcome.RELEASED
    assert not (await rig.touch()).noted
    late = await rig.announce(engine, announcement("q2", turn))
    assert late.outcome is m.AnnounceOutcome.SUPERSEDED
    assert set(await rig.orders(engine)) == {"q1", "q2"}
    await rig.retain(engine, "q3")
    assert isinstance(await rig.lookup(), m.Found)


async def test_ending_what_has_only_begun_ends_it_too(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.begin("q1")
    assert await rig.plane.releases.end_conversation(key()) is m.ReleaseOutcome.NOTHING
    assert (await rig.announce(engine, announcement("q1", turn))).outcome is m.AnnounceOutcome.SUPERSEDED


async def test_freed_blocks_leave_nothing_behind(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.retain(engine, "q2")
    for request_id in ("q1", "q2"):
        await rig.plane.releases.freed(m.Holder("d", engine.engine_epoch, request_id))
    assert await rig.orders(engine) == {}
    assert await rig.lookup() is m.MissReason.UNKNOWN_CONVERSATION
    assert (await rig.store.scan(b"x/")).items == ()


async def test_freeing_an_older_holder_leaves_the_newer_ones_record(rig: Rig) -> None:
    """The same block ids may serve another conversation by then: only the holder counts."""
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.retain(engine, "q2")
    await rig.plane.releases.freed(m.Holder("d", engine.engine_epoch, "q1"))
    assert isinstance(await rig.lookup(), m.Found)


async def test_listing_pages_over_retained_and_claimed(rig: Rig) -> None:
    engine = await rig.engine()
    for number in range(7):
        await rig.retain(engine, f"q{number}", key(f"c{number}"))
    await rig.retain(engine, "other", key("c", tenant_id="other"))
    await rig.claim(conversation=key("c3"))
    seen, after = list[tuple[str, bool]](), b""
    while True:
        page, after, _ = await rig.plane.locations.list(after=after, limit=3, tenant_id="t", engine_id="")
        seen += [(entry.location.key.conversation_id, claimed) for entry, claimed in page]
        if not after:
            break
    assert seen == [(f"c{n}", False) for n in range(7) if n != 3] + [("c3", True)]


async def test_a_turn_that_nobody_gave_is_refused_and_poisons_nothing(rig: Rig) -> None:
    engine = await rig.engine()
    with pytest.raises(InvalidFieldError, match="BeginTurn"):
        await rig.announce(engine, announcement("q", 2**63 - 1))
    await rig.retain(engine, "q1")
    assert isinstance(await rig.claim(), m.Claim)


async def test_an_older_turn_announced_again_is_not_freed_under_its_reader(rig: Rig) -> None:
    """Its engine lost its lease, not its blocks; the claim of the incarnation before may still be read."""
    engine = await rig.engine()
    first, second = await rig.begin("q1"), await rig.begin("q2")
    await rig.announce(engine, announcement("q1", first))
    assert isinstance(await rig.claim(), m.Claim)
    await rig.announce(engine, announcement("q2", second))
    engine = await rig.engine()
    outcome = await rig.announce(engine, announcement("q1", first, reannounced=True))
    assert outcome.outcome is m.AnnounceOutcome.SUPERSEDED
    assert await rig.orders(engine) == {}
    await rig.keep_alive(engine, 39.0)
    assert await rig.orders(engine) == {}
    await rig.keep_alive(engine, 2.0)
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_TIMEOUT}


async def test_a_listing_that_finds_nothing_lets_others_go_on(rig: Rig) -> None:
    """Seen: one listing over 40,000 locations, none of them the engine's, held up everything for seconds."""
    engine = await rig.engine()
    for number in range(1000):
        await rig.retain(engine, f"q{number}", key(f"c{number}"))
    scans, turns = 0, 0
    scan = rig.store.scan

    async def counted(prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        nonlocal scans
        scans += 1
        return await scan(prefix, after=after, limit=limit)

    async def others() -> None:
        nonlocal turns
        while not listing.done():
            turns += 1
            await asyncio.sleep(0)

    for limit, most in ((1, 13), (1000, 4)):
        scans = turns = 0
        rig.store.scan = counted  # type: ignore[method-assign]
        listing = asyncio.create_task(
            rig.plane.locations.list(after=b"", limit=limit, tenant_id="", engine_id="nobody")
        )
        await others()
        rig.store.scan = scan  # type: ignore[method-assign]
        assert (await listing)[0] == []
        assert scans <= most
        assert turns >= 10
