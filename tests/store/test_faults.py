"""The store that fails on demand: pairs of fault points, gates, unavailability."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from kvplane.store import Put, Store
from kvplane.store.errors import LeaseNotFoundError, StoreFullError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock, StoreCall, When, settle

CALLS: dict[StoreCall, Callable[[Store], Awaitable[object]]] = {
    "get": lambda store: store.get(b"k"),
    "scan": lambda store: store.scan(b""),
    "transact": lambda store: store.transact([], [Put(b"k", b"new")]),
    "grant_lease": lambda store: store.grant_lease(10),
    "keep_lease": lambda store: store.keep_lease(1),
    "revoke_lease": lambda store: store.revoke_lease(1),
    "watch": lambda store: anext(store.watch(b"", from_revision=2)),
}


@pytest_asyncio.fixture
async def store() -> AsyncIterator[FaultInjectingStore]:
    async with FaultInjectingStore(MemoryStore(ManualClock())) as store:
        lease = await store.grant_lease(10)
        await store.transact([], [Put(b"k", b"old", lease.lease_id)])
        store.calls.clear()
        yield store


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", CALLS)
async def test_each_call_fails_once_at_each_point(
    store: FaultInjectingStore, call: StoreCall, when: When
) -> None:
    store.fail_next(call, when=when)
    with pytest.raises(StoreUnavailableError):
        await CALLS[call](store)
    await CALLS[call](store)
    assert store.calls == {call: 2}


async def test_before_nothing_was_done_and_after_all_was(store: FaultInjectingStore) -> None:
    store.fail_next("transact", when="before")
    with pytest.raises(StoreUnavailableError):
        await store.transact([], [Put(b"k", b"new")])
    found = await store.get(b"k")
    assert found is not None
    assert found.value == b"old"
    store.fail_next("transact", when="after")
    with pytest.raises(StoreUnavailableError):
        await store.transact([], [Put(b"k", b"new")])
    found = await store.get(b"k")
    assert found is not None
    assert found.value == b"new"
    store.fail_next("revoke_lease", when="after")
    with pytest.raises(StoreUnavailableError):
        await store.revoke_lease(1)
    with pytest.raises(LeaseNotFoundError):
        await store.keep_lease(1)


async def test_other_errors_and_several_times(store: FaultInjectingStore) -> None:
    store.fail_next("transact", error=StoreFullError("full"), times=2)
    for _ in range(2):
        with pytest.raises(StoreFullError):
            await store.transact([], [])
    await store.transact([], [])


async def test_faults_wait_for_their_own_call_and_keep_their_order(store: FaultInjectingStore) -> None:
    store.fail_next("scan")
    store.fail_next("get", error=StoreFullError("first"))
    store.fail_next("get")
    with pytest.raises(StoreFullError):
        await store.get(b"k")
    with pytest.raises(StoreUnavailableError):
        await store.get(b"k")
    with pytest.raises(StoreUnavailableError):
        await store.scan(b"")


async def test_an_error_of_the_store_itself_leaves_the_after_fault_for_the_next(
    store: FaultInjectingStore,
) -> None:
    store.fail_next("keep_lease", when="after")
    with pytest.raises(LeaseNotFoundError):
        await store.keep_lease(99)
    with pytest.raises(StoreUnavailableError):
        await store.keep_lease(1)


@pytest.mark.parametrize(("when", "value"), [("before", b"old"), ("after", b"new")])
@pytest.mark.parametrize("fails", [False, True])
async def test_gate_holds_a_call_until_it_is_let_go(
    store: FaultInjectingStore, when: When, value: bytes, fails: bool
) -> None:
    gate = store.hold_next("transact", when=when)
    call = asyncio.ensure_future(store.transact([], [Put(b"k", b"new")]))
    await gate.reached()
    found = await store.get(b"k")
    assert found is not None
    assert found.value == value
    assert not call.done()
    if fails:
        gate.fail()
        with pytest.raises(StoreUnavailableError):
            await call
    else:
        gate.release()
        gate.release()
        assert (await call).succeeded


async def test_call_cancelled_at_a_gate(store: FaultInjectingStore) -> None:
    gate = store.hold_next("transact")
    call = asyncio.ensure_future(store.transact([], [Put(b"k", b"new")]))
    await gate.reached()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await store.transact([], [Put(b"k", b"newer")])).succeeded


async def test_unavailable_until_set_back(store: FaultInjectingStore) -> None:
    watch = store.watch(b"", from_revision=3)
    waiting = asyncio.ensure_future(anext(watch))
    await settle()
    store.set_unavailable(True)
    with pytest.raises(StoreUnavailableError):
        await waiting
    for call in CALLS.values():
        with pytest.raises(StoreUnavailableError):
            await call(store)
    store.set_unavailable(False)
    for call in CALLS.values():
        await call(store)
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_batch_lost_after_it_came_is_there_for_the_next_watch(store: FaultInjectingStore) -> None:
    watch = store.watch(b"", from_revision=2)
    store.fail_next("watch", when="after")
    with pytest.raises(StoreUnavailableError):
        await anext(watch)
    assert [batch async for batch in watch] == []
    assert (await anext(store.watch(b"", from_revision=2))).revision == 2


async def test_cancelled_step_leaves_no_task(store: FaultInjectingStore) -> None:
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(anext(store.watch(b"")))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(("call", "when"), [("put", "before"), ("get", "during")])
async def test_unknown_fault_points_are_refused(store: FaultInjectingStore, call: str, when: str) -> None:
    with pytest.raises(ValueError, match="no fault point"):
        store.fail_next(call, when=when)  # type: ignore[arg-type] # on purpose
