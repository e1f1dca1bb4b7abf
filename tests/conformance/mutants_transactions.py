"""Defects of keys, transactions and scans."""

from __future__ import annotations

import asyncio

from kvplane.store.base import (
    MAX_KEY_BYTES,
    Compare,
    Delete,
    Event,
    KeyValue,
    Operation,
    Page,
    Put,
    Transaction,
)
from kvplane.store.errors import (
    InvalidStoreRequestError,
)
from kvplane.store.memory import MemoryStore
from tests.conformance.mutants import Compares, Operations, caught_by


@caught_by("two_writers_one_wins", "no_update_is_lost", "compare_revisions", "put_on_missing_lease")
class IgnoresCompares(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        return await super().transact([], operations)


@caught_by("one_failed_compare_writes_nothing")
class ChecksFirstCompareOnly(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        return await super().transact(compares[:1], operations)


@caught_by("key_compared_twice")
class ChecksLastCompareOfAKey(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        return await super().transact([*{compare.key: compare for compare in compares}.values()], operations)


@caught_by("two_writers_one_wins", "no_update_is_lost")
class TakesZeroForAny(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        return await super().transact([c for c in compares if c.mod_revision or c.key == b"k2"], operations)


@caught_by("two_writers_one_wins", "no_update_is_lost")
class ComparesBeforeAPause(MemoryStore):
    """Check, wait, act: what a lock-free implementation over two calls would do."""

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        checked = await super().transact(compares, [])
        if not checked.succeeded:
            return checked
        await asyncio.sleep(0)
        return await super().transact([], operations)


@caught_by("failed_transaction_tells_what_it_found", "no_two_decide_on_the_same_past")
class TellsNothingFound(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        return Transaction(done.succeeded, done.revision)


@caught_by("failed_transaction_tells_what_it_found")
class TellsFoundByKey(MemoryStore):
    """In the order of keys, and each once."""

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        found = {compare.key: item for compare, item in zip(compares, done.found, strict=False)}
        return Transaction(done.succeeded, done.revision, tuple(found[key] for key in sorted(found)))


@caught_by("failed_transaction_tells_what_it_found")
class TellsTheFailingKeyOnly(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        found = [
            item if (item.mod_revision if item else 0) != compare.mod_revision else None
            for compare, item in zip(compares, done.found, strict=False)
        ]
        return Transaction(done.succeeded, done.revision, tuple(found))


@caught_by("no_two_decide_on_the_same_past", "two_writers_one_wins", "no_update_is_lost")
class BatchesWhateverComes(MemoryStore):
    """Evaluates all compares of a turn before it writes any, as etcd does with nested transactions."""

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        judged = await super().transact(compares, [])
        await asyncio.sleep(0)
        if not judged.succeeded or not operations:
            return Transaction(judged.succeeded, self._revision, judged.found)
        return await super().transact([], operations)


@caught_by("independent_transactions_at_once")
class TellsTheRevisionAfterAPause(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        await asyncio.sleep(0)
        return Transaction(done.succeeded, self._revision, done.found)


@caught_by("compares_see_the_state_before")
class ComparesAfterWriting(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        written = {operation.key for operation in operations}
        moved = [c for c in compares if c.key in written and c.mod_revision]
        done = await super().transact([c for c in compares if c not in moved], operations)
        return Transaction(done.succeeded and not moved, done.revision, done.found)


@caught_by(
    "cancelled_commit_is_atomic", "transaction_is_one_revision", "scan_is_of_one_revision", "value_limit"
)
class WritesOneByOne(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations[:1])
        for operation in operations[1:] if done.succeeded else ():
            await asyncio.sleep(0)
            done = await super().transact([], [operation])
        return done


@caught_by("delete_of_absent")
class RevisionForNothing(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        if done.succeeded and self._items.keys().isdisjoint(o.key for o in operations):
            self._revision += 1
            return Transaction(True, self._revision)
        return done


@caught_by("empty_transaction")
class RevisionForFailure(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        done = await super().transact(compares, operations)
        if not done.succeeded:
            self._revision += 1
        return Transaction(done.succeeded, self._revision, done.found)


@caught_by("delete_of_absent")
class DeleteOfAbsentFails(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        if any(isinstance(o, Delete) and o.key not in self._items for o in operations):
            return Transaction(False, self._revision)
        return await super().transact(compares, operations)


@caught_by("empty_key_refused")
class AllowsDuplicateKeys(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        return await super().transact(compares, [*{o.key: o for o in operations if o.key}.values()])


@caught_by("duplicate_keys_refused")
class NoticesDuplicatesLate(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        if len({o.key for o in operations}) < len(operations):
            await super().transact(compares, operations[:1])
        return await super().transact(compares, operations)


@caught_by("value_limit", "transaction_limits")
class RefusesLimits(MemoryStore):
    """Off by one: what is exactly at a limit is refused."""

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        if any(len(o.key) >= MAX_KEY_BYTES for o in operations) or len(operations) == 128:
            raise InvalidStoreRequestError("at the limit")
        return await super().transact(compares, operations)


@caught_by("empty_key_refused", "value_limit")
class KnowsNoLimits(MemoryStore):
    """Takes what etcd would refuse, and changes it into what it can take."""

    async def get(self, key: bytes) -> KeyValue | None:
        return await super().get(key[:MAX_KEY_BYTES] or b"empty")

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        return await super().scan(prefix[:MAX_KEY_BYTES], after=after[:MAX_KEY_BYTES], limit=max(1, limit))

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        fit: list[Operation] = []
        for o in operations[:128]:
            key = o.key[:MAX_KEY_BYTES] or b"empty"
            fit.append(Put(key, o.value[:700_000], o.lease_id) if isinstance(o, Put) else Delete(key))
        compared = [Compare(c.key[:MAX_KEY_BYTES] or b"empty", abs(c.mod_revision)) for c in compares[:128]]
        return await super().transact(compared, fit)


@caught_by("value_limit")
class CutsValues(MemoryStore):
    async def get(self, key: bytes) -> KeyValue | None:
        found = await super().get(key)
        return found and KeyValue(key, found.value[:1_000_000], found.create_revision, found.mod_revision)


@caught_by("empty_value")
class EmptyValueIsAbsent(MemoryStore):
    async def get(self, key: bytes) -> KeyValue | None:
        found = await super().get(key)
        return found if found is not None and found.value else None


@caught_by("empty_store")
class AbsentIsAnError(MemoryStore):
    async def get(self, key: bytes) -> KeyValue | None:
        found = await super().get(key)
        if found is None and not self._items:
            raise LookupError(key)
        return found


@caught_by("binary_keys_and_values")
class TextKeys(MemoryStore):
    """Orders keys as text would be."""

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=limit)
        items = sorted(page.items, key=lambda item: item.key.decode("utf-8", "replace"))
        return Page(tuple(items), page.revision, page.more)


@caught_by("transaction_is_one_revision")
class UnorderedScan(MemoryStore):
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=limit)
        return Page(page.items[::-1], page.revision, page.more)


@caught_by("scan_prefixes")
class NoKeysAtTheEnd(MemoryStore):
    """Takes the byte after the prefix's last for the end of a range, and knows none after 0xff."""

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=limit)
        end = prefix[:-1] + bytes([(prefix[-1] + 1) & 0xFF]) if prefix else b""
        items = tuple(item for item in page.items if not prefix or item.key < end)
        return Page(items, page.revision, page.more)


@caught_by("key_limit", "scan_default_limit")
class InclusiveAfter(MemoryStore):
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=limit)
        again = self._items.get(after)
        if again is None or not after.startswith(prefix):
            return page
        return Page((again, *page.items)[:limit], page.revision, page.more or len(page.items) == limit)


@caught_by("scan_after")
class IgnoresAfterBelowPrefix(MemoryStore):
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        return await super().scan(prefix, after=after if after.startswith(prefix) else b"", limit=limit)


@caught_by("scan_pages")
class FullPageSaysMore(MemoryStore):
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=limit)
        return Page(page.items, page.revision, len(page.items) == limit)


@caught_by("scan_default_limit")
class NeverSaysMore(MemoryStore):
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=limit)
        return Page(page.items, page.revision, False)


@caught_by("scan_is_of_one_revision")
class ScansInTwoReads(MemoryStore):
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        first = await super().scan(prefix, after=after, limit=1)
        await asyncio.sleep(0)
        if limit == 1 or not first.items:
            return first
        rest = await super().scan(prefix, after=first.items[-1].key, limit=limit - 1)
        return Page((*first.items, *rest.items), rest.revision, rest.more)


@caught_by("revisions_of_a_key")
class CreatedAtEveryPut(MemoryStore):
    def _put(self, put: Put, revision: int) -> Event:
        event = super()._put(put, revision)
        current = KeyValue(put.key, put.value, revision, revision, put.lease_id)
        self._items[put.key] = current
        return Event(put.key, current, event.previous)


@caught_by("revisions_of_a_key")
class SameValueIsNoPut(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        changing: list[Operation] = []
        for operation in operations:
            found = self._items.get(operation.key)
            if isinstance(operation, Delete) or found is None or found.value != operation.value:
                changing.append(operation)
        return await super().transact(compares, changing)
