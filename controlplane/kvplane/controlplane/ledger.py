"""The records in the store, typed: read with their revisions, written in compare-transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.store.base import Compare, Delete, KeyValue, Operation, Put, Store
from kvplane.store.clock import Clock
from kvplane.store.errors import LeaseNotFoundError

T = TypeVar("T")

ATTEMPTS = 16
"""How often a decision is made anew because others changed what it rests on."""
_BUCKET_MS = 10_000
"""Short enough that few records end with one lease: a store ends them all at once."""


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """A record as read. `revision` 0 and `value` None mean that there is none."""

    key: bytes
    value: T | None
    revision: int

    def unchanged(self) -> Compare:
        """Return the compare that holds as long as nobody has written the record since."""
        return Compare(self.key, self.revision)


@dataclass(frozen=True, slots=True)
class Holding:
    """What became of a holder's blocks: exactly one member is set."""

    location_key: bytes
    claim_id: str


class Ledger:
    """Typed access to the store. Records that end by themselves hang on shared leases.

    The deadlines in the records decide; the leases, one per replica and ten seconds, only sweep up.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self._leases: dict[int, int] = {}

    async def _read(self, key: bytes, load: Callable[[bytes], T]) -> Stored[T]:
        found = await self.store.get(key)
        if found is None:
            return Stored(key, None, 0)
        return Stored(key, load(found.value), found.mod_revision)

    async def engine(self, engine_id: str) -> Stored[m.Engine]:
        """Read an engine's live incarnation."""
        return await self._read(keys.engine(engine_id), records.load_engine)

    async def epoch(self, engine_id: str) -> Stored[int]:
        """Read the last epoch given to an engine id."""
        return await self._read(keys.epoch(engine_id), records.load_epoch)

    async def location(self, key: m.ConversationKey) -> Stored[m.Location]:
        """Read a conversation's retained location."""
        return await self.location_at(keys.location(key))

    async def location_at(self, store_key: bytes) -> Stored[m.Location]:
        """Read the retained location at a store key."""
        return await self._read(store_key, records.load_location)

    async def turns(self, key: m.ConversationKey) -> Stored[m.Turns]:
        """Read a conversation's turns."""
        return await self._read(keys.turns(key), records.load_turns)

    async def claim(self, claim_id: str) -> Stored[m.Claim]:
        """Read an open claim."""
        return await self._read(keys.claim(claim_id), records.load_claim)

    async def holding(self, holder: m.Holder) -> Stored[Holding]:
        """Read what became of a holder's blocks."""
        return await self._read(keys.holding(holder), lambda raw: Holding(*records.load_holding(raw)))

    async def order(self, holder: m.Holder) -> Stored[m.Order]:
        """Read the order to free a holder's blocks."""
        return await self._read(keys.order(holder), lambda raw: records.load_order(holder, raw))

    async def scan(self, prefix: bytes) -> AsyncIterator[KeyValue]:
        """Iterate over all records below a prefix, page by page. O(records)."""
        after, more = b"", True
        while more:
            page = await self.store.scan(prefix, after=after)
            for item in page.items:
                yield item
            more = page.more
            after = page.items[-1].key if page.items else after

    async def dust_lease(self, deadline_ms: int) -> int:
        """Return a lease that outlives a deadline by ten to twenty seconds. Shared; O(1) amortized."""
        now = self.clock.now_ms()
        bucket = max(deadline_ms, now) // _BUCKET_MS
        lease_id = self._leases.get(bucket)
        if lease_id is None:
            ttl_ms = (bucket + 2) * _BUCKET_MS - now
            lease_id = self._leases[bucket] = (await self.store.grant_lease(ttl_ms / 1000)).lease_id
            for old in [old for old in self._leases if (old + 2) * _BUCKET_MS < now]:
                del self._leases[old]
        return lease_id

    async def write(self, compares: list[Compare], operations: list[Operation]) -> bool:
        """Commit; False means that something compared had changed, or a shared lease was gone: redo."""
        try:
            return (await self.store.transact(compares, operations)).succeeded
        except LeaseNotFoundError as error:
            self._leases = {
                bucket: lease for bucket, lease in self._leases.items() if lease != error.lease_id
            }
            return False

    async def put_location(self, value: m.Location) -> Put:
        """Return the write of a retained location."""
        lease = await self.dust_lease(value.deadline_ms)
        return Put(keys.location(value.key), records.dump_location(value), lease)

    async def put_turns(self, key: m.ConversationKey, value: m.Turns, keep_ms: int) -> Put:
        """Return the write of a conversation's turns, remembered for `keep_ms` from now."""
        lease = await self.dust_lease(self.clock.now_ms() + keep_ms)
        return Put(keys.turns(key), records.dump_turns(value), lease)

    async def retained(self, location: m.Location) -> Put:
        """Return the note that a holder's blocks are retained."""
        lease = await self.dust_lease(location.deadline_ms)
        at = records.dump_holding(location_key=keys.location(location.key))
        return Put(keys.holding(location.holder), at, lease)

    async def put_claim(self, claim: m.Claim) -> list[Operation]:
        """Return the writes of a claim and of the note that its blocks are claimed."""
        lease = await self.dust_lease(claim.deadline_ms)
        at = records.dump_holding(claim_id=claim.claim_id)
        return [
            Put(keys.claim(claim.claim_id), records.dump_claim(claim), lease),
            Put(keys.holding(claim.location.holder), at, lease),
        ]

    async def put_order(self, order: m.Order) -> Put:
        """Return the write of an order."""
        lease = await self.dust_lease(order.deadline_ms)
        return Put(keys.order(order.holder), records.dump_order(order), lease)

    def drop_claim(self, claim: m.Claim) -> list[Operation]:
        """Return the writes that end a claim."""
        return [Delete(keys.claim(claim.claim_id)), Delete(keys.holding(claim.location.holder))]
