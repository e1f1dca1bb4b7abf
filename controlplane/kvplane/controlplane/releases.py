"""How locations and claims end. Nothing is freed under a reader: every end is a compare-transaction."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import ContentionError, NotClaimOwnerError
from kvplane.controlplane.ledger import ATTEMPTS, Ledger, Stored
from kvplane.store.base import MAX_TXN_OPERATIONS, Delete, Operation

log = structlog.get_logger(__name__)

_ORDER_LIFE_MS = 600_000
_YIELD_EVERY = 64


class Releases:
    """Ends locations and claims, and orders engines to free what is over."""

    def __init__(self, ledger: Ledger, settings: m.Settings) -> None:
        self._ledger = ledger
        self._settings = settings

    async def ending(self, location: m.Location, reason: m.ReleaseReason) -> list[Operation]:
        """Return the writes that end a retained location and tell its engine; to be fenced by the caller.

        In quarantine a reader of a previous life may be on its way: then the engine is told only after it.
        """
        ledger = self._ledger
        operations: list[Operation] = [Delete(keys.location(location.key))]
        if location.not_before_ms > ledger.clock.now_ms():
            return operations + await ledger.put_claim(self._quarantine(location))
        order = await ledger.put_order(self.order(location.holder, reason))
        return [*operations, Delete(keys.holding(location.holder)), order]

    def _quarantine(self, location: m.Location) -> m.Claim:
        """Nobody reads by this claim, so it goes without params and fingerprint, which may be large."""
        holder = location.holder
        location = replace(location, kv_transfer_params=b"", fingerprint=m.Fingerprint(0, b""))
        grace_ms = round(self._settings.claim_grace_s * 1000)
        name = f"quarantine/{holder.engine_id}/{holder.engine_epoch}/{holder.request_id}"
        return m.Claim(name, "", location, location.not_before_ms - grace_ms)

    def order(self, holder: m.Holder, reason: m.ReleaseReason) -> m.Order:
        """Return an order to free a holder's blocks, kept until reported freed or ten minutes have passed."""
        return m.Order(holder, reason, self._ledger.clock.now_ms() + _ORDER_LIFE_MS)

    async def withdraw(self, holder: m.Holder) -> m.ReleaseOutcome:
        """Take a holder's location off the record for its engine, unless a reader has it. Idempotent."""
        for _ in range(ATTEMPTS):
            holding = await self._ledger.holding(holder)
            if holding.value is None:
                return m.ReleaseOutcome.NOTHING
            if holding.value.claim_id:
                return m.ReleaseOutcome.CLAIMED
            location = await self._ledger.location_at(holding.value.location_key)
            if location.value is None:
                return m.ReleaseOutcome.NOTHING
            compares = [holding.unchanged(), location.unchanged()]
            if location.value.not_before_ms > self._ledger.clock.now_ms():
                operations = await self.ending(location.value, m.ReleaseReason.CLAIM_TIMEOUT)
                if await self._ledger.write(compares, operations):
                    return m.ReleaseOutcome.CLAIMED
                continue
            if await self._ledger.write(compares, [Delete(location.key), Delete(holding.key)]):
                return m.ReleaseOutcome.RELEASED
        raise ContentionError

    async def freed(self, holder: m.Holder) -> None:
        """The engine has freed the blocks, for whatever reason: drop all that is on record of them."""
        for _ in range(ATTEMPTS):
            holding = await self._ledger.holding(holder)
            operations: list[Operation] = [Delete(keys.order(holder))]
            compares = [holding.unchanged()]
            if holding.value is not None:
                operations.append(Delete(holding.key))
                if holding.value.claim_id:
                    operations.append(Delete(keys.claim(holding.value.claim_id)))
                else:
                    location = await self._ledger.location_at(holding.value.location_key)
                    if location.value is not None and location.value.holder == holder:
                        compares.append(location.unchanged())
                        operations.append(Delete(location.key))
            if await self._ledger.write(compares, operations):
                return
        raise ContentionError

    async def end_conversation(
        self, key: m.ConversationKey, reason: m.ReleaseReason = m.ReleaseReason.CONVERSATION_ENDED
    ) -> m.ReleaseOutcome:
        """Release what a conversation retains; a claim is left to its reader. Idempotent."""
        for _ in range(ATTEMPTS):
            location = await self._ledger.location(key)
            if location.value is None:
                return m.ReleaseOutcome.NOTHING
            operations = await self.ending(location.value, reason)
            if await self._ledger.write([location.unchanged()], operations):
                return m.ReleaseOutcome.RELEASED
        raise ContentionError

    async def evict(self, turns_key: bytes) -> None:
        """Forget a conversation altogether, to make room for newer ones."""
        store_key = keys.LOCATIONS + turns_key.removeprefix(keys.TURNS)
        for _ in range(ATTEMPTS):
            location = await self._ledger.location_at(store_key)
            operations: list[Operation] = [Delete(turns_key)]
            if location.value is not None:
                operations += await self.ending(location.value, m.ReleaseReason.CAPACITY)
            if await self._ledger.write([location.unchanged()], operations):
                return

    async def expire_location(self, store_key: bytes) -> bool:
        """End the location at a store key if its deadline has come; its engine is told. True if it ended."""
        for _ in range(ATTEMPTS):
            location = await self._ledger.location_at(store_key)
            if location.value is None or location.value.deadline_ms > self._ledger.clock.now_ms():
                return False
            operations = await self.ending(location.value, m.ReleaseReason.EXPIRED)
            if await self._ledger.write([location.unchanged()], operations):
                return True
        return False

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        """End a claim for its owner and have the blocks freed. Idempotent. Raises NotClaimOwnerError."""
        for _ in range(ATTEMPTS):
            claim = await self._ledger.claim(claim_id)
            if claim.value is None:
                return m.ReleaseOutcome.NOTHING
            if claim.value.owner != owner:
                raise NotClaimOwnerError(claim_id)
            if await self._end_claim(claim, claim.value, m.ReleaseReason.CLAIM_FINISHED):
                return m.ReleaseOutcome.RELEASED
        raise ContentionError

    async def time_out_claim(self, claim_id: str) -> bool:
        """End a claim whose deadline and grace have passed; the engine is told. True if it ended."""
        for _ in range(ATTEMPTS):
            claim = await self._ledger.claim(claim_id)
            if claim.value is None:
                return False
            ends_ms = claim.value.deadline_ms + self._settings.claim_grace_s * 1000
            if ends_ms > self._ledger.clock.now_ms():
                return False
            if await self._end_claim(claim, claim.value, m.ReleaseReason.CLAIM_TIMEOUT):
                holder = claim.value.location.holder
                log.warning("claim_timed_out", engine_id=holder.engine_id, request_id=holder.request_id)
                return True
        return False

    async def _end_claim(self, stored: Stored[m.Claim], claim: m.Claim, reason: m.ReleaseReason) -> bool:
        order = await self._ledger.put_order(self.order(claim.location.holder, reason))
        operations = [*self._ledger.drop_claim(claim), order]
        return await self._ledger.write([stored.unchanged()], operations)

    async def purge_engine(self, engine_id: str, below_epoch: int) -> int:
        """Drop all records of an engine's incarnations below an epoch; returns how many holdings."""
        purged, batch = 0, list[Operation]()
        async for item in self._ledger.scan(keys.engine_holdings(engine_id)):
            holder = keys.holder_of(item.key)
            if holder.engine_epoch >= below_epoch:
                continue
            location_key, claim_id = records.load_holding(item.value)
            purged += 1
            if not purged % _YIELD_EVERY:
                await asyncio.sleep(0)  # a store in memory never waits, and others have to run
            if claim_id:
                await self._ledger.write([], [Delete(item.key), Delete(keys.claim(claim_id))])
                continue
            location = await self._ledger.location_at(location_key)
            operations: list[Operation] = [Delete(item.key)]
            if location.value is not None and location.value.holder == holder:
                operations.append(Delete(location_key))
            await self._ledger.write([location.unchanged()], operations)
        async for item in self._ledger.scan(keys.engine_orders(engine_id)):
            if keys.holder_of(item.key).engine_epoch < below_epoch:
                batch.append(Delete(item.key))
            if len(batch) == MAX_TXN_OPERATIONS:
                await self._ledger.write([], batch)
                batch = []
        if batch:
            await self._ledger.write([], batch)
        return purged
