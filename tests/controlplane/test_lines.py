"""Many at once for one conversation: each gets an answer, soon, and none is held up by those of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvplane.controlplane.lines import Lines, contested
from kvplane.controlplane.server import ControlPlane
from kvplane.store.base import Compare, Delete, Operation, Put, Transaction
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from tests.controlplane.harness import key, replica

AT_ONCE = 60


class FarStore(MemoryStore):
    """One that others get in between on the way to it."""

    away = False
    asked = 0

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        self.asked += 1
        for _ in range(3):
            await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailableError("away")
        return await super().transact(compares, operations)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[ControlPlane, FarStore]]:
    clock = ManualClock()
    async with FarStore(clock) as store, replica(store, clock) as plane:
        yield plane, store


async def until_contested(plane: ControlPlane) -> None:
    """Wait until all have tried once."""
    for _ in range(6):
        await asyncio.sleep(0)
    assert plane.turns._ledger._lines


async def change(plane: ControlPlane, name: str) -> int:
    """Make a decision on the record that all of these share; returns a number that no other has."""
    turns = plane.turns
    return (await turns._ledger.decide(lambda: turns._numbering(key(), [name])))[0][0].turn


async def test_all_who_change_one_record_do_so_in_turn() -> None:
    async with running() as (plane, store):
        before = store.asked
        made = await asyncio.gather(*(change(plane, f"r{n}") for n in range(AT_ONCE)))
        assert len(set(made)) == AT_ONCE
        # One transaction for the first, one in vain and one in turn for each of the others.
        assert store.asked - before <= 2 * AT_ONCE + 2
        assert not plane.turns._ledger._lines


async def test_those_of_other_conversations_wait_for_nobody() -> None:
    async with running() as (plane, _):
        busy = [asyncio.create_task(change(plane, f"r{n}")) for n in range(AT_ONCE)]
        await until_contested(plane)
        await plane.turns.begin(key("other"), "r", 0.0)
        assert sum(task.done() for task in busy) < AT_ONCE // 2
        await asyncio.gather(*busy)


async def test_who_leaves_the_line_and_a_store_that_is_away_hold_nobody_up() -> None:
    async with running() as (plane, store):
        waiting = [asyncio.create_task(change(plane, f"r{n}")) for n in range(AT_ONCE)]
        await until_contested(plane)
        for task in waiting[1::3]:
            task.cancel()
        store.away = True
        await asyncio.sleep(0)
        store.away = False
        told = await asyncio.gather(*waiting, return_exceptions=True)
        gone = [isinstance(turn, asyncio.CancelledError) for turn in told]
        assert gone == [number % 3 == 1 for number in range(AT_ONCE)]
        assert sum(isinstance(turn, BaseException) for turn in told) == sum(gone)
        assert not plane.turns._ledger._lines


async def test_a_line_is_gone_when_all_have_left() -> None:
    lines = Lines()
    await lines.enter(b"k")
    later = [asyncio.create_task(lines.enter(b"k")) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in later)
    later[0].cancel()
    lines.leave(b"k")
    await later[1]
    assert b"k" in lines
    lines.leave(b"k")
    assert (len(lines), b"k" in lines) == (0, False)


@pytest.mark.parametrize(
    ("writes", "expected"), [([Put(b"x", b""), Delete(b"b")], b"b"), ([Put(b"x", b"")], None), ([], None)]
)
def test_what_is_contested_is_what_is_changed_as_it_was_found(
    writes: list[Put | Delete], expected: bytes | None
) -> None:
    assert contested([Compare(b"a", 1), Compare(b"b", 2)], writes) == expected
