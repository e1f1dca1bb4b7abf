"""A store that tells how its calls go, and whether it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Protocol

from kvplane.store.base import (
    Compare,
    Event,
    EventBatch,
    KeyValue,
    Lease,
    Operation,
    Page,
    Store,
    StoreFacts,
    Transaction,
)
from kvplane.store.clock import Clock
from kvplane.store.errors import (
    CompactedError,
    FutureRevisionError,
    InvalidStoreRequestError,
    LeaseNotFoundError,
    StoreClosedError,
    StoreFullError,
    StoreUnavailableError,
)


class Outcome(StrEnum):
    """How a call went; few enough for a metric's label."""

    OK = "ok"
    CONFLICT = "conflict"
    """A transaction whose compares did not hold."""
    LEASE_NOT_FOUND = "lease_not_found"
    COMPACTED = "compacted"
    FUTURE_REVISION = "future_revision"
    FULL = "full"
    UNAVAILABLE = "unavailable"
    INVALID = "invalid"
    CLOSED = "closed"
    INTERRUPTED = "interrupted"
    """Cancelled, or ended by an error that is not a store's: it says nothing about the store."""


_OUTCOMES: tuple[tuple[type[Exception], Outcome], ...] = (
    (LeaseNotFoundError, Outcome.LEASE_NOT_FOUND),
    (CompactedError, Outcome.COMPACTED),
    (FutureRevisionError, Outcome.FUTURE_REVISION),
    (StoreFullError, Outcome.FULL),
    (StoreUnavailableError, Outcome.UNAVAILABLE),
    (InvalidStoreRequestError, Outcome.INVALID),
    (StoreClosedError, Outcome.CLOSED),
)
_NO_EVIDENCE = frozenset({Outcome.INVALID, Outcome.CLOSED, Outcome.INTERRUPTED})


class Observe(Protocol):
    """Told of every call once it is over. Must be quick and must not raise."""

    def __call__(self, operation: str, seconds: float, outcome: Outcome) -> None:
        """Take note of one call of the Store method `operation`."""


class InstrumentedStore(Store):
    """Passes every call on to `inner`, reports it, and remembers whether the store answered.

    A watch is reported once, when it ends with an error: its seconds are those since its first step.
    `aclose` is passed on and not reported.
    """

    def __init__(self, inner: Store, observe: Observe, clock: Clock) -> None:
        self._inner = inner
        self._observe = observe
        self._clock = clock
        self._healthy = True

    @property
    def healthy(self) -> bool:
        """False if the last call that tells anything about the store ended with StoreUnavailableError.

        True before any. Calls that were cancelled, were invalid or came after `aclose` tell nothing.
        """
        return self._healthy

    @property
    def shared(self) -> bool:
        """See Store."""
        return self._inner.shared

    def observe(self, listener: Callable[[Event], None]) -> Mapping[bytes, KeyValue] | None:
        """See Store."""
        return self._inner.observe(listener)

    async def facts(self) -> StoreFacts:
        """See Store. Not reported: it says nothing of how calls go."""
        return await self._inner.facts()

    async def caution(self) -> str | None:
        """See Store. Not reported: it is asked once."""
        return await self._inner.caution()

    async def get(self, key: bytes) -> KeyValue | None:
        """See Store."""
        with _Call(self, "get"):
            return await self._inner.get(key)

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        """See Store."""
        with _Call(self, "scan"):
            return await self._inner.scan(prefix, after=after, limit=limit)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store."""
        began = self._clock.monotonic()  # not as a _Call: it is made several times per turn
        try:
            done = await self._inner.transact(compares, operations)
        except BaseException as error:
            self._report("transact", began, _outcome_of(error))
            raise
        self._report("transact", began, Outcome.OK if done.succeeded else Outcome.CONFLICT)
        return done

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See Store."""
        with _Call(self, "grant_lease"):
            return await self._inner.grant_lease(ttl_s)

    async def keep_lease(self, lease_id: int) -> Lease:
        """See Store."""
        with _Call(self, "keep_lease"):
            return await self._inner.keep_lease(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        """See Store."""
        with _Call(self, "revoke_lease"):
            await self._inner.revoke_lease(lease_id)

    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        """See Store."""
        return _InstrumentedWatch(self, self._inner.watch(prefix, from_revision=from_revision))

    async def aclose(self) -> None:
        """See Store."""
        await self._inner.aclose()

    def _note(self, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            self._healthy = True
        elif outcome not in _NO_EVIDENCE:
            self._healthy = outcome is not Outcome.UNAVAILABLE

    def _report(self, operation: str, started: float, outcome: Outcome) -> None:
        self._note(outcome)
        self._observe(operation, self._clock.monotonic() - started, outcome)


class _Call:
    """One call's report. A class because a generator's context manager costs as much as the call."""

    __slots__ = ("_operation", "_started", "_store", "outcome")

    def __init__(self, store: InstrumentedStore, operation: str) -> None:
        self._store = store
        self._operation = operation
        self._started = 0.0
        self.outcome = Outcome.OK

    def __enter__(self) -> _Call:
        self._started = self._store._clock.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.outcome = _outcome_of(error)
        self._store._report(self._operation, self._started, self.outcome)


class _InstrumentedWatch(AsyncIterator[EventBatch]):
    def __init__(self, store: InstrumentedStore, inner: AsyncIterator[EventBatch]) -> None:
        self._store = store
        self._inner = inner
        self._started: float | None = None

    async def __anext__(self) -> EventBatch:
        if self._started is None:
            self._started = self._store._clock.monotonic()
        try:
            batch = await anext(self._inner)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._store._report("watch", self._started, _outcome_of(error))
            raise
        self._store._note(Outcome.OK)
        return batch


def _outcome_of(error: BaseException) -> Outcome:
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return Outcome.INTERRUPTED
