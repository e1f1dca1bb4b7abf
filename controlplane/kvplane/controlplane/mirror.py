"""What this replica knows of the store: a copy fed by one watch, and told to whoever has to hear of changes.

Nothing is decided by the copy alone: a decision that rests on it is a transaction that compares the revisions
it saw, and a failed one brings what is there now. So a copy that is behind costs a second attempt, never a
wrong answer; how far it may be behind is bounded, and measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import structlog

from kvplane.store.base import Compare, Event, KeyValue, Operation, Put, Store
from kvplane.store.clock import Clock
from kvplane.store.errors import (
    CompactedError,
    FutureRevisionError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)

log = structlog.get_logger(__name__)

Listener = Callable[[Event], None]
_RETRY_S = 0.2
_YIELD_EVERY = 256
_PAGE, _LEAST_PAGE = 1000, 10


class Mirror:
    """A copy of all records, and the one watch that feeds it.

    A store whose contents are at hand needs no copy: they are read where they are. `max_staleness_s` None is
    for a store that only this process writes to: there the copy cannot be behind. Otherwise a copy that has
    not been confirmed for longer refuses to answer.
    """

    def __init__(self, store: Store, clock: Clock, *, max_staleness_s: float | None = None) -> None:
        self._store = store
        self._clock = clock
        self._max_staleness_s = max_staleness_s
        self._items: dict[bytes, KeyValue] = {}
        live = store.observe(self._dispatch)
        self._records = self._items if live is None else live
        self._is_live = live is not None
        self._gone: dict[bytes, int] = {}  # removals that are known, but that the watch has yet to bring
        self._revision = 0  # all changes up to here have been applied
        self._confirmed_at = float("-inf")
        self._awaited: tuple[int, float] | None = None  # (revision, when its write began)
        self._is_broken = False
        self._page = _PAGE
        self._listeners: dict[bytes, list[Listener]] = {}
        self._waiters: dict[bytes, set[asyncio.Event]] = {}
        self.listed = asyncio.Event()
        """Set when the store has been read."""
        self.caught_up = asyncio.Event()
        """Set when, besides, what has been read is known to be of now."""
        self.doubted = asyncio.Event()
        """Set when the store is found to be another one than what was read: forget, and read it anew."""
        self._is_trusted = max_staleness_s is None
        self.trouble: StoreError | None = None
        """Why staleness cannot be measured at present, if it is known."""

    # Reading.

    def get(self, key: bytes) -> KeyValue | None:
        """Return a record as last known."""
        return self._records.get(key)

    def __len__(self) -> int:
        """Return how many records are known."""
        return len(self._records)

    def known(self) -> list[bytes]:
        """Return the keys of all records that are known now. O(records), some milliseconds for a million."""
        return list(self._records)

    @property
    def staleness_s(self) -> float:
        """For how long changes by others may have gone unnoticed, in seconds; 0 for a store of our own."""
        if self._max_staleness_s is None:
            return 0.0 if self.caught_up.is_set() else float("inf")
        return self._clock.monotonic() - self._confirmed_at

    def require_fresh(self) -> None:
        """Raise StoreUnavailableError while the copy is incomplete or older than it may be.

        StoreFullError, if that is why it cannot be known.
        """
        if self._max_staleness_s is None:
            if not self.caught_up.is_set():
                raise StoreUnavailableError("the store has not been read yet")
        elif self._clock.monotonic() - self._confirmed_at > self._max_staleness_s:
            if isinstance(self.trouble, StoreFullError):
                raise self.trouble
            raise StoreUnavailableError("the store has not been heard of for too long")

    # What is learned besides the watch.

    def committed(self, revision: int, operations: Sequence[Operation], began_at: float) -> None:
        """Apply our own transaction at once; its write began at `began_at` of the monotonic clock."""
        if self._is_live:
            return
        for operation in operations:
            key = operation.key
            if isinstance(operation, Put):
                known = self._items.get(key)
                created = revision if known is None else known.create_revision
                self._apply(
                    key, KeyValue(key, operation.value, created, revision, operation.lease_id), revision
                )
            else:
                self._apply(key, None, revision)
        if self._awaited is None and self._is_trusted and self._max_staleness_s is not None:
            self._awaited = (revision, began_at)
            self._confirm()

    def trust(self) -> None:
        """From now on our own writes confirm what is known: this replica has agreed with the others."""
        self._is_trusted = True

    def found(self, revision: int, compares: Sequence[Compare], found: Sequence[KeyValue | None]) -> None:
        """Apply what a failed transaction brought."""
        if self._is_live:
            return
        for compare, item in zip(compares, found, strict=True):
            known = self._items.get(compare.key)
            if known is not None and item is not None and item.mod_revision < known.mod_revision <= revision:
                self.doubted.set()  # no store goes back: it was emptied, and has a history of its own
                return
            self._apply(compare.key, item, revision if item is None else item.mod_revision)

    # Listening.

    def listen(self, kind: bytes, listener: Listener) -> None:
        """Have `listener` called for each change of a kind of record (the two bytes its keys begin with).

        Called in the order of each key's revisions; it must not block.
        """
        self._listeners.setdefault(kind, []).append(listener)

    @contextmanager
    def changes_of(self, key: bytes) -> Iterator[asyncio.Event]:
        """Give an event that is set whenever the key changes; clear it before reading the key."""
        event = asyncio.Event()
        self._waiters.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            waiters = self._waiters[key]
            waiters.discard(event)
            if not waiters:
                del self._waiters[key]

    def waiting_for(self, key: bytes) -> int:
        """Return how many wait for a key to change."""
        return len(self._waiters.get(key, ()))

    # Following.

    async def run(self) -> None:
        """Follow the store until it is closed. Nothing to do for one whose contents are at hand."""
        if self._is_live:
            self.listed.set()
            self.caught_up.set()
            return
        while True:
            try:
                if not self._revision:
                    await self._list()
                async for batch in self._store.watch(b"", from_revision=self._revision + 1):
                    for event in batch.events:
                        self._apply(event.key, event.current, batch.revision)
                    self._reached(batch.revision)
            except StoreClosedError:
                return
            except CompactedError as error:
                log.warning("store_listed_again", cause=str(error))
                self._revision = 0
            except FutureRevisionError as error:
                log.warning("store_began_anew", cause=str(error))
                self.forget_everything()
            except StoreUnavailableError as error:
                if not self._is_broken:
                    self._is_broken = True
                    log.warning("store_watch_broken", cause=str(error))
                await self._clock.sleep(_RETRY_S)

    async def _list(self) -> None:
        """Read everything. Changes meanwhile come again with the watch, from the first page's revision on."""
        after, more, first, known = b"", True, 0, set(self._items)
        while more:
            try:
                page = await self._store.scan(b"", after=after, limit=self._page)
            except StoreUnavailableError:
                self._page = max(_LEAST_PAGE, self._page // 4)  # perhaps its records are large
                raise
            first = first or page.revision
            for item in page.items:
                known.discard(item.key)
                self._apply(item.key, item, item.mod_revision)
            more = page.more
            after = page.items[-1].key if page.items else after
        for number, key in enumerate(known):
            self._apply(key, None, first)
            if not number % _YIELD_EVERY:
                await asyncio.sleep(0)
        self._reached(first)
        self.listed.set()
        if self._max_staleness_s is None:
            self.caught_up.set()

    def forget_everything(self) -> None:
        """Another store is behind the same address: its revisions say nothing about ours."""
        self.doubted.clear()
        self.caught_up.clear()
        self.listed.clear()
        self._confirmed_at = float("-inf")
        self._revision, self._awaited = 0, None
        for key in list(self._items):
            self._dispatch(Event(key, None, self._items.pop(key)))
        self._gone.clear()

    def _reached(self, revision: int) -> None:
        self._revision = revision
        self._is_broken = False
        gone = self._gone
        while gone and gone[oldest := next(iter(gone))] <= revision:
            del gone[oldest]
        self._confirm()

    def _confirm(self) -> None:
        """A write of ours has come back: all that was committed before it began has come too."""
        if self._awaited is not None and self._awaited[0] <= self._revision:
            self._confirmed_at = max(self._confirmed_at, self._awaited[1])
            self._awaited = None
            self.caught_up.set()

    def _apply(self, key: bytes, current: KeyValue | None, revision: int) -> None:
        """Take over a key's state as of a revision, unless a later one is known."""
        known = self._items.get(key)
        if known is not None:
            if known.mod_revision >= revision:
                if known.mod_revision == revision and current is not None:
                    self._items[key] = current  # the same: let the store's own object be the only one
                return
        elif self._gone.get(key, 0) >= revision:
            return
        if current is None:
            if revision > self._revision:
                self._gone[key] = revision
            if known is None:
                return
            del self._items[key]
        else:
            self._items[key] = current
            self._gone.pop(key, None)
        self._dispatch(Event(key, current, known))

    def _dispatch(self, event: Event) -> None:
        if self._waiters:
            for waiter in self._waiters.get(event.key, ()):
                waiter.set()
        for listener in self._listeners.get(event.key[:2], ()):
            try:
                listener(event)
            except Exception as error:
                log.error("record_not_understood", store_key=repr(event.key), cause=repr(error))


async def wait_for(event: asyncio.Event, clock: Clock, seconds: float) -> bool:
    """Wait for an event for at most some of the clock's seconds; tells whether it came."""
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((waiting, sleeping), return_when=asyncio.FIRST_COMPLETED)
        return event.is_set()
    finally:
        for task in (waiting, sleeping):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
