"""Turns of one conversation that begin at once are numbered by one transaction, as if one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvplane.controlplane.model import Found, MissReason
from kvplane.controlplane.together import Together
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.testing import ManualClock, settle
from kvplane.tracing.context import CURRENT
from tests.controlplane.harness import Rig, announcement, key, replica
from tests.controlplane.test_lines import AT_ONCE, FarStore, running


async def test_all_turns_of_one_conversation_get_their_numbers_together() -> None:
    async with running() as (plane, store):
        before = store.asked
        begun = await asyncio.gather(*(plane.turns.begin(key(), f"r{n}", 0.0) for n in range(AT_ONCE)))
        numbers = [turn.turn for turn in begun]
        assert numbers == sorted(set(numbers))
        assert [turn.turn_index for turn in begun] == list(range(1, AT_ONCE + 1))
        # Each but the first follows one that is in flight.
        misses = [MissReason.UNKNOWN_CONVERSATION] + [MissReason.TURN_IN_FLIGHT] * (AT_ONCE - 1)
        assert [turn.known for turn in begun] == misses
        assert store.asked - before == 2
        assert not plane.turns._numbers


async def test_who_repeats_the_latest_request_gets_the_same_number() -> None:
    async with running() as (plane, _):
        names = ["a", "b", "b"]
        begun = await asyncio.gather(*(plane.turns.begin(key(), name, 0.0) for name in names))
        assert begun[1].turn == begun[2].turn > begun[0].turn
        assert (await plane.turns.begin(key(), "b", 0.0)).turn == begun[1].turn


async def test_who_leaves_takes_nobody_with_him() -> None:
    async with running() as (plane, store):
        begun = [asyncio.create_task(plane.turns.begin(key(), f"r{n}", 0.0)) for n in range(9)]
        await asyncio.sleep(0)
        for task in begun[::3]:
            task.cancel()
        told = await asyncio.gather(*begun, return_exceptions=True)
        assert [isinstance(turn, asyncio.CancelledError) for turn in told] == [n % 3 == 0 for n in range(9)]
        assert store.asked <= 4
        assert not plane.turns._numbers


async def test_a_store_that_is_away_fails_those_who_asked_then_and_nobody_later() -> None:
    async with running() as (plane, store):
        begun = [asyncio.create_task(plane.turns.begin(key(), f"r{n}", 0.0)) for n in range(9)]
        store.away = True
        told = await asyncio.gather(*begun, return_exceptions=True)
        assert {type(turn) for turn in told} == {StoreUnavailableError}
        store.away = False
        assert (await plane.turns.begin(key(), "later", 0.0)).turn_index == 1
        assert not plane.turns._numbers


async def test_two_replicas_number_turns_of_one_conversation_at_once() -> None:
    clock = ManualClock()
    async with FarStore(clock) as store, replica(store, clock) as plane, replica(store, clock) as other:
        before = store.asked
        planes = (plane, other)
        begun = await asyncio.gather(
            *(planes[n % 2].turns.begin(key(), f"r{n}", 0.0) for n in range(AT_ONCE))
        )
        assert len({turn.turn for turn in begun}) == AT_ONCE
        assert store.asked - before < AT_ONCE // 2


async def test_turns_at_once_wait_for_the_first_of_them_and_not_for_one_another(rig: Rig) -> None:
    def awaited(*names: str) -> list[int]:
        return [in_flight for _, in_flight in rig.plane.turns._numbering(key(), names).answer]

    first, *others = awaited("a", "b", "c")
    assert (first, len(set(others))) == (0, 1)
    assert others[0] > 0
    begun = await rig.begin("before")
    assert awaited("a", "b", "c") == [begun] * 3


async def test_who_knows_of_nothing_goes_on_from_any_turn_that_is_announced(rig: Rig) -> None:
    engine = await rig.engine()
    waiting = [asyncio.create_task(rig.plane.turns.begin(key(), f"r{n}", 5.0)) for n in range(9)]
    await settle()
    assert [task.done() for task in waiting] == [True] + [False] * 8
    first = waiting[0].result().turn
    await rig.announce(engine, announcement("q", first))
    for task in waiting[1:]:
        known = (await task).known
        assert isinstance(known, Found)
        assert known.location.turn == first


class Asked:
    """Answers by how many questions it has been asked, one call after another for each key."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.trace: object = None
        self.gate = asyncio.Event()
        self.deciding = False

    async def __call__(self, key: str, questions: Sequence[int]) -> list[int]:
        assert not self.deciding
        self.deciding = True
        self.calls.append(list(questions))
        self.trace = CURRENT.get()
        try:
            await self.gate.wait()
        finally:
            self.deciding = False
        return [question * 10 for question in questions]


async def test_who_comes_while_one_decides_is_decided_on_with_the_next() -> None:
    asked = Asked()
    together: Together[str, int, int] = Together(asked)
    first = asyncio.create_task(together.ask("k", 1))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(together.ask("k", n)) for n in (2, 3, 4)]
    await asyncio.sleep(0)
    first.cancel()
    rest[1].cancel()
    asked.gate.set()
    assert [await rest[0], await rest[2]] == [20, 40]
    assert asked.calls == [[1], [2, 4]]
    assert len(together) == 0


async def test_what_a_decision_raises_all_get_and_the_next_ask_anew() -> None:
    fails = True

    async def decide(key: str, questions: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("no")
        return list(questions)

    together: Together[str, int, int] = Together(decide)
    told = await asyncio.gather(*(together.ask("k", n) for n in range(5)), return_exceptions=True)
    assert [str(error) for error in told] == ["no"] * 5
    fails = False
    assert await together.ask("k", 7) == 7
    assert len(together) == 0
