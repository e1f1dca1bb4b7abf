"""How locations and claims end. Nothing is freed under a reader: every end is a compare-transaction."""

from __future__ import annotations

import asyncio
import hashlib

import structlog
from msgspec.structs import replace

from kvplane.controlplane import eager, keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import NotClaimOwnerError
from kvplane.controlplane.ledger import Decision, Ledger, Write, understood
from kvplane.controlplane.tally import Ended
from kvplane.store.base import MAX_TXN_OPERATIONS, Compare, Delete, KeyValue

log = structlog.get_logger(__name__)

_ORDER_LIFE_MS = 600_000


class Releases:
    """Ends locations and claims, and orders engines to free what is over."""

    def __init__(self, ledger: Ledger, settings: m.Settings) -> None:
        self._ledger = ledger
        self._settings = settings

    def ending(self, store_key: bytes, location: m.Location, reason: m.ReleaseReason) -> list[Write]:
        """Return the writes that end a retained location and tell its engine; to be fenced by the caller."""
        return [Delete(store_key), *self.replacing(location, reason)]

    def replacing(self, location: m.Location, reason: m.ReleaseReason) -> list[Write]:
        """Return those of the same writes that do not touch the location's own key.

        In quarantine a reader of a previous life may be on its way: then the engine is told only after it.
        """
        if location.not_before_ms > self._ledger.clock.patient_ms():
            return self._ledger.keep_claim(self._quarantine(location))
        order = self.order(location.holder, reason)
        return [Delete(keys.holding(location.holder)), self._ledger.keep_order(order)]

    def _quarantine(self, location: m.Location) -> m.Claim:
        """Nobody reads by this claim, so it goes without params and fingerprint, which may be large.

        It is named by a hash of the holder's parts: joined by a separator, as older replicas do, those of
        two holders may be equal. No older name equals a hash, since each has separators.
        """
        holder = location.holder
        location = replace(location, kv_transfer_params=b"", fingerprint=m.Fingerprint(0, b""))
        grace_ms = round(self._settings.claim_grace_s * 1000)
        name = m.QUARANTINE + hashlib.sha256(keys.holding(holder)).hexdigest()
        return m.Claim(name, "", location, location.not_before_ms - grace_ms)

    def order(self, holder: m.Holder, reason: m.ReleaseReason) -> m.Order:
        """Return an order to free a holder's blocks, kept until reported freed or ten minutes have passed."""
        return m.Order(holder, reason, self._ledger.clock.now_ms() + _ORDER_LIFE_MS)

    async def withdraw(self, holder: m.Holder) -> m.ReleaseOutcome:
        """Take a holder's location off the record for its engine, unless a reader has it. Idempotent."""

        def attempt() -> Decision[m.ReleaseOutcome]:
            ledger = self._ledger
            holding = ledger.holding(holder)
            compares = [holding.unchanged()]
            if holding.value is None:
                return Decision(m.ReleaseOutcome.NOTHING, compares)
            if holding.value.claim_id:
                return Decision(m.ReleaseOutcome.CLAIMED, compares)
            location = ledger.location_at(holding.value.location_key)
            compares.append(location.unchanged())
            if location.value is None:
                return Decision(m.ReleaseOutcome.NOTHING, compares)
            if location.value.not_before_ms > ledger.clock.patient_ms():
                ending = self.ending(location.key, location.value, m.ReleaseReason.CLAIM_TIMEOUT)
                return Decision(m.ReleaseOutcome.CLAIMED, compares, ending)
            gone: list[Write] = [Delete(location.key), Delete(holding.key)]
            ended, turns_unchanged = self._ended(location.value)
            return Decision(
                m.ReleaseOutcome.RELEASED,
                [*compares, turns_unchanged],
                [*gone, ended],
                Ended("withdrawn", location.value),
            )

        return await self._ledger.decide(attempt)

    async def freed(self, holder: m.Holder) -> None:
        """The engine has freed the blocks, for whatever reason: drop all that is on record of them."""

        def attempt() -> Decision[None]:
            ledger = self._ledger
            holding, order = ledger.holding(holder), ledger.order(holder)
            compares = [holding.unchanged(), order.unchanged()]
            writes: list[Write] = [] if order.value is None else [Delete(order.key)]
            over: Ended | None = None
            if holding.value is not None:
                writes.append(Delete(holding.key))
                if holding.value.claim_id:
                    writes.append(Delete(keys.claim(holding.value.claim_id)))
                    over = _over(holding.value.claim_id, "read")
                else:
                    location = ledger.location_at(holding.value.location_key)
                    compares.append(location.unchanged())
                    if location.value is not None and location.value.holder == holder:
                        ended, turns_unchanged = self._ended(location.value)
                        writes += [Delete(location.key), ended]
                        over = Ended("freed", location.value)
                        compares.append(turns_unchanged)
            return Decision(None, compares, writes, over)

        await self._ledger.decide(attempt)

    async def end_conversation(
        self, key: m.ConversationKey, reason: m.ReleaseReason = m.ReleaseReason.CONVERSATION_ENDED
    ) -> m.ReleaseOutcome:
        """Release what a conversation retains; a claim is left to its reader. Idempotent.

        A turn that is under way is not retained.
        """
        return await self._ledger.decide(lambda: self._end_conversation(key, reason))

    def _end_conversation(
        self, key: m.ConversationKey, reason: m.ReleaseReason
    ) -> Decision[m.ReleaseOutcome]:
        ledger = self._ledger
        location_key, turns_key = keys.location_and_turns(key)
        stored, turns = ledger.location_at(location_key), ledger.turns_at(turns_key)
        location, known = stored.value, turns.value
        writes: list[Write] = []
        if location is not None:
            known = known or m.Turns(location.turn, "", location.turn)
            writes = self.ending(location_key, location, reason)
        if known is not None:
            last = max(known.ended_turn, known.latest_turn, 0 if location is None else location.turn)
            if last > known.ended_turn:
                ended = replace(known, ended_turn=last, wanted_until_ms=0)
                writes.append(ledger.keep_turns(turns_key, ended, self._settings.turns_kept_ms))
        outcome = m.ReleaseOutcome.NOTHING if location is None else m.ReleaseOutcome.RELEASED
        over = None if location is None else Ended(reason.name.lower(), location)
        return Decision(outcome, [stored.unchanged(), turns.unchanged()], writes, over)

    def _end_location(
        self, store_key: bytes, reason: m.ReleaseReason, *, due_only: bool = False
    ) -> Decision[m.ReleaseOutcome]:
        location = self._ledger.location_at(store_key)
        if location.value is None:
            return Decision(m.ReleaseOutcome.NOTHING, [location.unchanged()])
        if due_only and location.value.deadline_ms > self._ledger.clock.now_ms():
            return Decision(m.ReleaseOutcome.NOTHING)
        ending = self.ending(store_key, location.value, reason)
        ended, turns_unchanged = self._ended(location.value)
        return Decision(
            m.ReleaseOutcome.RELEASED,
            [location.unchanged(), turns_unchanged],
            [*ending, ended],
            Ended(reason.name.lower(), location.value),
        )

    async def displace(self, location: m.Location) -> bool:
        """End a location for its tenant's quota, unless it has been replaced; its engine is told.

        True if it ended.
        """

        def attempt() -> Decision[bool]:
            stored = self._ledger.location_at(keys.location(location.key))
            if stored.value is None or stored.value.holder != location.holder:
                return Decision(False, [stored.unchanged()])
            ending = self.ending(stored.key, stored.value, m.ReleaseReason.QUOTA)
            ended, turns_unchanged = self._ended(stored.value, for_quota=True)
            over = Ended("quota", stored.value)
            return Decision(True, [stored.unchanged(), turns_unchanged], [*ending, ended], over)

        return await self._ledger.decide(attempt)

    def _ended(self, location: m.Location, *, for_quota: bool = False) -> tuple[Write, Compare]:
        """Return the note that a turn's location is over for good, and the compare that it rests on.

        So that a late duplicate of its announcement does not put it on record again.
        """
        turns = self._ledger.turns_at(keys.turns(location.key))
        known = turns.value or m.Turns(location.turn, "", location.turn)
        ended = replace(known, ended_turn=max(known.ended_turn, location.turn))
        if for_quota:
            ended = replace(ended, quota_turn=max(ended.quota_turn, location.turn))
        return self._ledger.keep_turns(turns.key, ended, self._settings.turns_kept_ms), turns.unchanged()

    async def evict(self, turns_key: bytes) -> None:
        """Forget a conversation altogether, to make room for newer ones."""

        def attempt() -> Decision[None]:
            location = self._ledger.location_at(keys.location_of(turns_key))
            writes: list[Write] = [Delete(turns_key)]
            over: Ended | None = None
            if location.value is not None:
                writes += self.ending(location.key, location.value, m.ReleaseReason.CAPACITY)
                over = Ended("capacity", location.value)
            return Decision(None, [location.unchanged()], writes, over)

        await self._ledger.decide(attempt)
        self._ledger.tally.evicted += 1

    async def forget_begun(self, begun_key: bytes) -> None:
        """Forget of which conversation a request by fingerprint is: repeated, it begins another turn."""
        await self._ledger.decide(lambda: Decision(None, [], [Delete(begun_key)]))

    async def expire_location(self, store_key: bytes) -> bool:
        """End the location at a store key if its deadline has come; its engine is told. True if it ended."""
        if self._ledger.mirror.get(store_key) is None:
            return False
        reason = m.ReleaseReason.EXPIRED
        outcome = await self._ledger.decide(lambda: self._end_location(store_key, reason, due_only=True))
        return outcome is m.ReleaseOutcome.RELEASED

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        """End a claim for its owner and have the blocks freed. Idempotent. Raises NotClaimOwnerError."""

        def attempt() -> Decision[m.ReleaseOutcome]:
            claim = self._ledger.claim(claim_id)
            if claim.value is None:
                return Decision(m.ReleaseOutcome.NOTHING, [claim.unchanged()])
            if claim.value.owner != owner:
                raise NotClaimOwnerError(claim_id)
            ending = self._ending_claim(claim.value, m.ReleaseReason.CLAIM_FINISHED)
            over = _over(claim_id, "finished")
            return Decision(m.ReleaseOutcome.RELEASED, [claim.unchanged()], ending, over)

        return await self._ledger.decide(attempt)

    async def time_out_claim(self, claim_id: str) -> bool:
        """End a claim whose deadline and grace have passed; the engine is told. True if it ended."""

        def attempt() -> Decision[m.Holder | None]:
            claim = self._ledger.claim(claim_id)
            if claim.value is None:
                return Decision(None)
            ends_ms = claim.value.deadline_ms + self._settings.claim_grace_s * 1000
            if ends_ms > self._ledger.clock.patient_ms():
                return Decision(None)
            ending = self._ending_claim(claim.value, m.ReleaseReason.CLAIM_TIMEOUT)
            over = _over(claim_id, "timed_out")
            return Decision(claim.value.location.holder, [claim.unchanged()], ending, over)

        holder = await self._ledger.decide(attempt)
        if holder is not None:
            log.warning("claim_timed_out", engine_id=holder.engine_id, request_id=holder.request_id)
        return holder is not None

    def _ending_claim(self, claim: m.Claim, reason: m.ReleaseReason) -> list[Write]:
        order = self.order(claim.location.holder, reason)
        return [*self._ledger.drop_claim(claim), self._ledger.keep_order(order)]

    async def purge_engine(self, engine_id: str, below_epoch: int) -> int:
        """Drop all records of an engine's incarnations below an epoch; returns how many holdings.

        Does nothing while one of those lives, as the store itself says: a mirror that began anew may have
        taken it for gone.
        """
        await self._ledger.refresh(keys.engine(engine_id))
        live = self._ledger.engine(engine_id).value
        if live is not None and live.engine_epoch < below_epoch:
            return 0
        purged, orders = 0, list[Write]()
        async for item in self._ledger.scan(keys.engine_holdings(engine_id)):
            if keys.epoch_of(item.key) < below_epoch:
                purged += 1
                if not purged % eager.SLICE:
                    await asyncio.sleep(0)  # what never waits would hold up all others
                await self._purge_holding(item)
        async for item in self._ledger.scan(keys.engine_orders(engine_id)):
            if keys.epoch_of(item.key) < below_epoch:
                orders.append(Delete(item.key))
            if len(orders) == MAX_TXN_OPERATIONS:
                await self._ledger.commit([], orders)
                orders = []
        if orders:
            await self._ledger.commit([], orders)
        return purged

    async def _purge_holding(self, item: KeyValue) -> None:
        location_key, claim_id = understood(item, records.load_holding) or (b"", "")

        def attempt() -> Decision[None]:
            writes: list[Write] = [Delete(item.key)]
            if claim_id:
                gone = _over(claim_id, "engine_gone")
                return Decision(None, [], [*writes, Delete(keys.claim(claim_id))], gone)
            if not location_key:
                return Decision(None, [], writes)
            location = self._ledger.location_at(location_key)
            over: Ended | None = None
            if location.value is not None and keys.holding(location.value.holder) == item.key:
                writes.append(Delete(location_key))
                over = Ended("engine_gone", location.value)
            return Decision(None, [location.unchanged()], writes, over)

        await self._ledger.decide(attempt)


def _over(claim_id: str, how: str) -> Ended:
    """Return how a claim ends, to be counted; of one that nobody made, that its quarantine is over."""
    return Ended("quarantine_over" if claim_id.startswith(m.QUARANTINE) else how, None, claim_id)
