"""Conformance of watches. All run on any clock."""

from __future__ import annotations

import asyncio

from kvplane.store.base import MIN_LEASE_TTL_S, Compare, Delete, Event, EventBatch, KeyValue, Put
from kvplane.store.errors import CompactedError, FutureRevisionError
from kvplane.store.testing.clock import settle
from kvplane.store.testing.harness import (
    CheckList,
    Raises,
    StoreUnderTest,
    batches,
    changes,
    ensure,
    head,
    patiently,
    put,
    same,
    spawn,
    summary,
)

CHECKLIST = CheckList()


@CHECKLIST.check
async def watch_from_old_revision(subject: StoreUnderTest) -> None:
    """A watch from an old revision replays all since, that one included, and goes on with what comes."""
    store = subject.store
    await put(store, b"k", b"before")
    first = await put(store, b"k", b"0")
    for number in range(1, 5):
        await put(store, b"k", b"%d" % number)
    watch = store.watch(b"", from_revision=first)
    told = await batches(subject, watch, first + 4)
    same([batch.revision for batch in told], [*range(first, first + 5)], "revisions replayed")
    same([summary(batch) for batch in told], [[(b"k", b"%d" % number)] for number in range(5)], "the replay")
    last = await put(store, b"k", b"live")
    same([summary(batch) for batch in await batches(subject, watch, last)], [[(b"k", b"live")]], "what came")


@CHECKLIST.check
async def watch_from_next_revision(subject: StoreUnderTest) -> None:
    """A scan's revision + 1 continues the scan: nothing twice, nothing left out."""
    store = subject.store
    await put(store, b"k", b"before")
    watch = store.watch(b"", from_revision=await head(store) + 1)
    waiting = spawn(anext(watch))
    await settle()  # it waits, if nothing far away is involved
    first = await put(store, b"k", b"1")
    second = await put(store, b"k", b"2")
    batch = await patiently(subject, waiting, "a watch's first batch")
    same((batch.revision, summary(batch)), (first, [(b"k", b"1")]), "the first batch")
    same([summary(batch) for batch in await batches(subject, watch, second)], [[(b"k", b"2")]], "the rest")


@CHECKLIST.check
async def watch_from_now(subject: StoreUnderTest) -> None:
    """Revision 0 means from when the iteration begins: nothing older, then everything."""
    store = subject.store
    before = await put(store, b"k", b"before")
    watch = store.watch(b"")
    waiting = spawn(anext(watch))
    last = before

    async def write_until_told() -> EventBatch:
        nonlocal last
        while not waiting.done():  # a backend far away begins when it has been reached
            last = await put(store, b"k", b"after")
            await asyncio.sleep(0)
        return waiting.result()

    first = await patiently(subject, write_until_told(), "a batch of a watch from now on")
    ensure(first.revision > before, "a watch from now on told what was before")
    last = await put(store, b"k", b"end")
    told = [first, *await batches(subject, watch, last)]
    same([batch.revision for batch in told], [*range(first.revision, last + 1)], "revisions told")


@CHECKLIST.check
async def watch_from_future_revision(subject: StoreUnderTest) -> None:
    """Above the current revision + 1, the iteration raises FutureRevisionError with both revisions."""
    store = subject.store
    current = await put(store, b"k", b"v")
    for asked in (current + 2, current + 1000):
        with Raises(FutureRevisionError, f"watching from {asked} at {current}") as caught:
            await patiently(subject, anext(store.watch(b"k", from_revision=asked)), "refusing the future")
        same((caught.error.asked, caught.error.current), (asked, current), "the error's revisions")


@CHECKLIST.check
async def watch_from_compacted_revision(subject: StoreUnderTest) -> None:
    """Before the compacted revision it raises CompactedError; from it, or after a new scan, it works."""
    store = subject.store
    first = await put(store, b"k", b"0")
    for number in range(1, 6):
        await put(store, b"k", b"%d" % number)
    await subject.compact(first + 3)
    for asked in (first, first + 2):
        with Raises(CompactedError, "watching from a compacted revision") as caught:
            await patiently(subject, anext(store.watch(b"k", from_revision=asked)), "refusing the past")
        same(caught.error.compact_revision, first + 3, "the error's revision")
    told = await batches(subject, store.watch(b"k", from_revision=first + 3), first + 5)
    same([batch.revision for batch in told], [*range(first + 3, first + 6)], "revisions after compaction")
    resumed = store.watch(b"k", from_revision=await head(store) + 1)
    last = await put(store, b"k", b"end")
    same([summary(batch) for batch in await batches(subject, resumed, last)], [[(b"k", b"end")]], "resumed")
    with Raises(FutureRevisionError, "watching from the future after compaction"):
        await patiently(subject, anext(store.watch(b"k", from_revision=last + 2)), "refusing the future")


@CHECKLIST.check
async def compaction_leaves_the_keys(subject: StoreUnderTest) -> None:
    """Compaction up to the current revision takes history only: keys and revisions stay."""
    store = subject.store
    await put(store, b"old", b"v")
    current = await put(store, b"k", b"v")
    await subject.compact(current)
    same(await store.get(b"k"), KeyValue(b"k", b"v", current, current, 0), "a key after compaction")
    page = await store.scan(b"")
    same(([item.key for item in page.items], page.revision), ([b"k", b"old"], current), "a scan after it")
    ensure((await store.transact([Compare(b"k", current)], [Delete(b"old")])).succeeded, "a compare after it")


@CHECKLIST.check
async def slow_watcher_has_no_gap(subject: StoreUnderTest) -> None:
    """A watcher overtaken by compaction gets everything in order, up to a CompactedError or the end."""
    store = subject.store
    first = await put(store, b"k", b"0")
    watch = store.watch(b"", from_revision=first)
    await batches(subject, watch, first)
    for number in range(1, 21):
        last = await put(store, b"k", b"%d" % number)
    await subject.compact(last)
    await put(store, b"k", b"end")
    expected = first
    try:
        while expected < last + 1:
            batch = await patiently(subject, anext(watch), f"revision {expected + 1}, or an error")
            expected += 1
            same(batch.revision, expected, "the next revision told to a slow watcher")
    except CompactedError as error:
        ensure(error.compact_revision > expected, "nothing was missing, and CompactedError was raised")


@CHECKLIST.check
async def watch_waiting_outlives_compaction(subject: StoreUnderTest) -> None:
    """A watch that has seen everything is not disturbed by compaction, also below a quiet prefix."""
    store = subject.store
    watch = store.watch(b"quiet/", from_revision=await head(store) + 1)
    waiting = spawn(anext(watch))
    for number in range(20):
        last = await put(store, b"loud", b"%d" % number)
        await asyncio.sleep(0)
    await put(store, b"quiet/1", b"")
    await patiently(subject, waiting, "the first event below a quiet prefix")
    waiting = spawn(anext(watch))
    await settle()  # it waits, if nothing far away is involved
    for number in range(20):
        last = await put(store, b"loud", b"%d" % number)
    await subject.compact(last)
    await put(store, b"quiet/2", b"")
    batch = await patiently(subject, waiting, "an event after compaction")
    same(summary(batch), [(b"quiet/2", b"")], "the event after compaction")


@CHECKLIST.check
async def one_batch_per_revision(subject: StoreUnderTest) -> None:
    """A transaction's changes come as one batch, in the order of its operations, without those of nothing."""
    store = subject.store
    start = await put(store, b"gone", b"v")
    done = await store.transact(
        [], [Put(b"z", b"1"), Delete(b"gone"), Delete(b"absent"), Put(b"a", b"2"), Put(b"m", b"")]
    )
    last = await put(store, b"end", b"")
    told = await batches(subject, store.watch(b"", from_revision=start + 1), last)
    same([batch.revision for batch in told], [done.revision, last], "revisions told")
    same(
        summary(told[0]),
        [(b"z", b"1"), (b"gone", None), (b"a", b"2"), (b"m", b"")],
        "the transaction's batch",
    )


@CHECKLIST.check
async def events_show_both_sides(subject: StoreUnderTest) -> None:
    """An event has the key as it was and as it is: made, changed, moved to a lease, removed, made anew."""
    store = subject.store
    lease = await store.grant_lease(10)
    start = await head(store) + 1
    a = await put(store, b"k", b"1")
    b = await put(store, b"k", b"2", lease_id=lease.lease_id)
    c = (await store.transact([], [Delete(b"k")])).revision
    d = await put(store, b"k", b"3")
    told = await batches(subject, store.watch(b"k", from_revision=start), d)
    one, two = KeyValue(b"k", b"1", a, a, 0), KeyValue(b"k", b"2", a, b, lease.lease_id)
    expected = [
        EventBatch(a, (Event(b"k", one, None),)),
        EventBatch(b, (Event(b"k", two, one),)),
        EventBatch(c, (Event(b"k", None, two),)),
        EventBatch(d, (Event(b"k", KeyValue(b"k", b"3", d, d, 0), None),)),
    ]
    same(told, expected, "the life of a key")


@CHECKLIST.check
async def watch_filters_by_prefix(subject: StoreUnderTest) -> None:
    """A watch tells keys below its prefix only, also of a transaction; revisions without any are left out."""
    store = subject.store
    start = await head(store) + 1
    keys = [b"a", b"p", b"p/1", b"p/\xff", b"p0", b"\xfe", b"\xff", b"\xff\0", b"\xff\xff"]
    for key in keys:
        await put(store, key, b"1")
    both = (await store.transact([], [Put(key, b"2") for key in reversed(keys)])).revision
    for prefix in (b"", b"p", b"p/", b"p/\xff", b"\xff", b"\xff\xff"):
        told = await batches(subject, store.watch(prefix, from_revision=start), both)
        matching = [key for key in keys if key.startswith(prefix)]
        expected = [[(key, b"1")] for key in matching] + [[(key, b"2") for key in reversed(matching)]]
        same([summary(batch) for batch in told], expected, f"what was told below {prefix!r}")


@CHECKLIST.check
async def nothing_happened_nothing_told(subject: StoreUnderTest) -> None:
    """Failed and empty transactions, refused ones, and leases without keys are no events."""
    store = subject.store
    start = await put(store, b"k", b"v") + 1
    await store.transact([Compare(b"k", 0)], [Put(b"k", b"w"), Put(b"l", b"")])
    await store.transact([], [])
    await store.transact([], [Delete(b"absent")])
    await store.revoke_lease((await store.grant_lease(10)).lease_id)
    last = await put(store, b"end", b"")
    told = await batches(subject, store.watch(b"", from_revision=start), last)
    same([summary(batch) for batch in told], [[(b"end", b"")]], "what was told")


@CHECKLIST.check
async def watch_sees_lease_expiry(subject: StoreUnderTest) -> None:
    """A waiting watch is told of a lease's expiry though nobody calls the store: one batch of removals."""
    store = subject.store
    lease = await store.grant_lease(MIN_LEASE_TTL_S)
    keys = [b"a", b"b", b"c"]
    done = await store.transact([], [Put(key, b"v", lease.lease_id) for key in keys])
    watch = store.watch(b"", from_revision=done.revision + 1)
    waiting = spawn(anext(watch))
    await settle()  # it waits, if nothing far away is involved
    await subject.expire(lease.ttl_s + subject.expiry_lag_s)
    batch = await patiently(subject, waiting, "the batch of a lease's expiry")
    same(batch.revision, done.revision + 1, "the revision of a lease's expiry")
    same(sorted(changes([batch])), [(key, b"v", None) for key in keys], "the events of a lease's expiry")
    last = await put(store, b"end", b"")
    same(len(await batches(subject, watch, last)), 1, "batches after the expiry")


@CHECKLIST.check
async def watch_sees_each_lease_expire(subject: StoreUnderTest) -> None:
    """Leases that were granted later but end earlier, and renewed ones, are told in time as well."""
    store = subject.store
    long, short = await store.grant_lease(6), await store.grant_lease(MIN_LEASE_TTL_S)
    await put(store, b"long", b"", lease_id=long.lease_id)
    start = await put(store, b"short", b"", lease_id=short.lease_id) + 1
    watch = store.watch(b"", from_revision=start)
    waiting = spawn(anext(watch))
    await settle()  # it waits, if nothing far away is involved
    await subject.expire(short.ttl_s + subject.expiry_lag_s)
    batch = await patiently(subject, waiting, "the shorter lease's expiry")
    same(summary(batch), [(b"short", None)], "the events of the shorter lease's expiry")
    await store.keep_lease(long.lease_id)
    waiting = spawn(anext(watch))
    await settle()  # it waits, if nothing far away is involved
    await subject.expire(long.ttl_s + subject.expiry_lag_s)
    batch = await patiently(subject, waiting, "the longer lease's expiry")
    same(summary(batch), [(b"long", None)], "the events of the longer lease's expiry")


@CHECKLIST.check
async def watch_sees_revocation(subject: StoreUnderTest) -> None:
    """A revoked lease's keys are told as removals of one revision, filtered like all others."""
    store = subject.store
    lease = await store.grant_lease(10)
    for key in (b"p/1", b"q", b"p/2"):
        start = await put(store, key, b"v", lease_id=lease.lease_id) + 1
    await store.revoke_lease(lease.lease_id)
    told = await batches(subject, store.watch(b"p/", from_revision=start), start)
    same(sorted(changes(told)), [(b"p/1", b"v", None), (b"p/2", b"v", None)], "the events of a revocation")


@CHECKLIST.check
async def no_gaps_under_concurrent_writers(subject: StoreUnderTest) -> None:
    """Watchers begun at any time see every revision once, in order, whatever the writers do."""
    store = subject.store
    start = await head(store) + 1
    writers, rounds = 4, 12
    running = writers

    async def write(writer: int) -> None:
        nonlocal running
        for number in range(rounds):
            await store.transact([], [Put(b"w/%d/%d" % (writer, number), b""), Put(b"n", b"%d" % number)])
            await asyncio.sleep(0)
        running -= 1
        if not running:
            await put(store, b"end", b"")

    async def follow(delay: int, from_revision: int) -> list[EventBatch]:
        told: list[EventBatch] = []
        for _ in range(delay):
            await asyncio.sleep(0)
        async for batch in store.watch(b"", from_revision=from_revision):
            told.append(batch)
            if batch.events[-1].key == b"end":
                break
        return told

    following = [spawn(follow(delay, start)) for delay in (0, 1, 5, 20, 60)]
    await asyncio.gather(*[write(writer) for writer in range(writers)])
    expected = [*range(start, start + writers * rounds + 1)]
    for follower in following:
        told = await patiently(subject, follower, "the end of what was written")
        same([batch.revision for batch in told], expected, "revisions told")
        written = {key for batch in told for key, _ in summary(batch) if key.startswith(b"w/")}
        same(len(written), writers * rounds, "keys told")
