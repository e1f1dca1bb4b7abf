"""What conformance checks are made of: what they need of a backend, and how they say what is wrong.

Nothing here knows a test framework: a check is a coroutine that raises AssertionError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from kvplane.store.base import Event, EventBatch, KeyValue, Put, Store
from kvplane.store.errors import StoreError

E = TypeVar("E", bound=StoreError)
T = TypeVar("T")

_SPAWNED: ContextVar[list[asyncio.Future[Any]]] = ContextVar("_SPAWNED")


@dataclass(frozen=True, slots=True)
class StoreUnderTest:
    """A store with no keys in it that nobody else writes to, and the means to move its world."""

    store: Store
    expire: Callable[[float], Awaitable[None]]
    """Let that many seconds pass: exactly, where the clock is controllable."""
    compact: Callable[[int], Awaitable[None]]
    """Make the store forget the history before a revision."""
    expiry_lag_s: float = 0.0
    """How late after its ttl the backend may be in ending a lease."""
    patience_s: float = 10.0
    """How long a check waits, in real time, for an event that has to come."""


StoreFactory = Callable[[], AbstractAsyncContextManager[StoreUnderTest]]


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """One property of the contract. Call it with a factory; it raises AssertionError if it does not hold.

    Or another error, where the store raised one that the contract does not foresee.
    """

    name: str
    description: str
    needs_controllable_clock: bool
    check: Callable[[StoreFactory], Coroutine[Any, Any, None]]

    async def __call__(self, factory: StoreFactory) -> None:
        """Run the check on stores of the factory's making. Leaves no tasks behind, also when it fails."""
        spawned: list[asyncio.Future[Any]] = []
        _SPAWNED.set(spawned)
        try:
            await self.check(factory)
        finally:
            for task in spawned:
                task.cancel()
            await asyncio.gather(*spawned, return_exceptions=True)


class CheckList:
    """Collects checks in the order in which they are written."""

    def __init__(self) -> None:
        self.checks: list[ConformanceCheck] = []

    def check(
        self, function: Callable[[StoreUnderTest], Coroutine[Any, Any, None]]
    ) -> Callable[[StoreUnderTest], Coroutine[Any, Any, None]]:
        """Register a check that takes one store, on any clock (decorator)."""

        async def run(factory: StoreFactory) -> None:
            async with factory() as subject:
                await function(subject)

        self._add(function, run, needs_controllable_clock=False)
        return function

    def check_with_factory(
        self, *, needs_controllable_clock: bool
    ) -> Callable[
        [Callable[[StoreFactory], Coroutine[Any, Any, None]]],
        Callable[[StoreFactory], Coroutine[Any, Any, None]],
    ]:
        """Register a check that makes its own stores (decorator)."""

        def register(
            function: Callable[[StoreFactory], Coroutine[Any, Any, None]],
        ) -> Callable[[StoreFactory], Coroutine[Any, Any, None]]:
            self._add(function, function, needs_controllable_clock=needs_controllable_clock)
            return function

        return register

    def _add(
        self,
        function: Callable[..., Coroutine[Any, Any, None]],
        run: Callable[[StoreFactory], Coroutine[Any, Any, None]],
        *,
        needs_controllable_clock: bool,
    ) -> None:
        description = (function.__doc__ or "").strip()
        self.checks.append(ConformanceCheck(function.__name__, description, needs_controllable_clock, run))


def ensure(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def same(actual: object, expected: object, what: str) -> None:
    """Raise AssertionError unless both are equal."""
    ensure(actual == expected, f"{what}: {_short(actual)} instead of {_short(expected)}")


class Raises(Generic[E]):
    """Context in which a certain StoreError has to be raised; `error` is it, afterwards."""

    error: E

    def __init__(self, kind: type[E], what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> Raises[E]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        ensure(error is not None, f"{self._what}: no {self._kind.__name__} was raised")
        if isinstance(error, self._kind):
            self.error = error
            return True
        return False


def spawn(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Run something beside the check, at the longest until the check ends."""
    task = asyncio.ensure_future(awaitable)
    _SPAWNED.get().append(task)
    return task


async def put(store: Store, key: bytes, value: bytes = b"", *, lease_id: int = 0) -> int:
    """Write one key and return the revision."""
    done = await store.transact([], [Put(key, value, lease_id)])
    ensure(done.succeeded, f"a put without compares of {key!r} did not succeed")
    return done.revision


async def head(store: Store) -> int:
    """Return the store's revision."""
    return (await store.scan(b"", limit=1)).revision


async def contents(store: Store, prefix: bytes = b"") -> dict[bytes, bytes]:
    """Return all keys and values below a prefix, read page by page."""
    found: dict[bytes, bytes] = {}
    after = b""
    while True:
        page = await store.scan(prefix, after=after)
        found.update((item.key, item.value) for item in page.items)
        if not page.more:
            return found
        ensure(bool(page.items), "a page without keys says that keys follow")
        after = page.items[-1].key


async def value_of(store: Store, key: bytes) -> bytes | None:
    """Return a key's value, None if it is absent."""
    found = await store.get(key)
    return None if found is None else found.value


async def batches(subject: StoreUnderTest, watch: AsyncIterator[EventBatch], until: int) -> list[EventBatch]:
    """Read a watch up to revision `until`, which has to be among what it tells."""
    read: list[EventBatch] = []
    try:
        async with asyncio.timeout(subject.patience_s):
            while not read or read[-1].revision < until:
                read.append(await anext(watch))
    except TimeoutError:
        raise AssertionError(
            f"the watch did not tell revision {until}, only {[batch.revision for batch in read]}"
        ) from None
    same(read[-1].revision, until, "the last revision told")
    return read


async def patiently(subject: StoreUnderTest, awaitable: Awaitable[T], what: str) -> T:
    """Await what has to happen soon."""
    try:
        async with asyncio.timeout(subject.patience_s):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what}: did not happen") from None


def summary(batch: EventBatch) -> list[tuple[bytes, bytes | None]]:
    """Return a batch as (key, new value or None) pairs."""
    return [(event.key, _value(event.current)) for event in batch.events]


def changes(read: Iterable[EventBatch]) -> list[tuple[bytes, bytes | None, bytes | None]]:
    """Return all events as (key, previous value, new value)."""
    return [_change(event) for batch in read for event in batch.events]


def _change(event: Event) -> tuple[bytes, bytes | None, bytes | None]:
    return (event.key, _value(event.previous), _value(event.current))


def _value(item: KeyValue | None) -> bytes | None:
    return None if item is None else item.value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"
