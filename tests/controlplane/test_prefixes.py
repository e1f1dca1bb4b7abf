"""Conversations found by what a prompt begins with: the right one, the longest one, nobody else's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any

import pytest

from kvplane.client import model as cm
from kvplane.client.errors import InvalidFieldError
from kvplane.controlplane import eager, keys
from kvplane.controlplane import model as m
from kvplane.controlplane import prefixes as module
from kvplane.controlplane.turn_streams import multiplexed
from kvplane.controlplane.turns import BegunTurn
from kvplane.store.base import Put
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from kvplane.v1 import common_pb2, location_pb2
from tests.controlplane.harness import Rig, SharedStore, announcement, key, replica, running
from tests.controlplane.wire import SPEC, Wire

CHUNK = 4
SCOPE = key("")


def printed(tokens: Sequence[int], chunk: int = CHUNK, seed: bytes = b"") -> m.Fingerprint:
    """Return the fingerprint of some tokens."""
    chain, last = b"", blake2b(seed, digest_size=8).digest()
    for start in range(0, len(tokens), chunk):
        last = blake2b(last + repr(list(tokens[start : start + chunk])).encode(), digest_size=8).digest()
        chain += last
    return m.Fingerprint(chunk, chain)


async def retain(
    rig: Rig,
    engine: m.Engine,
    request_id: str,
    tokens: Sequence[int],
    conversation: m.ConversationKey,
    ttl_s: float = 400.0,
) -> int:
    turn = await rig.begin(request_id, conversation)
    value = announcement(
        request_id,
        turn,
        conversation=conversation,
        ttl_s=ttl_s,
        token_count=len(tokens),
        fingerprint=printed(tokens),
    )
    assert (await rig.announce(engine, value)).outcome is m.AnnounceOutcome.ACCEPTED
    return turn


def lookup(rig: Rig, tokens: Sequence[int], scope: m.ConversationKey = SCOPE) -> str | m.MissReason:
    found = rig.plane.locations.lookup_prefix(scope, printed(tokens))
    return found if isinstance(found, m.MissReason) else found.location.key.conversation_id


async def begin(
    rig: Rig, request_id: str, tokens: Sequence[int], scope: m.ConversationKey = SCOPE
) -> BegunTurn:
    return await rig.plane.turns.begin(scope, request_id, 0.0, printed(tokens))


UNKNOWN = m.MissReason.UNKNOWN_CONVERSATION
TOKENS = list(range(100))


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1])
async def test_less_than_a_chunk_is_neither_found_nor_finds(rig: Rig, length: int) -> None:
    engine = await rig.engine()
    await retain(rig, engine, "q1", TOKENS[: CHUNK - 1], key("short"))
    assert len(rig.plane.prefixes) == 0
    assert lookup(rig, TOKENS[: CHUNK - 1]) is UNKNOWN
    await retain(rig, engine, "q2", TOKENS[:CHUNK], key("long"))
    assert lookup(rig, TOKENS[:length]) is UNKNOWN


@pytest.mark.parametrize("held", [CHUNK, CHUNK + 1, 2 * CHUNK - 1])
async def test_whole_chunks_count_and_no_more(rig: Rig, held: int) -> None:
    await retain(rig, await rig.engine(), "q1", TOKENS[:held], key("c"))
    assert lookup(rig, TOKENS[: CHUNK - 1]) is UNKNOWN
    assert lookup(rig, TOKENS[:CHUNK]) == "c"
    assert lookup(rig, TOKENS) == "c"


async def test_a_conversation_is_found_turn_after_turn(rig: Rig) -> None:
    engine = await rig.engine()
    first = await begin(rig, "r1", TOKENS[:10])
    assert first.known is UNKNOWN
    assert first.key.conversation_id.startswith(m.AUTO)
    assert first.turn_index == 1
    begun = first
    for number in (2, 3, 4):
        length = number * 20
        value = announcement(
            f"q{number}",
            begun.turn,
            conversation=first.key,
            token_count=length,
            fingerprint=printed(TOKENS[:length]),
        )
        await rig.announce(engine, value)
        begun = await begin(rig, f"r{number}", TOKENS[: length + 7])
        assert begun.key == first.key
        assert begun.turn_index == number
        assert isinstance(begun.known, m.Found)
        claim = await rig.claim(f"claim{number}", conversation=begun.key)
        assert isinstance(claim, m.Claim)
        assert claim.location.token_count == length


@pytest.mark.parametrize("at", [0, 3, 19])
async def test_what_was_edited_is_not_found(rig: Rig, at: int) -> None:
    await retain(rig, await rig.engine(), "q1", TOKENS[:20], key("c"))
    edited = [*TOKENS[:at], 777, *TOKENS[at + 1 :]]
    assert lookup(rig, edited) is UNKNOWN
    assert lookup(rig, TOKENS) == "c"


async def test_the_longest_is_found(rig: Rig) -> None:
    engine = await rig.engine()
    for length in (8, 40, 16):
        await retain(rig, engine, f"q{length}", TOKENS[:length], key(f"c{length}"))
    assert lookup(rig, TOKENS) == "c40"
    assert lookup(rig, TOKENS[:39]) == "c16"
    assert lookup(rig, TOKENS[:15]) == "c8"


@pytest.mark.parametrize(
    "other", [key("", tenant_id="other"), key("", model="other"), key("", adapter="other")]
)
async def test_others_are_not_found(rig: Rig, other: m.ConversationKey) -> None:
    await retain(rig, await rig.engine(), "q1", TOKENS[:20], key("c"))
    assert lookup(rig, TOKENS, other) is UNKNOWN
    begun = await begin(rig, "r1", TOKENS, other)
    assert begun.key.conversation_id.startswith(m.AUTO)
    assert begun.known is UNKNOWN
    assert lookup(rig, TOKENS) == "c"


async def test_another_chunk_size_is_another_fingerprint(rig: Rig) -> None:
    await retain(rig, await rig.engine(), "q1", TOKENS[:20], key("c"))
    chain = printed(TOKENS[:20]).chain
    found = rig.plane.locations.lookup_prefix(SCOPE, m.Fingerprint(CHUNK + 1, chain))
    assert found is UNKNOWN


async def test_hashes_that_meet_by_accident_offer_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_mixed", lambda last, salt: 0)
    engine = await rig.engine()
    await retain(rig, engine, "q1", TOKENS[:20], key("c"))
    await retain(rig, engine, "q2", TOKENS[:20], key("c", tenant_id="other"))
    await retain(rig, engine, "q3", TOKENS[:40], key("longer"))
    await retain(rig, engine, "q4", [*TOKENS[:19], 7], key("edited"))
    assert lookup(rig, TOKENS[:24]) == "c"
    assert lookup(rig, [*TOKENS[1:]]) is UNKNOWN


async def test_of_two_alike_the_newest_that_can_be_claimed_is_found(rig: Rig) -> None:
    engine = await rig.engine()
    for name in ("first", "second", "third"):
        await retain(rig, engine, f"q-{name}", TOKENS[:20], key(name))
    assert lookup(rig, TOKENS) == "third"
    assert isinstance(await rig.claim("claim1", conversation=key("third")), m.Claim)
    assert lookup(rig, TOKENS) == "second"
    await rig.plane.releases.end_conversation(key("second"))
    assert lookup(rig, TOKENS) == "first"
    await rig.plane.releases.freed(m.Holder("d", engine.engine_epoch, "q-first"))
    assert lookup(rig, TOKENS) is UNKNOWN
    assert len(rig.plane.prefixes) == 0


async def test_the_same_prompt_twice_at_a_time_goes_on_with_both(rig: Rig) -> None:
    engine = await rig.engine()
    for name in ("first", "second"):
        await retain(rig, engine, f"q-{name}", TOKENS[:20], key(name))
    begun = [await begin(rig, f"r{number}", TOKENS) for number in range(3)]
    assert [turn.key.conversation_id for turn in begun] == ["second", "first", "second"]


async def test_one_with_a_turn_in_flight_is_better_than_a_shorter_one(rig: Rig) -> None:
    engine = await rig.engine()
    await retain(rig, engine, "q1", TOKENS[:20], key("long"))
    await retain(rig, engine, "q2", TOKENS[:8], key("short"))
    await rig.begin("r", key("long"))
    assert (await begin(rig, "r2", TOKENS)).key == key("long")


async def test_one_that_cannot_be_claimed_is_passed_over(rig: Rig) -> None:
    engine, other = await rig.engine(), await rig.engine("other")
    await retain(rig, engine, "q1", TOKENS[:40], key("expiring"), ttl_s=9)
    await retain(rig, other, "q2", TOKENS[:30], key("draining"))
    await retain(rig, engine, "q3", TOKENS[:20], key("good"))
    await rig.plane.engines.drain("other")
    assert lookup(rig, TOKENS) == "good"
    assert (await begin(rig, "r1", TOKENS)).key == key("good")


async def test_if_none_can_be_claimed_the_turn_is_still_of_the_longest(rig: Rig) -> None:
    engine = await rig.engine()
    await retain(rig, engine, "q1", TOKENS[:40], key("expiring"), ttl_s=9)
    assert lookup(rig, TOKENS) is m.MissReason.EXPIRING
    begun = await begin(rig, "r1", TOKENS)
    assert (begun.key, begun.known) == (key("expiring"), m.MissReason.EXPIRING)


async def test_a_repeated_request_is_of_the_same_turn(rig: Rig) -> None:
    engine = await rig.engine()
    fresh = await begin(rig, "r1", TOKENS)
    assert await begin(rig, "r1", TOKENS) == fresh
    await retain(rig, engine, "q", TOKENS[:20], key("c"))
    begun = await begin(rig, "r2", TOKENS)
    assert isinstance(await rig.claim(conversation=key("c")), m.Claim)
    again = await begin(rig, "r2", TOKENS)
    assert (again.key, again.turn, again.known) == (key("c"), begun.turn, m.MissReason.CLAIMED)
    await rig.begin("r3", key("c"))
    assert (await begin(rig, "r2", TOKENS)).key != key("c")


async def test_a_request_id_names_nothing_of_another_tenants(rig: Rig) -> None:
    one = await begin(rig, "r", TOKENS)
    other = await begin(rig, "r", TOKENS, key("", tenant_id="other"))
    assert one.key.conversation_id != other.key.conversation_id
    assert other.key.tenant_id == "other"


async def test_a_damaged_note_is_as_good_as_none(rig: Rig) -> None:
    await begin(rig, "r", TOKENS)
    lease = await rig.store.grant_lease(100)
    await rig.store.transact([], [Put(keys.begun(SCOPE, "r"), b"\xff", lease.lease_id)])
    begun = await begin(rig, "r", TOKENS)
    assert await begin(rig, "r", TOKENS) == begun


async def test_notes_of_requests_do_not_stay(rig: Rig) -> None:
    await begin(rig, "r", TOKENS)
    assert len((await rig.store.scan(keys.BEGUN)).items) == 1
    await rig.clock.advance(200)
    assert (await rig.store.scan(keys.BEGUN)).items == ()


async def test_replicas_agree_and_one_that_is_behind_finds_nothing_twice() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory:
        stores = [SharedStore(memory) for _ in range(2)]
        async with replica(stores[0], clock) as here, replica(stores[1], clock) as there:
            mine, theirs = Rig(here, clock, memory), Rig(there, clock, memory)
            engine = await mine.engine()
            await retain(mine, engine, "q1", TOKENS[:20], key("c"))
            await retain(mine, engine, "q2", TOKENS[:8], key("shorter"))
            await settle()
            assert lookup(theirs, TOKENS) == "c"
            stores[1].watching.clear()
            first = await begin(mine, "r1", TOKENS)
            assert (await begin(theirs, "r1", TOKENS)).turn == first.turn
            fresh = await begin(mine, "r2", [5, *TOKENS])
            assert (await begin(theirs, "r2", [5, *TOKENS])).key == fresh.key
            assert isinstance(await mine.claim(conversation=key("c")), m.Claim)
            assert (await begin(theirs, "r3", TOKENS)).key == key("shorter")
            stores[1].watching.set()


async def test_a_replica_that_starts_later_finds_what_was_there_before() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory:
        async with replica(SharedStore(memory), clock) as plane:
            rig = Rig(plane, clock, memory)
            await retain(rig, await rig.engine(), "q1", TOKENS[:20], key("c"))
        async with replica(SharedStore(memory), clock) as plane:
            assert lookup(Rig(plane, clock, memory), TOKENS) == "c"
            plane.mirror.forget_everything()
            assert len(plane.prefixes) == 0
            plane.mirror.doubted.set()
            while not plane.mirror.caught_up.is_set():
                await clock.advance(0.1)
            assert lookup(Rig(plane, clock, memory), TOKENS) == "c"


async def test_over_the_wire(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    scope = cm.ConversationKey("t", "m", "")
    prompt = printed(TOKENS[:20])
    theirs = cm.Fingerprint(prompt.chunk_tokens, prompt.chain)
    begun = await wire.client.begin_turn(scope, "r1", fingerprint=theirs)
    assert begun.key.conversation_id.startswith(m.AUTO)
    value = cm.Announcement(
        begun.key,
        cm.RequestId("q"),
        begun.turn,
        20,
        4,
        announcement("q", 1).kv_transfer_params,
        theirs,
        400.0,
    )
    await wire.client.announce_location(SPEC.engine_id, epoch, value)
    found = await wire.client.lookup_location(scope, fingerprint=theirs)
    assert isinstance(found, cm.Location)
    assert found.key == begun.key
    again = await wire.client.begin_turn(scope, "r2", fingerprint=theirs)
    assert (again.key, again.turn_index) == (begun.key, 2)
    named = await wire.client.begin_turn(cm.ConversationKey("t", "m", "mine"), "r3", fingerprint=theirs)
    assert named.key.conversation_id == "mine"
    assert named.location is None


@pytest.mark.parametrize(
    ("fingerprint", "field"),
    [
        (cm.Fingerprint(64, b""), "fingerprint.chain"),
        (cm.Fingerprint(64, b"x" * 9), "fingerprint.chain"),
        (cm.Fingerprint(64, b"x" * (1024 * 1024 + 8)), "fingerprint.chain"),
        (cm.Fingerprint(0, b"x" * 8), "fingerprint.chunk_tokens"),
        (cm.Fingerprint(65_537, b"x" * 8), "fingerprint.chunk_tokens"),
    ],
)
@pytest.mark.parametrize("conversation_id", ["", "c"])
async def test_a_bad_fingerprint_is_named(
    wire: Wire, fingerprint: cm.Fingerprint, field: str, conversation_id: str
) -> None:
    scope = cm.ConversationKey("t", "m", conversation_id)
    with pytest.raises(InvalidFieldError, match=field):
        await wire.client.begin_turn(scope, "r", fingerprint=fingerprint)
    with pytest.raises(InvalidFieldError, match=field):
        await wire.client.lookup_location(scope, fingerprint=fingerprint)


async def test_without_a_fingerprint_an_id_is_needed(wire: Wire) -> None:
    with pytest.raises(InvalidFieldError, match="conversation_id"):
        await wire.client.begin_turn(cm.ConversationKey("t", "m", ""), "r")
    with pytest.raises(InvalidFieldError, match="tenant_id"):
        await wire.client.begin_turn(
            cm.ConversationKey("", "m", ""), "r", fingerprint=cm.Fingerprint(64, b"x" * 8)
        )


async def test_notes_of_turns_begun_by_prompt_are_bounded_as_conversations_are() -> None:
    async with running(m.Settings(max_conversations=20)) as rig:
        engine = await rig.engine()
        await retain(rig, engine, "q", TOKENS, key("c"))
        begun = {number: await begin(rig, f"r{number}", TOKENS) for number in range(60)}
        assert {turn.key for turn in begun.values()} == {key("c")}
        assert await noted(rig) == {keys.begun(SCOPE, f"r{number}") for number in range(60)}
        await rig.clock.advance(0.5)
        assert await noted(rig) == {keys.begun(SCOPE, f"r{number}") for number in range(40, 60)}
        assert (await begin(rig, "r59", TOKENS)).turn == begun[59].turn, "still idempotent"


async def noted(rig: Rig) -> set[bytes]:
    """Return the keys of the notes in the store."""
    return {item.key for item in (await rig.store.scan(keys.BEGUN)).items}


@pytest.mark.parametrize("start", [eager.now, eager.later])
@pytest.mark.parametrize("kind", ["lookup", "begin_turn"])
async def test_searches_for_long_prompts_are_not_made_in_a_row(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, start: Any, kind: str
) -> None:
    """Seen: sixty in one message held up everybody else's lookups for a second."""
    best, searches, worst, answered = rig.plane.prefixes.best, 0, 0, 0

    def counted(scope: m.ConversationKey, fingerprint: m.Fingerprint) -> module.Match | None:
        nonlocal searches
        searches += 1
        return best(scope, fingerprint)

    monkeypatch.setattr(rig.plane.prefixes, "best", counted)
    scope = common_pb2.ConversationKey(tenant_id="t", model="m")
    prompt = common_pb2.Fingerprint(chunk_tokens=1, chain=random.randbytes(64 * 1024))

    def operation(number: int) -> location_pb2.TurnsOperation:
        if kind == "lookup":
            asked = location_pb2.LookupLocationRequest(key=scope, fingerprint=prompt)
            return location_pb2.TurnsOperation(id=number, lookup=asked)
        begun = location_pb2.BeginTurnRequest(key=scope, request_id=f"r{number}", fingerprint=prompt)
        return location_pb2.TurnsOperation(id=number, begin_turn=begun)

    async def requests() -> AsyncIterator[location_pb2.TurnsRequest]:
        yield location_pb2.TurnsRequest(operations=[operation(number) for number in range(60)])

    async def write(answer: location_pb2.TurnsResponse) -> None:
        nonlocal answered
        answered += sum(not result.HasField("error") for result in answer.results)

    stream = asyncio.create_task(multiplexed(rig.plane.location_servicer, requests(), write, start))
    while not stream.done():
        before = searches
        await asyncio.sleep(0)
        worst = max(worst, searches - before)
    await stream
    assert (searches, answered) == (60, 60)
    assert worst == 1
