"""Conformance of keys, transactions and scans."""

from __future__ import annotations

import asyncio

from kvplane.store.base import Compare, Delete, KeyValue, Operation, Page, Put, Store, Transaction
from kvplane.store.testing.harness import (
    CheckList,
    StoreUnderTest,
    batches,
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
async def two_writers_one_wins(subject: StoreUnderTest) -> None:
    """Of many that create a key on condition of its absence, one succeeds, and its value stays."""
    store = subject.store

    async def claim(number: int) -> bool:
        key, value = b"claim", b"%d" % number
        return (
            await store.transact([Compare(key, 0)], [Put(key, value), Put(b"by/" + value, b"")])
        ).succeeded

    for _ in range(5):
        won = await asyncio.gather(*[claim(number) for number in range(8)])
        same(sum(won), 1, "winners")
        winner = b"%d" % won.index(True)
        same(await value_of(store, b"claim"), winner, "the claim's value")
        same([*await contents(store, b"by/")], [b"by/" + winner], "what the winner wrote besides")
        await store.transact([], [Delete(b"claim"), Delete(b"by/" + winner)])


@CHECKLIST.check
async def no_update_is_lost(subject: StoreUnderTest) -> None:
    """Read, compare and write, repeated on conflict, counts right among concurrent writers."""
    store = subject.store
    writers, rounds = 5, 8

    async def count() -> None:
        done = 0
        while done < rounds:
            found = await store.get(b"n")
            await asyncio.sleep(0)
            value, revision = (0, 0) if found is None else (int(found.value), found.mod_revision)
            tried = await store.transact([Compare(b"n", revision)], [Put(b"n", b"%d" % (value + 1))])
            done += tried.succeeded

    await patiently(subject, asyncio.gather(*[count() for _ in range(writers)]), "the last of the updates")
    same(await value_of(store, b"n"), b"%d" % (writers * rounds), "the count")


@CHECKLIST.check
async def cancelled_commit_is_atomic(subject: StoreUnderTest) -> None:
    """A transaction cancelled at any point has written all or nothing, and the store goes on."""
    store = subject.store
    for passes in range(12):
        prefix = b"%d/" % passes
        operations = [Put(prefix + b"a", b"v"), Put(prefix + b"b", b"v")]
        task = spawn(store.transact([Compare(prefix + b"a", 0)], operations))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        try:
            ended = (await task).succeeded
        except asyncio.CancelledError:
            ended = False
        page = await store.scan(prefix)  # one revision, so it cannot fall between the two keys
        ensure(len(page.items) in ((2,) if ended else (0, 2)), f"of two keys {len(page.items)} were written")
        same(len({item.mod_revision for item in page.items}), len(page.items) // 2, "revisions of the keys")
        await put(store, b"barrier", b"%d" % passes)
    same(await value_of(store, b"barrier"), b"11", "the last write")


@CHECKLIST.check
async def revisions_of_a_key(subject: StoreUnderTest) -> None:
    """A put sets mod_revision; create_revision stays until the key was absent."""
    store = subject.store
    first = await put(store, b"k", b"1")
    same(await store.get(b"k"), KeyValue(b"k", b"1", first, first, 0), "a new key")
    await put(store, b"other", b"")
    second = await put(store, b"k", b"2")
    ensure(second > first, "a put made no later revision")
    same(await store.get(b"k"), KeyValue(b"k", b"2", first, second, 0), "a key written again")
    third = await put(store, b"k", b"2")
    ensure(third > second, "a put of the same value made no revision")
    await store.transact([], [Delete(b"k")])
    ensure(await store.get(b"k") is None, "a deleted key was found")
    fourth = await put(store, b"k", b"3")
    same(await store.get(b"k"), KeyValue(b"k", b"3", fourth, fourth, 0), "a key made anew")
    same(await head(store), fourth, "the store's revision")


@CHECKLIST.check
async def compare_revisions(subject: StoreUnderTest) -> None:
    """A compare holds for exactly the key's mod_revision; 0 holds for an absent key only."""
    store = subject.store
    created = await put(store, b"k", b"1")
    current = await put(store, b"k", b"2")
    for revision in (0, created, current - 1, current + 1):
        tried = await store.transact([Compare(b"k", revision)], [Put(b"k", b"wrong")])
        same((tried.succeeded, tried.revision), (False, current), f"comparing {current} with {revision}")
    ensure(not (await store.transact([Compare(b"absent", current)], [Put(b"k", b"x")])).succeeded, "absent")
    same(await value_of(store, b"k"), b"2", "the key after failed compares")
    ensure((await store.transact([Compare(b"k", current)], [Delete(b"k")])).succeeded, "the right revision")
    ensure((await store.transact([Compare(b"k", 0)], [Put(b"k", b"3")])).succeeded, "a deleted key is absent")


@CHECKLIST.check
async def one_failed_compare_writes_nothing(subject: StoreUnderTest) -> None:
    """All compares have to hold, wherever the failing one stands; else no operation is done."""
    store = subject.store
    revision = await put(store, b"k", b"v")
    holding = [Compare(b"k", revision), Compare(b"absent", 0), Compare(b"gone", 0)]
    for place in range(len(holding) + 1):
        compares = [*holding[:place], Compare(b"x", 1), *holding[place:]]
        tried = await store.transact(compares, [Put(b"new", b""), Put(b"k", b"w")])
        ensure(not tried.succeeded, f"the compare at {place} failed, and the transaction succeeded")
    same((await contents(store), await head(store)), ({b"k": b"v"}, revision), "the store afterwards")


@CHECKLIST.check
async def failed_transaction_tells_what_it_found(subject: StoreUnderTest) -> None:
    """A failed transaction tells, in the order of its compares, the keys as they are at its revision."""
    store = subject.store
    lease = await store.grant_lease(10)
    await put(store, b"a", b"1")
    await put(store, b"b", b"2", lease_id=lease.lease_id)
    await put(store, b"a", b"3")
    current = await put(store, b"n", b"4")
    a, b, n = await store.get(b"a"), await store.get(b"b"), await store.get(b"n")
    ensure(a is not None and b is not None and n is not None, "a key that was put is not there")
    for compares, found in (
        ([Compare(b"b", 0)], (b,)),
        ([Compare(b"absent", 1)], (None,)),
        ([Compare(b"n", current), Compare(b"x", 0), Compare(b"a", 1), Compare(b"b", 1)], (n, None, a, b)),
        ([Compare(b"b", 1), Compare(b"a", 1), Compare(b"b", 1)], (b, a, b)),
    ):
        writes: list[Operation] = [Put(b"a", b"wrong"), Delete(b"b")]
        for operations in ([], writes):
            tried = await store.transact(compares, operations)
            same(tried, Transaction(False, current, found), f"a transaction that compares {compares}")
    done = await store.transact([Compare(b"n", current)], [Put(b"n", b"5")])
    same(done, Transaction(True, done.revision, ()), "a transaction that succeeded")


@CHECKLIST.check
async def no_two_decide_on_the_same_past(subject: StoreUnderTest) -> None:
    """Of two concurrent transactions, each on condition of what the other changes, one succeeds."""
    store = subject.store
    for turn in range(10):
        x, y = b"x/%d" % turn, b"y/%d" % turn
        one, other = await asyncio.gather(
            store.transact([Compare(x, 0)], [Put(y, b"")]), store.transact([Compare(y, 0)], [Put(x, b"")])
        )
        same(one.succeeded + other.succeeded, 1, "how many of two that exclude each other succeeded")
        failed = other if one.succeeded else one
        ensure(None not in failed.found, "who failed found nothing that speaks against it")
        z = b"z/%d" % turn
        writer, reader = await asyncio.gather(
            store.transact([Compare(z, 0)], [Put(z, b"")]), store.transact([Compare(z, 0)], [])
        )
        ensure(writer.succeeded, "the only writer of a key did not succeed")
        if reader.succeeded:
            ensure(reader.revision < writer.revision, "a key was absent at the revision that made it")
        else:
            same(reader.found, (await store.get(z),), "what the reader found")


@CHECKLIST.check
async def independent_transactions_at_once(subject: StoreUnderTest) -> None:
    """Concurrent transactions on different keys all succeed; those that share a revision are one batch."""
    store = subject.store
    start = await head(store) + 1
    keys = [b"%02d" % number for number in range(40)]
    done = await asyncio.gather(
        *[store.transact([Compare(key, 0)], [Put(key, key), Put(b"by/" + key, b"")]) for key in keys]
    )
    ensure(all(each.succeeded for each in done), "one of many independent transactions did not succeed")
    for key, each in zip(keys, done, strict=True):
        for written in (key, b"by/" + key):
            found = await store.get(written)
            same(found and found.mod_revision, each.revision, f"the revision of {written!r}")
    last = await put(store, b"end", b"")
    told = await batches(subject, store.watch(b"", from_revision=start), last)
    revisions = [batch.revision for batch in told]
    same(revisions, sorted({each.revision for each in done} | {last}), "the revisions told")
    for batch in told[:-1]:
        own = [key for key, each in zip(keys, done, strict=True) if each.revision == batch.revision]
        expected = sorted([*own, *[b"by/" + key for key in own]])
        same(sorted(event.key for event in batch.events), expected, f"the keys of revision {batch.revision}")


@CHECKLIST.check
async def compares_see_the_state_before(subject: StoreUnderTest) -> None:
    """Compares are about the keys before the transaction, also those it writes."""
    store = subject.store
    made = await store.transact([Compare(b"a", 0), Compare(b"b", 0)], [Put(b"a", b"1"), Put(b"b", b"1")])
    ensure(made.succeeded, "creating two absent keys")
    moved = await store.transact(
        [Compare(b"a", made.revision), Compare(b"b", made.revision)], [Delete(b"a"), Put(b"b", b"2")]
    )
    ensure(moved.succeeded, "changing two keys of a known revision")
    same(await contents(store), {b"b": b"2"}, "the keys")


@CHECKLIST.check
async def transaction_is_one_revision(subject: StoreUnderTest) -> None:
    """All of a transaction's keys carry its revision, one above the last."""
    store = subject.store
    before = await put(store, b"gone", b"v")
    done = await store.transact([], [Put(b"b", b"1"), Delete(b"gone"), Put(b"a", b"2")])
    same(done.revision, before + 1, "the revision of a transaction of three operations")
    page = await store.scan(b"")
    same(page.revision, done.revision, "the page's revision")
    same(
        [(item.key, item.mod_revision) for item in page.items],
        [(b"a", before + 1), (b"b", before + 1)],
        "keys",
    )


@CHECKLIST.check
async def binary_keys_and_values(subject: StoreUnderTest) -> None:
    """Keys and values are any bytes; keys are ordered as unsigned bytes, shorter first."""
    store = subject.store
    keys = [
        b"\0",
        b"\0\0",
        b"\0\xff",
        b"/",
        b"a",
        b"a\0",
        b"a\0b",
        b"a/",
        b"aa",
        b"\x7f",
        b"\x80",
        b"\xc3\xa4",
    ]
    keys += [b"\xfe\xff", b"\xff", b"\xff\0", b"\xff\xff", b"\xff\xff\xff"]
    for key in (*keys[1::2], *keys[::2]):
        await put(store, key, key[::-1])
    page = await store.scan(b"")
    same([item.key for item in page.items], sorted(keys), "all keys in order")
    for key in keys:
        same(await value_of(store, key), key[::-1], f"the value of {key!r}")


@CHECKLIST.check
async def scan_prefixes(subject: StoreUnderTest) -> None:
    """A prefix takes the key equal to it and those that go on from it, also at the end of the key space."""
    store = subject.store
    keys = [
        b"a",
        b"a\0",
        b"a\xff",
        b"a\xff\xff",
        b"aa",
        b"b",
        b"\xfe\xff",
        b"\xff",
        b"\xff\0",
        b"\xff\xff",
        b"\xff\xff\0",
    ]
    await store.transact([], [Put(key, b"") for key in keys])
    for prefix in (b"", *keys, b"a\xfe", b"\xfe", b"\xff\xff\xff", b"c", b"\0"):
        await _scans_as(store, prefix, b"", sorted(key for key in keys if key.startswith(prefix)))


@CHECKLIST.check
async def scan_after(subject: StoreUnderTest) -> None:
    """`after` is exclusive, need not exist, and may lie before or behind the prefix."""
    store = subject.store
    keys = [b"a", b"p", b"p/1", b"p/2", b"p/3", b"q", b"\xff", b"\xff\xff"]
    await store.transact([], [Put(key, b"") for key in keys])
    for prefix in (b"", b"p", b"p/", b"\xff"):
        for after in (b"a", b"o", b"p", b"p/", b"p/2", b"p/2\0", b"p/3", b"p0", b"q", b"\xff", b"\xff\xff"):
            expected = sorted(key for key in keys if key.startswith(prefix) and key > after)
            await _scans_as(store, prefix, after, expected)


async def _scans_as(store: Store, prefix: bytes, after: bytes, expected: list[bytes]) -> None:
    page = await store.scan(prefix, after=after)
    same([item.key for item in page.items], expected, f"keys below {prefix!r} after {after!r}")
    ensure(not page.more, f"more is said to follow all keys below {prefix!r}")


@CHECKLIST.check
async def scan_pages(subject: StoreUnderTest) -> None:
    """Pages of every size put together are the whole, and `more` is exact."""
    store = subject.store
    keys = [b"p/%02d" % number for number in range(12)]
    await store.transact([], [Put(key, b"v") for key in [*keys, b"o", b"q"]])
    for limit in (1, 2, 3, 5, 11, 12, 13, 1000):
        read: list[bytes] = []
        page = Page((), 0, True)
        while page.more:
            page = await store.scan(b"p/", after=read[-1] if read else b"", limit=limit)
            read += [item.key for item in page.items]
            ensure(len(page.items) <= limit, f"a page of {len(page.items)} keys, limit {limit}")
            same(page.more, len(read) < len(keys), f"more after {len(read)} of {len(keys)} keys")
            ensure(len(page.items) == limit or not page.more, "a page that is not full says more")
        same(read, keys, f"keys read in pages of {limit}")


@CHECKLIST.check
async def scan_default_limit(subject: StoreUnderTest) -> None:
    """Without a limit a page has 1000 keys."""
    store = subject.store
    keys = [b"%04d" % number for number in range(1001)]
    for start in range(0, len(keys), 100):
        await store.transact([], [Put(key, b"") for key in keys[start : start + 100]])
    page = await store.scan(b"")
    same((len(page.items), page.more), (1000, True), "the first page of 1001 keys")
    page = await store.scan(b"", after=page.items[-1].key)
    same(([item.key for item in page.items], page.more), ([keys[-1]], False), "the second page")


@CHECKLIST.check
async def scan_is_of_one_revision(subject: StoreUnderTest) -> None:
    """A page shows no transaction by halves."""
    store = subject.store

    async def move() -> None:
        for number in range(30):
            here, there = (b"a", b"z") if number % 2 else (b"z", b"a")
            await store.transact([], [Delete(here), Put(there, b"%d" % number)])
            await asyncio.sleep(0)

    await put(store, b"z", b"")
    mover = spawn(move())
    rounds = 0
    while not mover.done():
        page = await store.scan(b"")
        same([item.mod_revision for item in page.items], [page.revision], "revisions of the one key there is")
        rounds += 1
        for _ in range(rounds % 3):
            await asyncio.sleep(0)
    await mover
