"""The stores that are checked. A new backend is one more entry, once its scheme is written."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvplane.etcd.v1 import etcd_pb2
from kvplane.store.clock import SystemClock
from kvplane.store.etcd import EtcdSettings, EtcdStore
from kvplane.store.etcd.methods import COMPACT
from kvplane.store.instrumented import InstrumentedStore, Outcome
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock, StoreFactory, StoreUnderTest


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of store under test, made by `factory` from the endpoint of the tests' etcd if it needs one."""

    name: str
    factory: Callable[[str], StoreFactory]
    controllable_clock: bool
    needs_etcd: bool = False


def memory_factory(
    make: Callable[[ManualClock], MemoryStore] = MemoryStore, *, patience_s: float = 10.0
) -> StoreFactory:
    """Return a factory of stores in memory (or what `make` makes of one) whose time passes in steps."""

    @asynccontextmanager
    async def factory() -> AsyncIterator[StoreUnderTest]:
        clock = ManualClock()
        store = make(clock)
        async with store:
            yield StoreUnderTest(store, clock.advance, store.compact, patience_s=patience_s)

    return factory


@asynccontextmanager
async def _memory_after_a_pause() -> AsyncIterator[StoreUnderTest]:
    """Time passes without any task's running: what is due has to be noticed by the call that comes next."""
    clock = ManualClock()

    async def expire(seconds: float) -> None:
        clock.jump(seconds)

    async with MemoryStore(clock) as store:
        yield StoreUnderTest(store, expire, store.compact)


@asynccontextmanager
async def _wrapped() -> AsyncIterator[StoreUnderTest]:
    """The wrappers, idle, keep the contract too."""

    def observe(operation: str, seconds: float, outcome: Outcome) -> None:
        assert seconds >= 0

    clock = ManualClock()
    inner = MemoryStore(clock)
    async with InstrumentedStore(FaultInjectingStore(inner), observe, clock) as store:
        yield StoreUnderTest(store, clock.advance, inner.compact)


_numbers = itertools.count()


def etcd_factory(endpoint: str) -> StoreFactory:
    """Return a factory of stores in a real etcd that nobody else writes to, each below its own prefix."""

    @asynccontextmanager
    async def factory() -> AsyncIterator[StoreUnderTest]:
        settings = EtcdSettings((endpoint,), b"/conformance/%d/" % next(_numbers), timeout_s=10.0)
        store = EtcdStore(settings, SystemClock())

        async def compact(revision: int) -> None:
            # What lies before `revision` goes. Of the revision itself etcd would not keep the removals.
            await store._client.repeated(COMPACT, etcd_pb2.CompactionRequest(revision=revision - 1))

        async with store:
            yield StoreUnderTest(store, asyncio.sleep, compact, expiry_lag_s=2.0, patience_s=20.0)
        async with EtcdStore(settings, SystemClock()) as cleaner:
            for lease_id in store._leases._notes:
                await cleaner.revoke_lease(lease_id)  # its end would be a revision in another check's store

    return factory


BACKENDS = (
    Backend("memory", lambda _: memory_factory(), controllable_clock=True),
    Backend("memory-after-a-pause", lambda _: _memory_after_a_pause, controllable_clock=True),
    Backend("wrapped", lambda _: _wrapped, controllable_clock=True),
    Backend("etcd", etcd_factory, controllable_clock=False, needs_etcd=True),
)
