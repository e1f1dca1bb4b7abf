"""The stores that are checked. A new backend is one more entry, once its scheme is written."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvplane.store.instrumented import InstrumentedStore, Outcome
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock, StoreFactory, StoreUnderTest


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of store under test."""

    name: str
    factory: StoreFactory
    controllable_clock: bool


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


BACKENDS = (
    Backend("memory", memory_factory(), controllable_clock=True),
    Backend("memory-after-a-pause", _memory_after_a_pause, controllable_clock=True),
    Backend("wrapped", _wrapped, controllable_clock=True),
)
