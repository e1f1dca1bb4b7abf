"""Claims: one winner, finally, with a timeout; and turns, with their short wait."""

from __future__ import annotations

import asyncio

import pytest

from kvplane.controlplane import model as m
from kvplane.controlplane.errors import InvalidFieldError, NotClaimOwnerError
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.memory import MemoryStore
from tests.controlplane.harness import Rig, SharedStore, announcement, key, replica


async def test_of_many_simultaneous_claimers_one_wins(rig: Rig) -> None:
    engine = await rig.engine()
    for number in range(100):
        await rig.retain(engine, f"q{number}", key(f"c{number}"))
        attempts = [rig.claim(f"{number}/{n}", f"r{n}", key(f"c{number}")) for n in range(10)]
        outcomes = await asyncio.gather(*attempts)
        assert sum(isinstance(outcome, m.Claim) for outcome in outcomes) == 1
        assert sum(outcome is m.MissReason.CLAIMED for outcome in outcomes) == 9


async def test_a_claimed_location_is_never_offered_again(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.retain(engine, "q1")
    assert isinstance(await rig.claim(), m.Claim)
    assert await rig.lookup() is m.MissReason.CLAIMED
    again = await rig.announce(engine, announcement("q1", turn, reannounced=True))
    assert again.outcome is m.AnnounceOutcome.CLAIMED
    assert await rig.claim("second") is m.MissReason.CLAIMED
    await rig.plane.releases.finish_claim("claim", "r")
    over = await rig.announce(engine, announcement("q1", turn, reannounced=True))
    assert over.outcome is m.AnnounceOutcome.SUPERSEDED
    assert await rig.claim("third") is m.MissReason.CLAIMED


async def test_repeating_a_claim_gives_the_same_claim(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    first = await rig.claim("token", "r")
    assert await rig.claim("token", "r") == first
    with pytest.raises(InvalidFieldError):
        await rig.claim("token", "somebody else")


async def test_a_repeat_gets_the_claim_until_its_deadline_and_no_longer(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    first = await rig.claim()
    await rig.keep_alive(engine, 29.9)
    await rig.plane.engines.drain("d")
    assert await rig.claim() == first
    await rig.keep_alive(engine, 0.1)
    assert await rig.claim() is m.MissReason.EXPIRING


async def test_a_repeated_claim_on_an_earlier_incarnation_finds_the_engine_gone(rig: Rig) -> None:
    await rig.retain(await rig.engine(), "q1")
    assert isinstance(await rig.claim(), m.Claim)
    engine = await rig.engine()
    assert await rig.claim() is m.MissReason.ENGINE_GONE
    await rig.plane.engines.deregister("d", engine.engine_epoch)
    assert await rig.claim() is m.MissReason.ENGINE_GONE


async def test_a_repeated_claim_is_judged_by_the_store_where_the_mirror_is_behind(rig: Rig) -> None:
    await rig.retain(await rig.engine(), "q1")
    assert isinstance(await rig.claim(), m.Claim)
    behind = SharedStore(rig.store)
    async with replica(behind, rig.clock) as plane:
        behind.watching.clear()
        await rig.engine()
        assert await plane.claims.claim(key(), "claim", "r") is m.MissReason.ENGINE_GONE


async def test_a_claim_whose_answer_was_lost_is_found_again(rig: Rig) -> None:
    """Done, but the answer got lost: the retry sees its own success, and nobody else wins."""
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    faulty = SharedStore(rig.store)
    async with replica(faulty, rig.clock) as plane:
        faulty.fail_next("transact", when="after", times=2)
        with pytest.raises(StoreUnavailableError):
            await plane.claims.claim(key(), "token", "r")
        assert await rig.claim("rival", "x") is m.MissReason.CLAIMED
        retried = await plane.claims.claim(key(), "token", "r")
        assert isinstance(retried, m.Claim)


async def test_a_write_of_unknown_outcome_is_decided_anew_and_finds_its_own_work(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    faulty = SharedStore(rig.store)
    async with replica(faulty, rig.clock) as plane:
        faulty.watching.clear()  # not even the watch tells of it
        faulty.fail_next("transact", when="after")
        claimed = await plane.claims.claim(key(), "token", "r")
        assert isinstance(claimed, m.Claim)
        faulty.fail_next("transact", when="after")
        begun = await plane.turns.begin(key(), "q2", 0.0)
        assert begun.known is m.MissReason.CLAIMED
        again = await plane.turns.begin(key(), "q2", 0.0)
        assert again.turn == begun.turn


async def test_a_claim_that_never_reached_the_store_took_nothing(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    faulty = SharedStore(rig.store)
    async with replica(faulty, rig.clock) as plane:
        faulty.fail_next("transact", when="before", times=2)
        with pytest.raises(StoreUnavailableError):
            await plane.claims.claim(key(), "token", "r")
    assert isinstance(await rig.claim("rival", "x"), m.Claim)


async def test_only_its_owner_finishes_a_claim_and_twice_is_fine(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.claim("token", "r")
    with pytest.raises(NotClaimOwnerError):
        await rig.plane.releases.finish_claim("token", "x")
    assert await rig.plane.releases.finish_claim("token", "r") is m.ReleaseOutcome.RELEASED
    assert await rig.plane.releases.finish_claim("token", "r") is m.ReleaseOutcome.NOTHING
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_FINISHED}


async def test_a_killed_claimers_claim_ends_by_itself_after_its_grace(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.claim()
    await rig.keep_alive(engine, 39.5)
    assert await rig.orders(engine) == {}
    await rig.keep_alive(engine, 1)
    assert await rig.orders(engine) == {"q1": m.ReleaseReason.CLAIM_TIMEOUT}
    assert await rig.claim("late") is m.MissReason.CLAIMED


async def test_a_claim_is_never_longer_than_the_life_it_was_given(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1", ttl_s=12)
    claim = await rig.claim()
    assert isinstance(claim, m.Claim)
    assert claim.deadline_ms == claim.location.deadline_ms


async def test_withdrawing_gives_way_to_a_reader(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.retain(engine, "q2", key("other"))
    await rig.claim()
    withdraw = rig.plane.releases.withdraw
    assert await withdraw(m.Holder("d", engine.engine_epoch, "q1")) is m.ReleaseOutcome.CLAIMED
    assert await withdraw(m.Holder("d", engine.engine_epoch, "q2")) is m.ReleaseOutcome.RELEASED
    assert await withdraw(m.Holder("d", engine.engine_epoch, "q2")) is m.ReleaseOutcome.NOTHING
    assert await rig.claim("x", conversation=key("other")) is m.MissReason.UNKNOWN_CONVERSATION


async def test_a_newer_turn_leaves_a_claimed_one_to_its_reader(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    await rig.claim()
    await rig.retain(engine, "q2")
    assert await rig.orders(engine) == {}


async def test_only_the_asked_turns_location_is_claimed(rig: Rig) -> None:
    engine = await rig.engine()
    old = await rig.retain(engine, "q1")
    new = await rig.retain(engine, "q2")
    assert isinstance(await rig.plane.claims.claim(key(), "a", "r", turn=old), m.MissReason)
    assert isinstance(await rig.plane.claims.claim(key(), "b", "r", turn=new), m.Claim)


async def test_engines_that_differ_are_not_offered_each_others_kv(rig: Rig) -> None:
    holder, twin, stranger = await rig.engine(), await rig.engine("p1"), await rig.engine("p2", block_size=32)
    await rig.retain(holder, "q1")
    claims = rig.plane.claims
    refused = await claims.claim(key(), "a", "r", reader_engine_id=stranger.spec.engine_id)
    assert refused is m.MissReason.INCOMPATIBLE_ENGINE
    taken = await claims.claim(key(), "b", "r", reader_engine_id=twin.spec.engine_id)
    assert isinstance(taken, m.Claim)


async def test_an_engine_whose_stream_broke_is_not_trusted_until_heard_of(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    stream = await rig.plane.engines.attach("d", engine.engine_epoch)
    assert isinstance(await rig.lookup(), m.Found)
    rig.plane.engines.detach("d", engine.engine_epoch, stream)
    assert await rig.claim() is m.MissReason.ENGINE_GONE
    await rig.plane.engines.renew("d", engine.engine_epoch)
    assert isinstance(await rig.claim(), m.Claim)


async def test_turns_rise_and_are_idempotent(rig: Rig) -> None:
    first = await rig.begin("a")
    assert await rig.begin("a") == first
    second = await rig.begin("b")
    assert second > first
    assert await rig.begin("a") > second


async def test_a_turn_after_a_lost_store_is_newer_than_any_before(rig: Rig) -> None:
    for number in range(10):
        before = await rig.begin(f"q{number}")
    await rig.clock.advance(1)
    async with MemoryStore(rig.clock) as empty, replica(empty, rig.clock) as fresh:
        assert (await fresh.turns.begin(key(), "x", 0)).turn > before


async def test_the_next_turn_waits_for_the_announcement_on_its_way(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.begin("q1")
    waiting = asyncio.create_task(rig.plane.turns.begin(key(), "q2", 0.05))
    await rig.clock.advance(0.04)
    assert not waiting.done()
    await rig.announce(engine, announcement("q1", turn))
    begun = await waiting
    assert isinstance(begun.known, m.Found)
    assert begun.known.location.turn == turn


async def test_the_wait_ends(rig: Rig) -> None:
    await rig.begin("q1")
    waiting = asyncio.create_task(rig.plane.turns.begin(key(), "q2", 0.05))
    await rig.clock.advance(0.05)
    assert (await waiting).known is m.MissReason.TURN_IN_FLIGHT


async def test_a_claim_waits_too_but_not_for_a_turn_named(rig: Rig) -> None:
    engine = await rig.engine()
    turn = await rig.begin("q1")
    waiting = asyncio.create_task(rig.plane.claims.claim(key(), "a", "r", wait_s=0.05))
    await rig.clock.advance(0.01)
    await rig.announce(engine, announcement("q1", turn))
    assert isinstance(await waiting, m.Claim)
    named = await rig.plane.claims.claim(key(), "b", "r", wait_s=0.05, turn=turn)
    assert named is m.MissReason.CLAIMED


async def test_cancelling_a_waiting_turn_leaves_nothing_running(rig: Rig) -> None:
    await rig.begin("q1")
    waiting = asyncio.create_task(rig.plane.turns.begin(key(), "q2", 5.0))
    await rig.clock.advance(0.01)
    before = rig.clock.sleepers
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert rig.clock.sleepers == before - 1
