"""Upkeep outlasts an election: reads are repeated, writes never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvplane.controlplane.upkeep.patient import PatientStore
from kvplane.store.base import Compare, Put, Store
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock
from kvplane.store.testing.faults import StoreCall

CALLS: dict[StoreCall, Callable[[Store], Awaitable[object]]] = {
    "get": lambda store: store.get(b"k"),
    "scan": lambda store: store.scan(b""),
    "transact": lambda store: store.transact([Compare(b"k", 0)], []),
    "grant_lease": lambda store: store.grant_lease(5),
    "keep_lease": lambda store: store.keep_lease(1),
    "revoke_lease": lambda store: store.revoke_lease(1),
}


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def faulty(clock: ManualClock) -> AsyncIterator[FaultInjectingStore]:
    async with FaultInjectingStore(MemoryStore(clock)) as store:
        await store.grant_lease(1000)
        yield store


@pytest.mark.parametrize("call", CALLS)
async def test_reads_and_leases_are_asked_for_again(
    call: StoreCall, faulty: FaultInjectingStore, clock: ManualClock
) -> None:
    faulty.fail_next(call, times=5)
    asked = asyncio.ensure_future(CALLS[call](PatientStore(faulty, clock)))
    await clock.advance(7.5)
    assert not asked.done()
    await clock.advance(0.5)
    await asked


@pytest.mark.parametrize("call", CALLS)
async def test_patience_ends(call: StoreCall, faulty: FaultInjectingStore, clock: ManualClock) -> None:
    faulty.fail_next(call, times=6)
    asked = asyncio.ensure_future(CALLS[call](PatientStore(faulty, clock)))
    await clock.advance(8)
    with pytest.raises(StoreUnavailableError):
        await asked


async def test_writes_are_passed_on_once(faulty: FaultInjectingStore, clock: ManualClock) -> None:
    faulty.fail_next("transact")
    with pytest.raises(StoreUnavailableError):
        await PatientStore(faulty, clock).transact([], [Put(b"k", b"")])
    assert await faulty.get(b"k") is None


async def test_it_is_the_same_store(clock: ManualClock) -> None:
    async with PatientStore(MemoryStore(clock), clock) as store:
        steps = store.watch(b"")
        step = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0)
        await store.transact([], [Put(b"k", b"v")])
        assert [event.key for event in (await step).events] == [b"k"]
