"""Defects of leases."""

from __future__ import annotations

import heapq
import itertools

from kvplane.store.base import (
    Event,
    Lease,
    Operation,
    Put,
    Transaction,
)
from kvplane.store.errors import (
    LeaseNotFoundError,
)
from kvplane.store.memory import MemoryStore, _HeldLease
from tests.conformance.mutants import Compares, Operations, caught_by


@caught_by("expiry_at_exactly_the_ttl", "renewed_at_exactly_the_ttl")
class LeasesLiveATickLonger(MemoryStore):
    def _now_us(self) -> int:
        return super()._now_us() - 1

    def _start_ttl(self, lease: _HeldLease) -> None:
        super()._start_ttl(lease)
        lease.deadline_us += 1


@caught_by("expiry_at_exactly_the_ttl", "renewed_at_exactly_the_ttl")
class LeasesEndEarly(MemoryStore):
    def _start_ttl(self, lease: _HeldLease) -> None:
        super()._start_ttl(lease)
        lease.deadline_us -= 2_500


@caught_by("expired_lease_takes_its_keys", "renewal_never_revives", "watch_sees_lease_expiry")
class LeasesNeverEnd(MemoryStore):
    def _end_due_leases(self) -> None:
        self._deadlines = [(2**60, lease_id) for _, lease_id in self._deadlines]


@caught_by("watch_sees_lease_expiry", "watch_sees_each_lease_expire")
class EndsLeasesOnCallsOnly(MemoryStore):
    async def _sweep(self) -> None:
        return


@caught_by("watch_sees_each_lease_expire")
class SleepsForTheFirstLeaseOnly(MemoryStore):
    """Neither a shorter lease that is granted later nor a renewed one is noticed in time."""

    def _wake_sweeper_in_time(self) -> None:
        if self._sweeper is None:
            super()._wake_sweeper_in_time()

    async def _sweep(self) -> None:
        await self._clock.sleep((self._deadlines[0][0] - self._now_us()) / 1_000_000)
        self._end_due_leases()


@caught_by("renewal_never_revives", "revoke")
class RevivesLeases(MemoryStore):
    """Renewing brings an ended lease back."""

    async def keep_lease(self, lease_id: int) -> Lease:
        try:
            return await super().keep_lease(lease_id)
        except LeaseNotFoundError:
            revived = _HeldLease(lease_id, 10.0, 0)
            self._start_ttl(revived)
            self._leases[lease_id] = revived
            heapq.heappush(self._deadlines, (revived.deadline_us, lease_id))
            return Lease(lease_id, 10.0)


@caught_by("renewed_lease_lives_on")
class KeepsForNothing(MemoryStore):
    """Says that a lease was renewed, and leaves its deadline as it was."""

    async def keep_lease(self, lease_id: int) -> Lease:
        lease = self._leases.get(lease_id)
        deadline_us = 0 if lease is None else lease.deadline_us
        kept = await super().keep_lease(lease_id)
        if lease is not None:
            lease.deadline_us = deadline_us
        return kept


@caught_by("renewal_never_revives")
class LeaseIdsAgain(MemoryStore):
    async def grant_lease(self, ttl_s: float) -> Lease:
        if not self._leases:
            self._lease_ids = itertools.count(1)
        return await super().grant_lease(ttl_s)


@caught_by("granted_leases")
class GrantsWhatIsAsked(MemoryStore):
    """Knows no shortest ttl."""

    async def grant_lease(self, ttl_s: float) -> Lease:
        granted = await super().grant_lease(ttl_s)
        lease = self._leases[granted.lease_id]
        lease.deadline_us += round((ttl_s - lease.ttl_s) * 1_000_000)
        lease.ttl_s = ttl_s
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.lease_id))
        return Lease(lease.lease_id, ttl_s)


@caught_by("short_leases_get_the_minimum")
class PromisesTheMinimumOnly(MemoryStore):
    """Names the shortest ttl, and ends the lease after the one asked for."""

    async def grant_lease(self, ttl_s: float) -> Lease:
        granted = await super().grant_lease(ttl_s)
        lease = self._leases[granted.lease_id]
        lease.deadline_us += round((ttl_s - lease.ttl_s) * 1_000_000)
        heapq.heappush(self._deadlines, (lease.deadline_us, lease.lease_id))
        return granted


@caught_by("senseless_numbers_refused")
class EndlessLeases(MemoryStore):
    async def grant_lease(self, ttl_s: float) -> Lease:
        return await super().grant_lease(ttl_s if abs(ttl_s) < 1e9 else 1e9)


@caught_by("put_moves_a_key_off_its_lease")
class PutKeepsOldLease(MemoryStore):
    """A put without a lease leaves the key on the one it was on."""

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        kept: list[Operation] = []
        for operation in operations:
            found = self._items.get(operation.key)
            if isinstance(operation, Put) and not operation.lease_id and found is not None:
                operation = Put(operation.key, operation.value, found.lease_id)
            kept.append(operation)
        return await super().transact(compares, kept)


@caught_by("put_moves_a_key_off_its_lease")
class LeasesRememberKeys(MemoryStore):
    """A lease takes every key that was ever on it."""

    def _put(self, put: Put, revision: int) -> Event:
        event = super()._put(put, revision)
        if event.previous is not None and event.previous.lease_id:
            self._leases[event.previous.lease_id].keys.add(put.key)
        return event

    def _end_lease(self, lease: _HeldLease) -> None:
        lease.keys &= self._items.keys()
        super()._end_lease(lease)


@caught_by("deleted_key_leaves_its_lease")
class DeletedKeysStayOnLeases(MemoryStore):
    def _remove(self, key: bytes) -> Event:
        event = super()._remove(key)
        assert event.previous is not None
        lease = self._leases.get(event.previous.lease_id)
        if lease is not None:
            lease.keys.add(key)
        return event

    def _end_lease(self, lease: _HeldLease) -> None:
        lease.keys &= self._items.keys()
        super()._end_lease(lease)


@caught_by("free_key_goes_onto_a_lease")
class LeasesOnlyForNewKeys(MemoryStore):
    def _put(self, put: Put, revision: int) -> Event:
        free = put.key in self._items and not self._items[put.key].lease_id
        return super()._put(Put(put.key, put.value, 0 if free else put.lease_id), revision)


@caught_by("free_key_goes_onto_a_lease")
class RevokeKeepsKeys(MemoryStore):
    async def revoke_lease(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.keys.clear()
        await super().revoke_lease(lease_id)


@caught_by("revoke")
class RevokeKeepsTheLease(MemoryStore):
    async def revoke_lease(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        await super().revoke_lease(lease_id)
        if lease is not None:
            lease.keys = set()
            self._leases[lease_id] = lease


@caught_by("revoke_of_ended_lease")
class RevokeOfNothingFails(MemoryStore):
    async def revoke_lease(self, lease_id: int) -> None:
        await self.keep_lease(lease_id)
        await super().revoke_lease(lease_id)


@caught_by("revoke_of_ended_lease", "nothing_happened_nothing_told")
class RevokeOfNothingIsARevision(MemoryStore):
    async def revoke_lease(self, lease_id: int) -> None:
        await super().revoke_lease(lease_id)
        self._commit([Event(b"lease", None, None)])


@caught_by("expired_lease_without_keys", "deleted_key_leaves_its_lease")
class EmptyLeaseEndIsARevision(MemoryStore):
    def _end_lease(self, lease: _HeldLease) -> None:
        if not lease.keys:
            self._revision += 1
        super()._end_lease(lease)


@caught_by("expired_lease_takes_its_keys")
class LeaseKeysGoOneByOne(MemoryStore):
    def _end_lease(self, lease: _HeldLease) -> None:
        for key in sorted(lease.keys):
            self._commit([self._remove(key)])
        super()._end_lease(lease)


@caught_by("leases_end_apart")
class LeasesEndTogether(MemoryStore):
    def _end_due_leases(self) -> None:
        now_us = self._now_us()
        due = [lease for lease in self._leases.values() if lease.deadline_us <= now_us]
        for lease in due[1:]:
            due[0].keys |= lease.keys
            lease.keys = set()
        super()._end_due_leases()


@caught_by("put_on_missing_lease")
class PutsOnMissingLeases(MemoryStore):
    """Takes a missing lease for none."""

    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        fit = [
            Put(o.key, o.value) if isinstance(o, Put) and o.lease_id not in self._leases else o
            for o in operations
        ]
        return await super().transact(compares, fit)


@caught_by("put_on_missing_lease")
class MissesLeasesBeforeCompares(MemoryStore):
    async def transact(self, compares: Compares, operations: Operations) -> Transaction:
        for o in operations:
            if isinstance(o, Put) and o.lease_id and o.lease_id not in self._leases:
                raise LeaseNotFoundError(o.lease_id)
        return await super().transact(compares, operations)
