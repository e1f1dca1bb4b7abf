"""Conformance at the edges: nothing, too much, twice, closed."""

from __future__ import annotations

import asyncio
import math

from kvplane.store.base import (
    MAX_KEY_BYTES,
    MAX_TXN_BYTES,
    MAX_TXN_OPERATIONS,
    MAX_VALUE_BYTES,
    Compare,
    Delete,
    Operation,
    Put,
)
from kvplane.store.errors import InvalidStoreRequestError, StoreClosedError
from kvplane.store.testing.clock import settle
from kvplane.store.testing.harness import (
    CheckList,
    Raises,
    StoreFactory,
    StoreUnderTest,
    contents,
    ensure,
    head,
    patiently,
    put,
    same,
    spawn,
    value_of,
)

CHECKLIST = CheckList()


@CHECKLIST.check
async def empty_store(subject: StoreUnderTest) -> None:
    """A new store has no keys, and says so without an error."""
    store = subject.store
    ensure(await store.get(b"k") is None, "an absent key was found")
    page = await store.scan(b"")
    same((page.items, page.more), ((), False), "a scan of nothing")


@CHECKLIST.check
async def empty_transaction(subject: StoreUnderTest) -> None:
    """A transaction without operations tells whether the compares hold, and makes no revision."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    for compares, holds in (
        ([], True),
        ([Compare(b"k", revision)], True),
        ([Compare(b"other", 0)], True),
        ([Compare(b"k", revision + 1)], False),
        ([Compare(b"k", 0)], False),
    ):
        done = await store.transact(compares, [])
        same((done.succeeded, done.revision), (holds, revision), f"transaction that only compares {compares}")
    same(await head(store), revision, "the revision after transactions without operations")


@CHECKLIST.check
async def delete_of_absent(subject: StoreUnderTest) -> None:
    """Deleting an absent key succeeds and makes no revision; next to a put it takes no part in it."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    done = await store.transact([], [Delete(b"absent")])
    same((done.succeeded, done.revision), (True, revision), "deleting an absent key")
    same(await head(store), revision, "the revision after deleting an absent key")
    done = await store.transact([], [Delete(b"absent"), Put(b"k", b"w")])
    ensure(done.succeeded and done.revision > revision, "a put beside a delete of nothing made no revision")
    same(await contents(store), {b"k": b"w"}, "the keys")


@CHECKLIST.check
async def empty_value(subject: StoreUnderTest) -> None:
    """An empty value is a value."""
    store = subject.store
    await put(store, b"k", b"")
    found = await store.get(b"k")
    ensure(found is not None and found.value == b"", "an empty value is not what was read")
    same(await contents(store), {b"k": b""}, "a scan over an empty value")


@CHECKLIST.check
async def empty_key_refused(subject: StoreUnderTest) -> None:
    """The empty key is InvalidStoreRequestError everywhere."""
    store = subject.store
    with Raises(InvalidStoreRequestError, "get of the empty key"):
        await store.get(b"")
    with Raises(InvalidStoreRequestError, "put of the empty key"):
        await store.transact([], [Put(b"", b"v")])
    with Raises(InvalidStoreRequestError, "delete of the empty key"):
        await store.transact([], [Delete(b"")])
    with Raises(InvalidStoreRequestError, "compare of the empty key"):
        await store.transact([Compare(b"", 0)], [])


@CHECKLIST.check
async def duplicate_keys_refused(subject: StoreUnderTest) -> None:
    """A transaction that writes a key twice is InvalidStoreRequestError and writes nothing."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    twice: list[list[Operation]] = [
        [Put(b"a", b"1"), Put(b"a", b"2")],
        [Put(b"a", b"1"), Put(b"a", b"1")],
        [Put(b"b", b"1"), Put(b"a", b"1"), Delete(b"a")],
        [Delete(b"k"), Put(b"b", b"1"), Put(b"k", b"2")],
        [Delete(b"k"), Delete(b"k")],
    ]
    for operations in twice:
        with Raises(InvalidStoreRequestError, f"a key written twice by {operations}"):
            await store.transact([], operations)
        with Raises(InvalidStoreRequestError, "a key written twice where the compares do not hold"):
            await store.transact([Compare(b"k", 0)], operations)
    same((await contents(store), await head(store)), ({b"k": b"v"}, revision), "the store afterwards")


@CHECKLIST.check
async def key_compared_twice(subject: StoreUnderTest) -> None:
    """Comparing a key twice is allowed, and both have to hold."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    done = await store.transact([Compare(b"k", revision), Compare(b"k", revision)], [Put(b"k", b"w")])
    ensure(done.succeeded, "two equal compares that hold")
    contradiction = [Compare(b"k", done.revision), Compare(b"k", 0)]
    for compares in (contradiction, contradiction[::-1]):
        ensure(not (await store.transact(compares, [Delete(b"k")])).succeeded, "two compares contradict")
    same(await value_of(store, b"k"), b"w", "the key")


@CHECKLIST.check
async def key_limit(subject: StoreUnderTest) -> None:
    """MAX_KEY_BYTES is allowed; one byte more is InvalidStoreRequestError everywhere."""
    store = subject.store
    longest = b"k" * MAX_KEY_BYTES
    revision = await put(store, longest, b"v")
    ensure((await store.transact([Compare(longest, revision)], [])).succeeded, "comparing the longest key")
    same(await value_of(store, longest), b"v", "the longest key")
    same(len((await store.scan(longest)).items), 1, "keys below the longest prefix")
    same(len((await store.scan(b"", after=longest)).items), 0, "keys after the longest")
    ensure((await store.transact([], [Delete(longest)])).succeeded, "deleting the longest key")
    longer = longest + b"k"
    with Raises(InvalidStoreRequestError, "get of too long a key"):
        await store.get(longer)
    with Raises(InvalidStoreRequestError, "put of too long a key"):
        await store.transact([], [Put(longer, b"v")])
    with Raises(InvalidStoreRequestError, "delete of too long a key"):
        await store.transact([], [Delete(longer)])
    with Raises(InvalidStoreRequestError, "compare of too long a key"):
        await store.transact([Compare(longer, 0)], [])
    with Raises(InvalidStoreRequestError, "scan of too long a prefix"):
        await store.scan(longer)
    with Raises(InvalidStoreRequestError, "scan after too long a key"):
        await store.scan(b"", after=longer)
    with Raises(InvalidStoreRequestError, "watch of too long a prefix"):
        await patiently(subject, anext(store.watch(longer)), "refusing to watch too long a prefix")


@CHECKLIST.check
async def value_limit(subject: StoreUnderTest) -> None:
    """MAX_VALUE_BYTES is allowed; one byte more is InvalidStoreRequestError and writes nothing."""
    store = subject.store
    largest = bytes(MAX_VALUE_BYTES)
    revision = await put(store, b"k" * MAX_KEY_BYTES, largest)
    ensure(await value_of(store, b"k" * MAX_KEY_BYTES) == largest, "the largest value did not come back")
    with Raises(InvalidStoreRequestError, "too large a value"):
        await store.transact([], [Put(b"a", b"v"), Put(b"b", largest + b"\0")])
    ensure(await store.get(b"a") is None, "a refused transaction wrote a key")
    same(await head(store), revision, "the revision after a refused transaction")


@CHECKLIST.check
async def transaction_limits(subject: StoreUnderTest) -> None:
    """MAX_TXN_OPERATIONS of each kind and MAX_TXN_BYTES are allowed; more is refused and writes nothing."""
    store = subject.store
    keys = [b"%04d" % number for number in range(MAX_TXN_OPERATIONS + 1)]
    compares = [Compare(key, 0) for key in keys]
    puts = [Put(key, b"v") for key in keys]
    with Raises(InvalidStoreRequestError, "too many operations"):
        await store.transact([], puts)
    with Raises(InvalidStoreRequestError, "too many compares"):
        await store.transact(compares, [])
    same(await contents(store), {}, "keys after refused transactions")
    done = await store.transact(compares[:-1], puts[:-1])
    ensure(done.succeeded, "as many compares and operations as are allowed did not succeed")
    same(len(await contents(store)), MAX_TXN_OPERATIONS, "keys written by the largest transaction")
    half = MAX_TXN_BYTES // 2 - 1
    done = await store.transact([], [Put(b"a", bytes(half)), Put(b"b", bytes(half))])
    ensure(done.succeeded, "as many bytes as are allowed did not succeed")
    with Raises(InvalidStoreRequestError, "too many bytes in one transaction"):
        await store.transact([], [Put(b"c", bytes(half)), Put(b"d", bytes(half + 1))])
    ensure(await store.get(b"c") is None, "a refused transaction wrote a key")


@CHECKLIST.check
async def senseless_numbers_refused(subject: StoreUnderTest) -> None:
    """Scan limits below 1, negative revisions and endless ttls are InvalidStoreRequestError."""
    store = subject.store
    for limit in (0, -1):
        with Raises(InvalidStoreRequestError, f"a scan of {limit} keys"):
            await store.scan(b"", limit=limit)
    with Raises(InvalidStoreRequestError, "comparing with a negative revision"):
        await store.transact([Compare(b"k", -1)], [])
    with Raises(InvalidStoreRequestError, "watching from a negative revision"):
        await patiently(subject, anext(store.watch(b"", from_revision=-1)), "refusing a negative revision")
    for ttl_s in (math.inf, math.nan):
        with Raises(InvalidStoreRequestError, f"a lease of {ttl_s} seconds"):
            await store.grant_lease(ttl_s)


@CHECKLIST.check
async def close_twice(subject: StoreUnderTest) -> None:
    """`aclose` may be called again, also at the same time."""
    await put(subject.store, b"k", b"v", lease_id=(await subject.store.grant_lease(10)).lease_id)
    await asyncio.gather(subject.store.aclose(), subject.store.aclose())
    await subject.store.aclose()


@CHECKLIST.check_with_factory(needs_controllable_clock=False)
async def close_by_context(factory: StoreFactory) -> None:
    """`async with` gives the store itself and closes it, also when an error leaves the block."""
    async with factory() as subject:
        async with subject.store as entered:
            ensure(entered is subject.store, "async with gives another store")
        with Raises(StoreClosedError, "a call after the block"):
            await subject.store.get(b"k")
    async with factory() as subject:
        try:
            async with subject.store:
                raise KeyError
        except KeyError:
            pass
        with Raises(StoreClosedError, "a call after the block failed"):
            await subject.store.get(b"k")


@CHECKLIST.check
async def call_after_close(subject: StoreUnderTest) -> None:
    """Every method raises StoreClosedError after `aclose`, a watch from its iteration."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    lease = await store.grant_lease(10)
    begun = store.watch(b"", from_revision=revision)
    await patiently(subject, anext(begun), "an event that had happened")
    await store.aclose()
    with Raises(StoreClosedError, "get after close"):
        await store.get(b"k")
    with Raises(StoreClosedError, "scan after close"):
        await store.scan(b"")
    with Raises(StoreClosedError, "transact after close"):
        await store.transact([], [Put(b"k", b"w")])
    with Raises(StoreClosedError, "grant_lease after close"):
        await store.grant_lease(10)
    with Raises(StoreClosedError, "keep_lease after close"):
        await store.keep_lease(lease.lease_id)
    with Raises(StoreClosedError, "revoke_lease after close"):
        await store.revoke_lease(lease.lease_id)
    for what, watch in (("begun before", begun), ("begun after", store.watch(b"", from_revision=revision))):
        with Raises(StoreClosedError, f"watch {what} close"):
            await patiently(subject, anext(watch), f"the end of the watch {what} close")


@CHECKLIST.check
async def close_ends_waiting_watch(subject: StoreUnderTest) -> None:
    """A watch that waits ends with StoreClosedError when the store is closed."""
    store = subject.store
    first = await put(store, b"k", b"v")
    watch = store.watch(b"", from_revision=first)
    await patiently(subject, anext(watch), "an event that had happened")
    waiting = spawn(anext(watch))
    await settle()  # it waits, if nothing far away is involved
    await store.aclose()
    with Raises(StoreClosedError, "a waiting watch at close"):
        await patiently(subject, waiting, "the end of a waiting watch")
