"""Defects of watches, compaction and closing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvplane.store.base import (
    Event,
    EventBatch,
    Transaction,
)
from kvplane.store.errors import (
    CompactedError,
    FutureRevisionError,
    StoreClosedError,
)
from kvplane.store.memory import MemoryStore
from tests.conformance.mutants import Compares, Operations, caught_by


@caught_by("close_twice")
class SecondCloseFails(MemoryStore):
    async def aclose(self) -> None:
        if self._closed:
            raise StoreClosedError("closed")
        await super().aclose()


@caught_by("close_by_context", "call_after_close")
class WorksAfterClose(MemoryStore):
    async def aclose(self) -> None:
        await super().aclose()
        self._closed = False


@caught_by("close_ends_waiting_watch")
class ForgetsWaitersAtClose(MemoryStore):
    async def aclose(self) -> None:
        self._waiters.clear()
        await super().aclose()


class WatchMutant(MemoryStore):
    """Changes what a watch tells."""

    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        return self._tell(super().watch(prefix, from_revision=from_revision), prefix, from_revision)

    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            yield batch


@caught_by("watch_from_old_revision", "no_gaps_under_concurrent_writers", "watch_sees_each_lease_expire")
class SkipsAnEvent(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        number = 0
        async for batch in inner:
            number += 1
            if number != 2:
                yield batch


@caught_by("watch_from_next_revision", "slow_watcher_has_no_gap", "no_gaps_under_concurrent_writers")
class TellsTwice(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            yield batch
            yield batch


@caught_by("no_gaps_under_concurrent_writers")
class SplitsBatches(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            for event in batch.events:
                yield EventBatch(batch.revision, (event,))


@caught_by("one_batch_per_revision")
class ReversesBatches(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            yield EventBatch(batch.revision, batch.events[::-1])


@caught_by("watch_sees_revocation")
class ForgetsPrevious(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            yield EventBatch(batch.revision, tuple(Event(e.key, e.current, None) for e in batch.events))


@caught_by("events_show_both_sides", "watch_sees_revocation")
class TellsNoExpiry(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            if not all(e.previous and e.previous.lease_id and not e.current for e in batch.events):
                yield batch


@caught_by("key_limit", "watch_waiting_outlives_compaction")
class TellsWholeTransactions(WatchMutant):
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        return self._tell(MemoryStore.watch(self, b"", from_revision=from_revision), prefix, from_revision)

    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            if any(event.key.startswith(prefix) for event in batch.events):
                yield batch


@caught_by("watch_filters_by_prefix")
class EndsPrefixAt0xff(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        async for batch in inner:
            if not prefix.endswith(b"\xff"):
                yield batch


@caught_by("watch_from_old_revision")
class StartsOneLater(MemoryStore):
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        later = from_revision + 1 if 0 < from_revision <= self._revision else from_revision
        return super().watch(prefix, from_revision=later)


@caught_by("watch_from_now")
class NowIncludesTheLast(MemoryStore):
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        return super().watch(prefix, from_revision=from_revision or self._revision)


@caught_by("watch_from_future_revision")
class WaitsForTheFuture(MemoryStore):
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        return super().watch(prefix, from_revision=min(from_revision, self._revision + 1))


@caught_by("watch_from_next_revision")
class RefusesTheNextRevision(MemoryStore):
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        return super().watch(prefix, from_revision=from_revision + (from_revision == self._revision + 1))


@caught_by("senseless_numbers_refused")
class SkipsWhatIsCompacted(MemoryStore):
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        return super().watch(prefix, from_revision=from_revision and max(from_revision, self._oldest))


@caught_by("watch_from_compacted_revision")
class CompactsOneTooMany(MemoryStore):
    async def compact(self, revision: int) -> None:
        await super().compact(revision)
        if self._oldest <= self._revision:
            self._forget_oldest()


@caught_by("compaction_leaves_the_keys")
class CompactionTakesKeys(MemoryStore):
    async def compact(self, revision: int) -> None:
        await super().compact(revision)
        for key in [key for key, item in self._items.items() if item.mod_revision < revision]:
            self._remove(key)


@caught_by("watch_waiting_outlives_compaction")
class CompactionDisturbsWatches(MemoryStore):
    async def compact(self, revision: int) -> None:
        await super().compact(revision)
        for waiter in self._waiters:
            waiter.woken.set_exception(CompactedError(revision))


@caught_by("slow_watcher_has_no_gap")
class FallsBehindSilently(WatchMutant):
    """A watcher that is too slow goes on with what is left."""

    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        while True:
            try:
                async for batch in inner:
                    yield batch
            except CompactedError as error:
                inner = MemoryStore.watch(self, prefix, from_revision=error.compact_revision)


@caught_by("compare_revisions", "one_failed_compare_writes_nothing")
class FailedTransactionsAreEvents(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        if not done.succeeded and operations:
            self._commit([Event(operations[0].key, None, None)])
        return done


@caught_by("watch_from_future_revision")
class FutureErrorWithoutItsNumbers(WatchMutant):
    async def _tell(
        self, inner: AsyncIterator[EventBatch], prefix: bytes, from_revision: int
    ) -> AsyncIterator[EventBatch]:
        try:
            async for batch in inner:
                yield batch
        except FutureRevisionError as error:
            raise FutureRevisionError(error.current, error.asked) from error


@caught_by("close_by_context")
class StaysOpenAfterTheBlock(MemoryStore):
    async def __aexit__(self, *ignored: object) -> None:
        return
