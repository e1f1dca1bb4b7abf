"""What the store in memory promises beyond the contract."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from kvplane.store import Compare, Put
from kvplane.store.clock import SystemClock
from kvplane.store.errors import CompactedError, FutureRevisionError, LeaseNotFoundError, StoreClosedError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle


async def put(store: MemoryStore, key: bytes, value: bytes = b"", lease_id: int = 0) -> int:
    return (await store.transact([], [Put(key, value, lease_id)])).revision


@pytest.mark.parametrize("arguments", [{"history_revisions": 0}, {"history_bytes": 0}])
def test_history_has_room_for_a_revision(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MemoryStore(ManualClock(), **arguments)


async def test_history_is_bounded_by_revisions() -> None:
    async with MemoryStore(ManualClock(), history_revisions=3) as store:
        revisions = [await put(store, b"k") for _ in range(6)]
        with pytest.raises(CompactedError) as caught:
            await anext(store.watch(b"", from_revision=revisions[2]))
        assert caught.value.compact_revision == revisions[3]
        watch = store.watch(b"", from_revision=revisions[3])
        assert [(await anext(watch)).revision for _ in range(3)] == revisions[3:]


async def test_history_is_bounded_by_bytes_but_keeps_the_newest_revision() -> None:
    async with MemoryStore(ManualClock(), history_bytes=1000) as store:
        small = [await put(store, b"%d" % number, bytes(300)) for number in range(5)]
        watch = store.watch(b"", from_revision=small[2])
        assert [(await anext(watch)).revision for _ in range(3)] == small[2:]
        with pytest.raises(CompactedError):
            await anext(store.watch(b"", from_revision=small[1]))
        large = await put(store, b"large", bytes(5000))
        assert (await anext(store.watch(b"", from_revision=large))).revision == large
        with pytest.raises(CompactedError):
            await anext(store.watch(b"", from_revision=small[4]))


async def test_compact_is_idempotent_and_refuses_the_future() -> None:
    async with MemoryStore(ManualClock()) as store:
        last = [await put(store, b"k") for _ in range(4)][-1]
        await store.compact(last)
        await store.compact(last - 1)
        await store.compact(0)
        assert (await anext(store.watch(b"", from_revision=last))).revision == last
        with pytest.raises(FutureRevisionError):
            await store.compact(last + 1)
    with pytest.raises(StoreClosedError):
        await store.compact(last)


async def test_slow_watcher_is_told_that_history_is_gone() -> None:
    async with MemoryStore(ManualClock(), history_revisions=5) as store:
        watch = store.watch(b"k", from_revision=await put(store, b"k"))
        await anext(watch)
        for _ in range(6):
            await put(store, b"k")
        for _ in range(2):  # and goes on being told
            with pytest.raises(CompactedError):
                await anext(watch)


async def test_quiet_watch_is_not_slow() -> None:
    async with MemoryStore(ManualClock(), history_revisions=5) as store:
        watch = store.watch(b"quiet")
        waiting = asyncio.ensure_future(anext(watch))
        await settle()
        for _ in range(50):
            await put(store, b"loud")
        revision = await put(store, b"quiet")
        assert (await waiting).revision == revision


async def test_cancelled_step_of_a_watch_loses_nothing() -> None:
    async with MemoryStore(ManualClock(), history_revisions=5) as store:
        watch = store.watch(b"k")
        for written in (0, 1, 3):
            waiting = asyncio.ensure_future(anext(watch))
            await settle()
            for _ in range(20):
                await put(store, b"other")
            revisions = [await put(store, b"k") for _ in range(written)]
            waiting.cancel()  # at the latest possible moment: it has been woken already
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert [(await anext(watch)).revision for _ in range(written)] == revisions


async def test_watches_hold_nothing_once_they_are_dropped() -> None:
    async with MemoryStore(ManualClock()) as store:
        waiting = [asyncio.ensure_future(anext(store.watch(b""))) for _ in range(3)]
        await settle()
        assert len(store._waiters) == 3
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert not store._waiters


async def test_leases_end_without_traffic_and_the_task_ends_with_them() -> None:
    clock = ManualClock()
    before = asyncio.all_tasks()
    async with MemoryStore(clock) as store:
        assert asyncio.all_tasks() == before
        leases = [await store.grant_lease(ttl_s) for ttl_s in (30, 10, 20, 10)]
        for number, lease in enumerate(leases):
            await put(store, b"%d" % number, b"", lease.lease_id)
        left = []
        for _ in range(3):
            await clock.advance(10)
            left.append(sorted(store._items))
        assert left == [[b"0", b"2"], [b"0"], []]
        assert (clock.sleepers, asyncio.all_tasks()) == (0, before)
        await store.grant_lease(10)
        assert len(asyncio.all_tasks()) == len(before) + 1
    assert (clock.sleepers, asyncio.all_tasks()) == (0, before)


async def test_no_task_is_left_however_often_the_next_deadline_moved() -> None:
    before = asyncio.all_tasks()
    store = MemoryStore(ManualClock())
    for ttl_s in range(60, 2, -1):
        await store.grant_lease(ttl_s)
    await store.aclose()
    assert asyncio.all_tasks() == before


async def test_close_may_be_cancelled_and_repeated() -> None:
    before = asyncio.all_tasks()
    store = MemoryStore(ManualClock())
    await store.grant_lease(10)
    await settle()
    closing = asyncio.ensure_future(store.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await store.aclose()
    assert asyncio.all_tasks() == before


async def test_the_leases_task_does_not_inherit_the_callers_context() -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span", default="none")
    seen: list[str] = []

    class WatchedClock(ManualClock):
        async def sleep(self, seconds: float) -> None:
            seen.append(span.get())
            await super().sleep(seconds)

    span.set("a request's")
    async with MemoryStore(WatchedClock()) as store:
        await store.grant_lease(10)
        await settle()
    assert seen == ["none"]


async def test_revoked_leases_are_forgotten() -> None:
    async with MemoryStore(ManualClock()) as store:
        kept = await store.grant_lease(1_000_000)
        for _ in range(1000):
            await store.revoke_lease((await store.grant_lease(1_000_000)).lease_id)
        assert len(store._deadlines) < 100
        await store.keep_lease(kept.lease_id)


async def test_many_renewals_keep_one_deadline() -> None:
    clock = ManualClock()
    async with MemoryStore(clock) as store:
        lease = await store.grant_lease(10)
        for _ in range(50):
            await clock.advance(9)
            await store.keep_lease(lease.lease_id)
        assert len(store._deadlines) == 1
        await clock.advance(10)
        with pytest.raises(LeaseNotFoundError):
            await store.keep_lease(lease.lease_id)


async def test_a_store_may_be_made_outside_an_event_loop_and_on_the_systems_clock() -> None:
    store = await asyncio.to_thread(MemoryStore, SystemClock())
    async with store:
        lease = await store.grant_lease(5)
        await put(store, b"k", b"v", lease.lease_id)
        found = await store.get(b"k")
        assert found is not None
        assert (await store.transact([Compare(b"k", found.mod_revision)], [])).succeeded
