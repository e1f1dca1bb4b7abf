"""One watch over the store, fanned out to whoever in this process has to hear of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from kvplane.store.base import Event, Store
from kvplane.store.clock import Clock
from kvplane.store.errors import (
    CompactedError,
    FutureRevisionError,
    StoreClosedError,
    StoreUnavailableError,
)

log = structlog.get_logger(__name__)

Listener = Callable[[Event], None]
_RETRY_S = 0.2


class Feed:
    """Follows the store from a full listing on, and lists again after a gap.

    Listeners hear of every key at least once, as an event with its current value, and may hear of one twice.
    They are called in the order of revisions and must not block. A removal during a gap is not heard of.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._listeners: list[tuple[bytes, Listener]] = []
        self._waiters: dict[bytes, set[asyncio.Event]] = {}
        self._revision = 0
        self.caught_up = asyncio.Event()

    def listen(self, prefix: bytes, listener: Listener) -> Callable[[], None]:
        """Have `listener` called for changes below `prefix`; call what is returned to end it."""
        entry = (prefix, listener)
        self._listeners.append(entry)
        return lambda: self._listeners.remove(entry)

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

    async def run(self) -> None:
        """Follow the store until it is closed."""
        while True:
            try:
                if not self.caught_up.is_set():
                    await self._list()
                async for batch in self._store.watch(b"", from_revision=self._revision + 1):
                    self._revision = batch.revision
                    for event in batch.events:
                        self._dispatch(event)
            except StoreClosedError:
                return
            except (CompactedError, FutureRevisionError) as error:
                log.warning("store_feed_listed_again", cause=str(error))
                self.caught_up.clear()
            except StoreUnavailableError:
                await self._clock.sleep(_RETRY_S)

    async def _list(self) -> None:
        after, more, first = b"", True, 0
        while more:
            page = await self._store.scan(b"", after=after)
            first = first or page.revision
            for item in page.items:
                self._dispatch(Event(item.key, item, None))
            more = page.more
            after = page.items[-1].key if page.items else after
        self._revision = first
        self.caught_up.set()

    def _dispatch(self, event: Event) -> None:
        for waiter in self._waiters.get(event.key, ()):
            waiter.set()
        for prefix, listener in tuple(self._listeners):
            if event.key.startswith(prefix):
                try:
                    listener(event)
                except Exception:
                    log.exception("store_feed_listener_failed")


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
