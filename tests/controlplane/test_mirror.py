"""The copy of the store: never behind what is known, and whole again after any gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from kvplane.controlplane.fleet_time import FleetTime
from kvplane.controlplane.ledger import Keep, Ledger
from kvplane.controlplane.mirror import Mirror
from kvplane.store.base import Compare, Delete, Event, Operation, Put
from kvplane.store.errors import FutureRevisionError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from tests.controlplane.harness import SharedStore


class Follower:
    """A mirror that follows, and what it heard."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.memory = MemoryStore(self.clock)
        self.store = SharedStore(self.memory)
        self.mirror = Mirror(self.store, self.clock, max_staleness_s=2.0)
        self.heard: list[Event] = []
        self.mirror.listen(b"l/", self.heard.append)

    def values(self) -> dict[bytes, bytes | None]:
        """What a listener knows."""
        return {event.key: event.current.value if event.current else None for event in self.heard}


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    follower = Follower()
    await follower.memory.transact([], [Put(b"l/old", b"1"), Put(b"l/stays", b"1")])
    task = asyncio.create_task(follower.mirror.run())
    await settle()
    yield follower
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await follower.memory.aclose()


async def test_it_begins_with_what_is_there(follower: Follower) -> None:
    assert follower.mirror.listed.is_set()
    assert follower.values() == {b"l/old": b"1", b"l/stays": b"1"}
    await follower.memory.transact([], [Put(b"l/new", b"2"), Delete(b"l/old")])
    await settle()
    assert follower.values() == {b"l/old": None, b"l/stays": b"1", b"l/new": b"2"}
    assert follower.mirror.get(b"l/old") is None
    assert len(follower.mirror) == 2


async def test_what_is_known_already_is_heard_of_once(follower: Follower) -> None:
    follower.store.watching.clear()
    operations: list[Operation] = [Put(b"l/mine", b"1"), Delete(b"l/old")]
    done = await follower.store.transact([], operations)
    follower.heard.clear()
    follower.mirror.committed(done.revision, operations, 0.0)
    assert follower.values() == {b"l/mine": b"1", b"l/old": None}
    follower.store.watching.set()
    await settle()
    assert len(follower.heard) == 2


async def test_the_watch_does_not_bring_back_what_is_known_to_be_gone(follower: Follower) -> None:
    follower.store.watching.clear()
    put, delete = [Put(b"l/k", b"1")], [Delete(b"l/k")]
    await follower.memory.transact([], put)
    done = await follower.memory.transact([], delete)
    follower.mirror.committed(done.revision, delete, 0.0)
    follower.heard.clear()
    follower.store.watching.set()
    await settle()
    assert follower.mirror.get(b"l/k") is None
    assert follower.heard == []
    await follower.memory.transact([], put)
    await settle()
    assert follower.mirror.get(b"l/k") is not None


async def test_a_failed_transaction_brings_what_is_there(follower: Follower) -> None:
    follower.store.watching.clear()
    await follower.memory.transact([], [Put(b"l/old", b"2"), Delete(b"l/stays")])
    compares = [Compare(b"l/old", 1), Compare(b"l/stays", 1), Compare(b"l/none", 0)]
    failed = await follower.store.transact(compares, [])
    assert not failed.succeeded
    follower.mirror.found(failed.revision, compares, failed.found)
    old = follower.mirror.get(b"l/old")
    assert old is not None
    assert old.value == b"2"
    assert follower.mirror.get(b"l/stays") is None


async def test_after_compaction_it_lists_again_and_misses_no_removal(follower: Follower) -> None:
    follower.store.set_unavailable(True)
    await settle()
    await follower.memory.transact([], [Delete(b"l/old")])
    await follower.memory.transact([], [Put(b"l/new", b"2")])
    await follower.memory.transact([], [Put(b"l/stays", b"3")])
    page = await follower.memory.scan(b"")
    await follower.memory.compact(page.revision)
    follower.store.set_unavailable(False)
    await follower.clock.advance(1.0)
    assert follower.values() == {b"l/old": None, b"l/stays": b"3", b"l/new": b"2"}


async def test_a_store_that_began_anew_is_read_anew(follower: Follower) -> None:
    await follower.memory.transact([], [Delete(b"l/old"), Put(b"l/stays", b"2")])
    await settle()
    before = follower.mirror.get(b"l/stays")
    follower.heard.clear()
    follower.store.set_unavailable(True)
    await settle()
    follower.store.fail_next("watch", error=FutureRevisionError(9, 1))
    await follower.memory.transact([], [Put(b"l/x", b"1")])
    follower.store.set_unavailable(False)
    await follower.clock.advance(1.0)
    assert follower.heard[0] == Event(b"l/stays", None, before)
    assert follower.values() == {b"l/stays": b"2", b"l/x": b"1"}


async def test_before_it_has_read_the_store_it_answers_nothing() -> None:
    follower = Follower()
    with pytest.raises(StoreUnavailableError):
        follower.mirror.require_fresh()
    local = Mirror(follower.memory, follower.clock)
    with pytest.raises(StoreUnavailableError):
        local.require_fresh()
    await follower.memory.aclose()


async def test_a_broken_listener_does_not_harm_the_others(follower: Follower) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    heard: list[Event] = []
    follower.mirror.listen(b"l/", fail)
    follower.mirror.listen(b"l/", heard.append)
    await follower.memory.transact([], [Put(b"l/x", b"1")])
    await settle()
    assert [event.key for event in heard] == [b"l/x"]


async def test_records_share_leases_but_not_too_many_of_them() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as memory:
        mirror = Mirror(memory, clock)
        await mirror.run()
        ledger = Ledger(memory, FleetTime(clock), mirror)
        until_ms = clock.now_ms() + 60_000
        await asyncio.gather(
            *[ledger.commit([], [Keep(b"l/%d" % number, b"", until_ms)]) for number in range(2500)]
        )
        items = [item async for item in ledger.scan(b"l/")]
        leases = {item.lease_id for item in items}
        assert (len(items), len(leases)) == (2500, 3)
        await clock.advance(119.9)
        assert len([item async for item in ledger.scan(b"l/")]) == 2500
        await clock.advance(30.0)
        assert [item async for item in ledger.scan(b"")] == []


async def test_an_answer_that_comes_late_is_no_reason_to_doubt(follower: Follower) -> None:
    """It told what was true; the watch has brought what came later."""
    compares = [Compare(b"l/old", 1)]
    failed = await follower.store.transact(compares, [])
    await follower.memory.transact([], [Put(b"l/old", b"2")])
    await settle()
    follower.mirror.found(failed.revision, compares, failed.found)
    assert not follower.mirror.doubted.is_set()
    old = follower.mirror.get(b"l/old")
    assert old is not None
    assert old.value == b"2"


async def test_a_record_that_is_older_than_it_was_is_one(follower: Follower) -> None:
    known = follower.mirror.get(b"l/old")
    assert known is not None
    older = replace(known, mod_revision=known.mod_revision - 1)
    follower.mirror.found(99, [Compare(b"l/old", 7)], [older])
    assert follower.mirror.doubted.is_set()
