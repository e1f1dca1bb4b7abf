"""The records in the store, typed: read from the mirror, written in compare-transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
from msgspec import Struct

from kvplane.controlplane import eager, keys, lines, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import ContentionError
from kvplane.controlplane.fleet_time import FleetTime
from kvplane.controlplane.mirror import Mirror
from kvplane.controlplane.tally import Ended, Tally
from kvplane.controlplane.throttle import Throttle
from kvplane.store.base import Compare, Delete, KeyValue, Operation, Put, Store
from kvplane.store.errors import LeaseNotFoundError, StoreUnavailableError
from kvplane.tracing.context import CURRENT, Within

log = structlog.get_logger(__name__)

T = TypeVar("T")

ATTEMPTS = 16
"""How often a decision is made anew because others changed what it rests on."""
_BUCKET_MS = 10_000
_KEYS_PER_LEASE = 1000
"""A store ends all records of a lease at once; more would hold up others."""
_OUTLIVE_MS = 60_000
"""A record has to be there still when it is swept, so that its engine is told; a sweep may take a while."""
_LEASES_PER_BUCKET = 100
"""Beyond it, leases are told apart no further in time."""


class Stored(Struct, Generic[T], frozen=True, gc=False):
    """A record as last known. `revision` 0 and `value` None mean that there is none."""

    key: bytes
    value: T | None
    revision: int

    def unchanged(self) -> Compare:
        """Return the compare that holds as long as nobody has written the record since."""
        return Compare(self.key, self.revision)


class Keep(Struct, frozen=True, gc=False):
    """The write of a record that ends by itself some time after `until_ms`, unless rewritten or removed."""

    key: bytes
    value: bytes
    until_ms: int


Write = Keep | Put | Delete


class Decision(Struct, Generic[T], frozen=True, gc=False):
    """An answer, what it rests on, and what has to be written for it to be true.

    Without compares and writes it is given as it is. With compares alone they are checked.
    """

    answer: T
    compares: Sequence[Compare] = ()
    writes: Sequence[Write] = ()
    ended: Ended | None = None
    """What it ends once it is committed, to be counted."""


class Holding(Struct, frozen=True, gc=False):
    """What became of a holder's blocks: exactly one member is set."""

    location_key: bytes
    claim_id: str


class _SharedLease:
    """A lease of the store's that a bucket's records hang on for now."""

    __slots__ = ("keys", "lease_id", "number")

    def __init__(self, lease_id: int, number: int) -> None:
        self.lease_id = lease_id
        self.number = number
        self.keys = 0


class Ledger:
    """Typed access to the store. Records that end by themselves hang on shared leases.

    The deadlines in the records decide; the leases, a few per replica and ten seconds, only sweep up what
    has been forgotten.
    """

    def __init__(self, store: Store, clock: FleetTime, mirror: Mirror, tally: Tally | None = None) -> None:
        self.tally = tally or Tally(clock.monotonic)
        self.store = store
        self.clock = clock
        self.mirror = mirror
        # A store at hand never waits, and needs no tasks; one elsewhere works with timeouts, which need them.
        self.start: eager.Start[Any] = eager.later if store.shared else eager.now
        self._lines = lines.Lines()
        self._leases: dict[int, _SharedLease] = {}
        self._granting: dict[int, asyncio.Task[None]] = {}

    # Reading: what the mirror knows.

    def _read(self, key: bytes, load: Callable[[bytes], T]) -> Stored[T]:
        found = self.mirror.get(key)
        if found is None:
            return Stored(key, None, 0)
        return Stored(key, understood(found, load), found.mod_revision)

    def engine(self, engine_id: str) -> Stored[m.Engine]:
        """Read an engine's live incarnation."""
        return self._read(keys.engine(engine_id), records.load_engine)

    def epoch(self, engine_id: str) -> Stored[int]:
        """Read the last epoch given to an engine id."""
        return self._read(keys.epoch(engine_id), records.load_epoch)

    def location_at(self, store_key: bytes) -> Stored[m.Location]:
        """Read the retained location at a store key."""
        return self._read(store_key, partial(own_location, store_key))

    def turns_at(self, store_key: bytes) -> Stored[m.Turns]:
        """Read a conversation's turns at a store key."""
        return self._read(store_key, records.load_turns)

    def begun(self, key: m.ConversationKey, request_id: str) -> Stored[m.ConversationKey]:
        """Read of which conversation, in the scope of `key`, a request by fingerprint began a turn."""
        return self._read(keys.begun(key, request_id), _load_begun)

    def claim(self, claim_id: str) -> Stored[m.Claim]:
        """Read an open claim."""
        return self._read(keys.claim(claim_id), _load_claim)

    def holding(self, holder: m.Holder) -> Stored[Holding]:
        """Read what became of a holder's blocks."""
        return self._read(keys.holding(holder), _load_holding)

    def order(self, holder: m.Holder) -> Stored[bytes]:
        """Read the order to free a holder's blocks, undecoded: mostly its presence matters."""
        return self._read(keys.order(holder), bytes)

    async def scan(self, prefix: bytes) -> AsyncIterator[KeyValue]:
        """Iterate over all records below a prefix in the store itself, page by page. O(records)."""
        after, more = b"", True
        while more:
            page = await self.store.scan(prefix, after=after)
            for item in page.items:
                yield item
            more = page.more
            after = page.items[-1].key if page.items else after

    # Deciding and writing.

    async def decide(self, attempt: Callable[[], Decision[T]]) -> T:
        """Make a decision and commit it; make it anew as long as what it rests on had changed.

        A write whose outcome is unknown is decided anew too, once: the decision finds its own work. Where
        several here decide on the same record, they do so one after another. Raises what `attempt` raises,
        ContentionError, StoreError.
        """
        self.mirror.require_fresh()
        redone, contested = False, None
        try:
            for number in range(ATTEMPTS):
                made = attempt()
                if contested is None and (number or self._lines):
                    key = lines.contested(made.compares, made.writes)
                    if key is not None and (number or key in self._lines):
                        await self._lines.enter(key)
                        contested = key
                        self.mirror.require_fresh()
                        made = attempt()
                if not made.compares and not made.writes:
                    return made.answer
                try:
                    if await self.commit(made.compares, made.writes):
                        if made.ended is not None:
                            self.tally.ending(made.ended)
                        return made.answer
                    self.tally.attempts += 1
                except StoreUnavailableError:
                    if redone:
                        raise
                    redone = True
            raise ContentionError
        finally:
            if contested is not None:
                self._lines.leave(contested)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> bool:
        """Write if all compares hold; else the mirror has learned why not, or a lease was gone: redo."""
        operations: list[Operation] = []
        for write in writes:
            if isinstance(write, Keep):
                lease = self._leases.get(write.until_ms // _BUCKET_MS)
                if lease is None or lease.keys >= _KEYS_PER_LEASE:
                    lease = await self._grant(write.until_ms)
                lease.keys += 1
                operations.append(Put(write.key, write.value, lease.lease_id))
            else:
                operations.append(write)
        began_at = self.clock.monotonic()
        try:
            if CURRENT.get() is None:
                done = await self.store.transact(compares, operations)
            else:
                with Within("store.transact", operations=len(operations)):
                    done = await self.store.transact(compares, operations)
        except LeaseNotFoundError as error:
            self._leases = {
                bucket: lease for bucket, lease in self._leases.items() if lease.lease_id != error.lease_id
            }
            return False
        if done.succeeded:
            self.mirror.committed(done.revision, operations, began_at)
            return True
        self.mirror.found(done.revision, compares, done.found)
        return False

    async def refresh(self, *store_keys: bytes) -> None:
        """Have the mirror know what lies under some keys now, whatever the watch has brought."""
        self.mirror.require_fresh()
        known = [self.mirror.get(key) for key in store_keys]
        compares = [
            Compare(key, 0 if item is None else item.mod_revision)
            for key, item in zip(store_keys, known, strict=True)
        ]
        await self.commit(compares, [])

    async def _grant(self, until_ms: int) -> _SharedLease:
        """Return a lease with room that outlives `until_ms`; who needs it meanwhile waits for the same."""
        bucket = max(until_ms, self.clock.now_ms()) // _BUCKET_MS
        while (lease := self._leases.get(bucket)) is None or lease.keys >= _KEYS_PER_LEASE:
            task = self._granting.get(bucket)
            if task is None:
                task = self.start(self._start_lease(bucket))
                if task is None:
                    continue
                self._granting[bucket] = task
                task.add_done_callback(partial(self._granted, bucket))
            await asyncio.shield(task)
        return lease

    def _granted(self, bucket: int, task: asyncio.Task[None]) -> None:
        del self._granting[bucket]
        if not task.cancelled():
            task.exception()  # whoever waits gets it; perhaps nobody does any more

    async def _start_lease(self, bucket: int) -> None:
        """Start a lease that ends about a minute after its bucket; those of a bucket end in turn."""
        now = self.clock.now_ms()
        last = self._leases.get(bucket)
        number = 0 if last is None else last.number + 1
        spread_ms = _BUCKET_MS * (number % _LEASES_PER_BUCKET) // _LEASES_PER_BUCKET
        ttl_ms = (bucket + 1) * _BUCKET_MS + _OUTLIVE_MS + spread_ms - now
        granted = await self.store.grant_lease(ttl_ms / 1000)
        self._leases[bucket] = _SharedLease(granted.lease_id, number)
        for old in [old for old in self._leases if (old + 1) * _BUCKET_MS < now]:
            del self._leases[old]

    # The writes of records.

    def keep_location(self, store_key: bytes, value: m.Location) -> Keep:
        """Return the write of a retained location."""
        return Keep(store_key, records.dump_location(value), value.deadline_ms)

    def keep_turns(self, store_key: bytes, value: m.Turns, keep_ms: int) -> Keep:
        """Return the write of a conversation's turns, remembered for `keep_ms` from now."""
        return Keep(store_key, records.dump_turns(value), self.clock.now_ms() + keep_ms)

    def keep_begun(self, begun_key: bytes, turns_key: bytes, keep_ms: int) -> Keep:
        """Return the note of which conversation a request began a turn of, kept for `keep_ms` from now."""
        return Keep(begun_key, records.dump_begun(turns_key), self.clock.now_ms() + keep_ms)

    def keep_holding(self, holding_key: bytes, location_key: bytes, until_ms: int) -> Keep:
        """Return the note that a holder's blocks are retained."""
        return Keep(holding_key, records.dump_holding(location_key=location_key), until_ms)

    def keep_claim(self, claim: m.Claim) -> list[Write]:
        """Return the writes of a claim and of the note that its blocks are claimed."""
        at = records.dump_holding(claim_id=claim.claim_id)
        return [
            Keep(keys.claim(claim.claim_id), records.dump_claim(claim), claim.deadline_ms),
            Keep(keys.holding(claim.location.holder), at, claim.deadline_ms),
        ]

    def keep_order(self, order: m.Order) -> Keep:
        """Return the write of an order."""
        return Keep(keys.order(order.holder), records.dump_order(order), order.deadline_ms)

    def drop_claim(self, claim: m.Claim) -> list[Write]:
        """Return the writes that end a claim."""
        return [Delete(keys.claim(claim.claim_id)), Delete(keys.holding(claim.location.holder))]


_damaged = Throttle()


def understood(item: KeyValue, load: Callable[[bytes], T]) -> T | None:
    """Return a record's value; None, and a line in the log, for one that is damaged or from another world.

    Of each kind of record there is one line a second: one may be read thousands of times.

    So it is treated as absent, and overwritten where it is due: one bad record harms no other.
    """
    try:
        return load(item.value)
    except Exception as error:
        unlogged = _damaged.due(item.key[:2])
        if unlogged is not None:
            log.error("record_not_understood", store_key=repr(item.key), cause=repr(error), unlogged=unlogged)
        return None


def own_location(store_key: bytes, raw: bytes) -> m.Location:
    """Return a stored location. Raises ValueError if it is another conversation's than its key says."""
    value = records.load_location(raw)
    if keys.location(value.key) != store_key:
        raise ValueError("key and value do not belong together")
    return value


def _load_claim(raw: bytes) -> m.Claim:
    value = records.load_claim(raw)
    keys.location(value.location.key)  # raises where an id is longer than any may be
    keys.holding(value.location.holder)
    return value


def _load_begun(raw: bytes) -> m.ConversationKey:
    return keys.conversation_of(records.load_begun(raw))


def _load_holding(raw: bytes) -> Holding:
    return Holding(*records.load_holding(raw))


def same_state(*stored: Stored[Any]) -> list[Compare]:
    """Return the compares that hold as long as nobody has written any of the records since."""
    return [Compare(item.key, item.revision) for item in stored]
