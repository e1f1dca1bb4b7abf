"""Conformance of leases. Expiry "at exactly the ttl" needs a controllable clock, the rest does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvplane.store.base import MIN_LEASE_TTL_S, Compare, Delete, Put, Store
from kvplane.store.errors import LeaseNotFoundError
from kvplane.store.testing.harness import (
    CheckList,
    Raises,
    StoreFactory,
    StoreUnderTest,
    contents,
    ensure,
    head,
    put,
    same,
)

CHECKLIST = CheckList()
_TTL_S = 10.0
_TICK_S = 0.001


async def _lapse(subject: StoreUnderTest, ttl_s: float) -> None:
    """Let a lease of that ttl, started now or before, end."""
    await subject.expire(ttl_s + subject.expiry_lag_s)


async def _get(store: Store, lease_id: int) -> bool:
    return await store.get(b"k") is not None


async def _scan(store: Store, lease_id: int) -> bool:
    return bool((await store.scan(b"")).items)


async def _compare(store: Store, lease_id: int) -> bool:
    return not (await store.transact([Compare(b"k", 0)], [])).succeeded


async def _keep(store: Store, lease_id: int) -> bool:
    try:
        await store.keep_lease(lease_id)
    except LeaseNotFoundError:
        return False
    return True


async def _use(store: Store, lease_id: int) -> bool:
    try:
        await store.transact([], [Put(b"k2", b"", lease_id)])
    except LeaseNotFoundError:
        return False
    return True


_PROBES: tuple[Callable[[Store, int], Awaitable[bool]], ...] = (_get, _scan, _compare, _keep, _use)


@CHECKLIST.check_with_factory(needs_controllable_clock=True)
async def expiry_at_exactly_the_ttl(factory: StoreFactory) -> None:
    """A lease lives until just before its ttl and has ended at its ttl, whichever call asks first."""
    for probe in _PROBES:
        for ttl_s in (_TTL_S, 2.1, 2.7):  # also sums that floats do not hit
            for passed_s, lives in ((ttl_s - _TICK_S, True), (ttl_s, False), (ttl_s + _TICK_S, False)):
                async with factory() as subject:
                    await subject.expire(0.3)
                    lease = await subject.store.grant_lease(ttl_s)
                    await put(subject.store, b"k", b"v", lease_id=lease.lease_id)
                    await subject.expire(passed_s + lease.ttl_s - ttl_s)
                    found = await probe(subject.store, lease.lease_id)
                    same(found, lives, f"lease of {ttl_s} s after {passed_s} s, seen by {probe.__name__}")


@CHECKLIST.check_with_factory(needs_controllable_clock=True)
async def renewed_at_exactly_the_ttl(factory: StoreFactory) -> None:
    """A renewal starts the ttl anew from its own time: the old deadline no longer counts."""
    for passed_s, lives in ((_TTL_S - _TICK_S, True), (_TTL_S, False)):
        async with factory() as subject:
            lease = await subject.store.grant_lease(_TTL_S)
            await put(subject.store, b"k", b"v", lease_id=lease.lease_id)
            await subject.expire(lease.ttl_s - _TICK_S)
            await subject.store.keep_lease(lease.lease_id)
            await subject.expire(lease.ttl_s - _TTL_S + passed_s)
            same(await _get(subject.store, 0), lives, f"lease {passed_s} s after its renewal")


@CHECKLIST.check
async def expired_lease_takes_its_keys(subject: StoreUnderTest) -> None:
    """Lease expiry removes the lease's keys, all in one revision, and no others."""
    store = subject.store
    lease = await store.grant_lease(MIN_LEASE_TTL_S)
    await put(store, b"free", b"v")
    await put(store, b"b", b"v", lease_id=lease.lease_id)
    before = await put(store, b"a", b"v", lease_id=lease.lease_id)
    same((await contents(store)).keys(), {b"a", b"b", b"free"}, "keys before expiry")
    await _lapse(subject, lease.ttl_s)
    same((await contents(store)).keys(), {b"free"}, "keys after expiry")
    same(await head(store), before + 1, "the revision after one lease with two keys expired")


@CHECKLIST.check
async def expired_lease_without_keys(subject: StoreUnderTest) -> None:
    """Lease expiry without keys makes no revision."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    lease = await store.grant_lease(MIN_LEASE_TTL_S)
    await _lapse(subject, lease.ttl_s)
    with Raises(LeaseNotFoundError, "keeping an expired lease") as caught:
        await store.keep_lease(lease.lease_id)
    same(caught.error.lease_id, lease.lease_id, "the error's lease")
    same(await head(store), revision, "the revision after an empty lease expired")


@CHECKLIST.check
async def renewal_never_revives(subject: StoreUnderTest) -> None:
    """After expiry, keep_lease fails however often, its keys stay gone, nothing can be put on it."""
    store = subject.store
    lease = await store.grant_lease(MIN_LEASE_TTL_S)
    await put(store, b"k", b"v", lease_id=lease.lease_id)
    await _lapse(subject, lease.ttl_s)
    for _ in range(2):
        with Raises(LeaseNotFoundError, "keeping an expired lease"):
            await store.keep_lease(lease.lease_id)
        with Raises(LeaseNotFoundError, "a put on an expired lease"):
            await store.transact([], [Put(b"new", b""), Put(b"k", b"w", lease.lease_id)])
        same(await contents(store), {}, "keys")
    another = await store.grant_lease(MIN_LEASE_TTL_S)
    ensure(another.lease_id != lease.lease_id, "an expired lease's id was given again")


@CHECKLIST.check
async def renewed_lease_lives_on(subject: StoreUnderTest) -> None:
    """A lease kept in time outlives its first ttl, with its ttl unchanged, and ends after the last."""
    store = subject.store
    lease = await store.grant_lease(4)
    await put(store, b"k", b"v", lease_id=lease.lease_id)
    for _ in range(2):
        await subject.expire(lease.ttl_s * 0.6)
        same(await store.keep_lease(lease.lease_id), lease, "the lease as kept")
    same(await contents(store), {b"k": b"v"}, "keys of a lease that was kept")
    await _lapse(subject, lease.ttl_s)
    same(await contents(store), {}, "keys of a lease that was no longer kept")


@CHECKLIST.check
async def granted_leases(subject: StoreUnderTest) -> None:
    """A granted ttl is at least what was asked for and MIN_LEASE_TTL_S; ids are positive and distinct."""
    store = subject.store
    asked = (-1, 0, 0.001, 1, MIN_LEASE_TTL_S, 2.5, 60, 86_400)
    granted = [await store.grant_lease(ttl_s) for ttl_s in asked]
    for ttl_s, lease in zip(asked, granted, strict=True):
        ensure(lease.ttl_s >= max(ttl_s, MIN_LEASE_TTL_S), f"{ttl_s} s asked, {lease.ttl_s} s granted")
        ensure(lease.ttl_s <= max(ttl_s, MIN_LEASE_TTL_S) + 1, f"{ttl_s} s asked, {lease.ttl_s} s granted")
    ids = {lease.lease_id for lease in granted}
    ensure(len(ids) == len(asked) and min(ids) > 0, f"lease ids {ids}")


@CHECKLIST.check
async def short_leases_get_the_minimum(subject: StoreUnderTest) -> None:
    """A lease granted for less than MIN_LEASE_TTL_S lives as long as it says."""
    store = subject.store
    lease = await store.grant_lease(0.001)
    await put(store, b"k", b"v", lease_id=lease.lease_id)
    await subject.expire(lease.ttl_s / 2)
    same(await contents(store), {b"k": b"v"}, "keys at half the granted ttl")


@CHECKLIST.check
async def revoke(subject: StoreUnderTest) -> None:
    """revoke_lease ends the lease at once with its keys, as one revision."""
    store = subject.store
    lease, other = await store.grant_lease(_TTL_S), await store.grant_lease(_TTL_S)
    await put(store, b"other", b"v", lease_id=other.lease_id)
    await put(store, b"b", b"v", lease_id=lease.lease_id)
    before = await put(store, b"a", b"v", lease_id=lease.lease_id)
    await store.revoke_lease(lease.lease_id)
    same((await contents(store), await head(store)), ({b"other": b"v"}, before + 1), "keys and revision")
    with Raises(LeaseNotFoundError, "keeping a revoked lease"):
        await store.keep_lease(lease.lease_id)
    with Raises(LeaseNotFoundError, "a put on a revoked lease"):
        await store.transact([], [Put(b"a", b"w", lease.lease_id)])
    await store.keep_lease(other.lease_id)


@CHECKLIST.check
async def revoke_of_ended_lease(subject: StoreUnderTest) -> None:
    """Revoking a lease that was revoked, has expired or never was changes nothing and is no error."""
    store = subject.store
    revoked = await store.grant_lease(_TTL_S)
    expired = await store.grant_lease(MIN_LEASE_TTL_S)
    await store.revoke_lease(revoked.lease_id)
    await _lapse(subject, expired.ttl_s)
    revision = await put(store, b"k", b"v")
    for lease_id in (revoked.lease_id, expired.lease_id, 7_777_777_777, 0):
        await store.revoke_lease(lease_id)
    same((await contents(store), await head(store)), ({b"k": b"v"}, revision), "the store afterwards")


@CHECKLIST.check
async def put_on_missing_lease(subject: StoreUnderTest) -> None:
    """A put on a lease that is not there raises LeaseNotFoundError and writes nothing of its transaction."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    with Raises(LeaseNotFoundError, "a put on a lease that never was") as caught:
        await store.transact(
            [Compare(b"k", revision)], [Put(b"a", b""), Delete(b"k"), Put(b"b", b"", 7_777_777_777)]
        )
    same(caught.error.lease_id, 7_777_777_777, "the error's lease")
    same((await contents(store), await head(store)), ({b"k": b"v"}, revision), "the store afterwards")
    tried = await store.transact([Compare(b"k", 0)], [Put(b"b", b"", 7_777_777_777)])
    ensure(not tried.succeeded, "a put that is not to be done, on a lease that is not there")


@CHECKLIST.check
async def put_moves_a_key_off_its_lease(subject: StoreUnderTest) -> None:
    """A later put decides about a key's lease: none, another, or the same."""
    store = subject.store
    old, new = await store.grant_lease(_TTL_S), await store.grant_lease(_TTL_S)
    for key in (b"freed", b"kept", b"moved"):
        await put(store, key, b"1", lease_id=old.lease_id)
    await put(store, b"freed", b"2")
    await put(store, b"moved", b"2", lease_id=new.lease_id)
    await put(store, b"kept", b"2", lease_id=old.lease_id)
    for key, lease_id in ((b"freed", 0), (b"kept", old.lease_id), (b"moved", new.lease_id)):
        found = await store.get(key)
        same(found and found.lease_id, lease_id, f"the lease of {key!r}")
    await store.revoke_lease(old.lease_id)
    same((await contents(store)).keys(), {b"freed", b"moved"}, "keys after the first lease's end")
    await store.revoke_lease(new.lease_id)
    same((await contents(store)).keys(), {b"freed"}, "keys after the second lease's end")


@CHECKLIST.check
async def deleted_key_leaves_its_lease(subject: StoreUnderTest) -> None:
    """A key deleted and made anew is on no lease: the old one's end does not touch it."""
    store = subject.store
    lease = await store.grant_lease(_TTL_S)
    await put(store, b"k", b"1", lease_id=lease.lease_id)
    await store.transact([], [Delete(b"k")])
    revision = await put(store, b"k", b"2")
    await store.revoke_lease(lease.lease_id)
    same((await contents(store), await head(store)), ({b"k": b"2"}, revision), "the store afterwards")


@CHECKLIST.check
async def free_key_goes_onto_a_lease(subject: StoreUnderTest) -> None:
    """A key written without a lease and then with one goes when that ends."""
    store = subject.store
    await put(store, b"k", b"1")
    lease = await store.grant_lease(_TTL_S)
    await put(store, b"k", b"2", lease_id=lease.lease_id)
    await store.revoke_lease(lease.lease_id)
    same(await contents(store), {}, "keys after the lease's end")


@CHECKLIST.check
async def leases_end_apart(subject: StoreUnderTest) -> None:
    """Each lease ends at its own time, as a revision of its own."""
    store = subject.store
    long = await store.grant_lease(30)
    short = await store.grant_lease(MIN_LEASE_TTL_S)
    shorter = await store.grant_lease(MIN_LEASE_TTL_S)
    for key, lease in ((b"long", long), (b"short", short), (b"shorter", shorter)):
        before = await put(store, key, b"", lease_id=lease.lease_id)
    await _lapse(subject, short.ttl_s)
    same((await contents(store)).keys(), {b"long"}, "keys when two of three leases have ended")
    same(await head(store), before + 2, "the revision when two leases have ended")
    await store.keep_lease(long.lease_id)
