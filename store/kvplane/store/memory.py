"""The embedded store: everything in this process, nothing survives it.

Only one event loop may use a store, and no operation suspends between reading and writing, so each is atomic
and a cancelled one has either not begun or is complete. The exception is a watch's step, which may be
cancelled while it waits and then continues where it was.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvplane.store.base import (
    Compare,
    Event,
    EventBatch,
    KeyValue,
    Lease,
    Operation,
    Page,
    Put,
    Store,
    Transaction,
)
from kvplane.store.clock import Clock
from kvplane.store.errors import (
    CompactedError,
    FutureRevisionError,
    LeaseNotFoundError,
    StoreClosedError,
)
from kvplane.store.limits import check_key, check_scan, check_transaction, check_watch, lease_ttl
from kvplane.store.sortedkeys import SortedKeys

HISTORY_REVISIONS = 100_000
HISTORY_BYTES = 128 * 1024 * 1024
_FIRST_REVISION = 1  # an empty store's, as etcd's


@dataclass(slots=True, eq=False)
class _HeldLease:
    """A running lease. Times are whole microseconds: sums of floats miss "exactly at its ttl"."""

    lease_id: int
    ttl_s: float
    deadline_us: int
    keys: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A watch's step that waits. `found` is the first revision since that concerns it; 0 for none yet."""

    prefix: bytes
    woken: asyncio.Future[None]
    found: int = 0

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class MemoryStore(Store):
    """A Store in memory. `get` and `transact` take O(log n) in the number of keys.

    `history_revisions` and `history_bytes` (keys and values, roughly) bound what watches can replay, and so
    how far a watcher may fall behind; the newest revision is always kept. Ended leases are noticed before
    every operation, and by a task that sleeps on `clock` until the next one is due.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        history_revisions: int = HISTORY_REVISIONS,
        history_bytes: int = HISTORY_BYTES,
    ) -> None:
        if history_revisions < 1 or history_bytes < 1:
            raise ValueError("history_revisions and history_bytes are at least 1")
        self._clock = clock
        self._history_revisions = history_revisions
        self._history_bytes = history_bytes
        self._closed = False
        self._revision = _FIRST_REVISION
        self._items: dict[bytes, KeyValue] = {}
        self._keys = SortedKeys()
        # Revisions _oldest.._revision; a dict because deques are slow in the middle and lists at the front.
        self._history: dict[int, EventBatch] = {}
        self._history_size = 0
        self._oldest = _FIRST_REVISION
        self._waiters: dict[_Waiter, None] = {}
        self._leases: dict[int, _HeldLease] = {}
        self._lease_ids = itertools.count(1)
        # Heap of (deadline_us, lease_id): of each lease one entry, right or (once renewed) too early, and
        # what revoked leases left behind.
        self._deadlines: list[tuple[int, int]] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._sweeper_wakes_us = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[Event], None]] = []

    @property
    def shared(self) -> bool:
        """See Store: nobody else can reach it."""
        return False

    def observe(self, listener: Callable[[Event], None]) -> Mapping[bytes, KeyValue]:
        """See Store. A key whose lease is due is there until the store's task, or the next call, ends it."""
        self._listeners.append(listener)
        return self._items

    async def get(self, key: bytes) -> KeyValue | None:
        """See Store."""
        self._refresh()
        check_key(key)
        return self._items.get(key)

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        """See Store. O(log n + limit)."""
        self._refresh()
        check_scan(prefix, after, limit)
        start, inclusive = (after, False) if after >= prefix else (prefix, True)
        items: list[KeyValue] = []
        more = False
        for key in self._keys.iterate(start, inclusive=inclusive):
            if not key.startswith(prefix):
                break
            if len(items) == limit:
                more = True
                break
            items.append(self._items[key])
        return Page(tuple(items), self._revision, more)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store."""
        self._refresh()
        check_transaction(compares, operations)
        items = self._items
        for compare in compares:
            found = items.get(compare.key)
            if (0 if found is None else found.mod_revision) != compare.mod_revision:
                now = tuple(items.get(other.key) for other in compares)
                return Transaction(False, self._revision, now)
        leases = self._leases
        for operation in operations:
            if isinstance(operation, Put) and operation.lease_id and operation.lease_id not in leases:
                raise LeaseNotFoundError(operation.lease_id)
        revision = self._revision + 1
        events: list[Event] = []
        for operation in operations:
            if isinstance(operation, Put):
                events.append(self._put(operation, revision))
            elif operation.key in items:
                events.append(self._remove(operation.key))
        if events:
            self._commit(events)
        return Transaction(True, self._revision)

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See Store. O(log n) in the number of leases."""
        self._refresh()
        lease = _HeldLease(next(self._lease_ids), lease_ttl(ttl_s), 0)
        self._start_ttl(lease)
        self._leases[lease.lease_id] = lease
        if len(self._deadlines) > 2 * len(self._leases) + 64:  # many were revoked
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._leases]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.lease_id))
        self._wake_sweeper_in_time()
        return Lease(lease.lease_id, lease.ttl_s)

    async def keep_lease(self, lease_id: int) -> Lease:
        """See Store. O(1)."""
        self._refresh()
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFoundError(lease_id)
        self._start_ttl(lease)
        return Lease(lease_id, lease.ttl_s)

    async def revoke_lease(self, lease_id: int) -> None:
        """See Store. O(k log n) for the lease's k keys."""
        self._refresh()
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end_lease(lease)

    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        """See Store. A cancelled step loses nothing: the next continues. Holds nothing between steps."""
        return _MemoryWatch(self, prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Forget the history before `revision`; a repetition changes nothing.

        Raises FutureRevisionError for a revision above the current one.
        """
        self._refresh()
        if revision > self._revision:
            raise FutureRevisionError(revision, self._revision)
        while self._oldest < revision:
            self._forget_oldest()

    async def aclose(self) -> None:
        """See Store. Returns when the store's own tasks have ended."""
        if not self._closed:
            self._closed = True
            for waiter in self._waiters:
                waiter.wake()
            for container in (self._waiters, self._items, self._keys, self._history):
                container.clear()
            self._leases.clear()
            self._deadlines.clear()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Keys and history. None of what follows suspends.

    def _refresh(self) -> None:
        """Bring the store up to the present. Raises StoreClosedError."""
        if self._closed:
            raise StoreClosedError("the store is closed")
        deadlines = self._deadlines
        if deadlines and deadlines[0][0] <= self._clock.monotonic() * 1_000_000 + 0.5:
            self._end_due_leases()

    def _put(self, put: Put, revision: int) -> Event:
        key = put.key
        previous = self._items.get(key)
        if previous is None:
            self._keys.add(key)
            created = revision
        else:
            created = previous.create_revision
            if previous.lease_id and previous.lease_id != put.lease_id:
                self._leases[previous.lease_id].keys.discard(key)
        if put.lease_id:
            self._leases[put.lease_id].keys.add(key)
        current = KeyValue(key, put.value, created, revision, put.lease_id)
        self._items[key] = current
        return Event(key, current, previous)

    def _remove(self, key: bytes) -> Event:
        previous = self._items.pop(key)
        self._keys.remove(key)
        lease = self._leases.get(previous.lease_id)
        if lease is not None:
            lease.keys.discard(key)
        return Event(key, None, previous)

    def _commit(self, events: Sequence[Event]) -> None:
        """Make the changes a revision, if there are any, and tell the watches that wait for them."""
        if not events:
            return
        self._revision = revision = self._revision + 1
        batch = EventBatch(revision, tuple(events))
        self._history[revision] = batch
        self._history_size += _weight(batch)
        while self._oldest < revision and (
            revision - self._oldest >= self._history_revisions or self._history_size > self._history_bytes
        ):
            self._forget_oldest()
        for listener in self._listeners:
            for event in events:
                listener(event)
        if self._waiters:
            for waiter in [w for w in self._waiters if any(e.key.startswith(w.prefix) for e in events)]:
                del self._waiters[waiter]
                waiter.found = revision
                waiter.wake()

    def _forget_oldest(self) -> None:
        batch = self._history.pop(self._oldest, None)
        if batch is not None:
            self._history_size -= _weight(batch)
        self._oldest += 1

    # Leases.

    def _now_us(self) -> int:
        return round(self._clock.monotonic() * 1_000_000)

    def _start_ttl(self, lease: _HeldLease) -> None:
        lease.deadline_us = self._now_us() + round(lease.ttl_s * 1_000_000)

    def _end_due_leases(self) -> None:
        """End what is due, the earliest first, each as a revision of its own."""
        now_us = self._now_us()
        while self._deadlines and self._deadlines[0][0] <= now_us:
            deadline_us, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.deadline_us > deadline_us:
                heapq.heapreplace(self._deadlines, (lease.deadline_us, lease_id))
                continue
            heapq.heappop(self._deadlines)
            if lease is not None:
                self._end_lease(lease)

    def _end_lease(self, lease: _HeldLease) -> None:
        del self._leases[lease.lease_id]
        self._commit([self._remove(key) for key in sorted(lease.keys)])

    def _wake_sweeper_in_time(self) -> None:
        next_us = self._deadlines[0][0]
        if self._sweeper is not None and not self._sweeper.done():
            if self._sweeper_wakes_us <= next_us:
                return
            self._sweeper.cancel()
        self._sweeper_wakes_us = next_us
        # A context of its own: the task outlives the call that starts it, and its tracing span.
        self._sweeper = asyncio.get_running_loop().create_task(
            self._sweep(), name="kvplane-memory-leases", context=contextvars.Context()
        )
        self._tasks.add(self._sweeper)
        self._sweeper.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        """End leases when they are due, as long as there are any."""
        while self._leases:
            self._sweeper_wakes_us = self._deadlines[0][0]
            await self._clock.sleep((self._sweeper_wakes_us - self._now_us()) / 1_000_000)
            self._end_due_leases()


class _MemoryWatch(AsyncIterator[EventBatch]):
    """A position in the store's history. The history is the buffer: who falls behind it is compacted."""

    def __init__(self, store: MemoryStore, prefix: bytes, from_revision: int) -> None:
        self._store = store
        self._prefix = prefix
        self._next = from_revision
        self._begun = False

    async def __anext__(self) -> EventBatch:
        store = self._store
        store._refresh()
        if not self._begun:
            self._begin()
        while True:
            batch = self._take()
            if batch is not None:
                return batch
            waiter = _Waiter(self._prefix, asyncio.get_running_loop().create_future())
            store._waiters[waiter] = None
            try:
                await waiter.woken
            finally:
                # Also when cancelled: up to here nothing concerned this watch but what was found.
                store._waiters.pop(waiter, None)
                self._next = waiter.found or store._revision + 1
            store._refresh()

    def _begin(self) -> None:
        check_watch(self._prefix, self._next)
        current = self._store._revision
        if self._next > current + 1:
            raise FutureRevisionError(self._next, current)
        self._next = self._next or current + 1
        self._begun = True

    def _take(self) -> EventBatch | None:
        """Return the next batch that concerns this watch, or None at the end of history."""
        store = self._store
        if self._next < store._oldest:
            raise CompactedError(store._oldest)
        while self._next <= store._revision:
            batch = store._history.get(self._next)
            self._next += 1
            if batch is None:
                continue  # the revision of the empty store
            events = tuple([event for event in batch.events if event.key.startswith(self._prefix)])
            if len(events) == len(batch.events):
                return batch
            if events:
                return EventBatch(batch.revision, events)
        return None


def _weight(batch: EventBatch) -> int:
    """Return about how many bytes a batch holds: a previous value may be shared, but need not be."""
    size = 0
    for event in batch.events:
        size += len(event.key)
        if event.current is not None:
            size += len(event.current.value)
        if event.previous is not None:
            size += len(event.previous.value)
    return size
