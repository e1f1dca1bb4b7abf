"""Watches on a real etcd, where they differ from those in memory: streams that break, large answers."""

from __future__ import annotations

import asyncio
import gc

import pytest

from deploy.rig.etcd import EtcdServer
from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import MAX_VALUE_BYTES, Delete, Put
from kvplane.store.errors import CompactedError, FutureRevisionError, StoreClosedError
from kvplane.store.etcd import EtcdStore
from kvplane.store.etcd.methods import COMPACT
from kvplane.store.etcd.watch import EtcdWatch
from tests.store.etcd.conftest import MakeStore, StartEtcd


async def compact(store: EtcdStore, revision: int) -> None:
    await store._client.repeated(COMPACT, pb.CompactionRequest(revision=revision))


async def put(store: EtcdStore, value: bytes, key: bytes = b"k") -> int:
    return (await store.transact([], [Put(key, value)])).revision


async def break_streams(store: EtcdStore) -> None:
    """As a failure of the endpoint in use would."""
    endpoint = store._client._endpoints.used
    assert endpoint is not None
    assert endpoint.streams
    for cancel in [*endpoint.streams]:
        cancel()


async def test_a_broken_stream_goes_on_after_the_last_batch_told(store: EtcdStore) -> None:
    watch = store.watch(b"", from_revision=await put(store, b"0"))
    told = [(await anext(watch)).revision]
    for number in range(5):
        if number % 2:
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.05)
            await break_streams(store)
            last = await put(store, b"%d" % number)
            told.append((await waiting).revision)
        else:
            await break_streams(store)
            last = await put(store, b"%d" % number)
            told.append((await anext(watch)).revision)
        assert told[-1] == last


async def test_a_cancelled_step_loses_nothing(store: EtcdStore) -> None:
    first = await put(store, b"0")
    watch = store.watch(b"", from_revision=first)
    told: list[int] = []
    puts = [first]  # others' leases end meanwhile, and take revisions
    for turns in [*range(8), 40, 200]:
        puts.append(await put(store, b"%d" % turns))
        step = asyncio.ensure_future(anext(watch))
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        try:
            told.append((await step).revision)
        except asyncio.CancelledError:
            continue
    while not told or told[-1] < puts[-1]:
        told.append((await asyncio.wait_for(anext(watch), 30)).revision)
    assert told == puts


async def test_batches_larger_than_an_answer_come_whole(store: EtcdStore) -> None:
    """Three revisions whose keys, as they were and as they are, are too much for one answer of etcd."""
    half = MAX_VALUE_BYTES // 2
    revisions = [
        (await store.transact([], [Put(key, bytes([number]) * half) for key in (b"a", b"b")])).revision
        for number in range(3)
    ]
    watch = store.watch(b"", from_revision=revisions[0])
    for number, revision in enumerate(revisions):
        batch = await asyncio.wait_for(anext(watch), 30)
        assert (batch.revision, [event.key for event in batch.events]) == (revision, [b"a", b"b"])
        for event in batch.events:
            assert event.current is not None
            assert event.current.value == bytes([number]) * half
            assert (event.previous is None) == (number == 0)
            assert number == 0 or (event.previous and event.previous.value == bytes([number - 1]) * half)
    await store.transact([], [Delete(b"a"), Delete(b"b")])


async def test_replay_is_complete_or_refused_around_the_compacted_revision(store: EtcdStore) -> None:
    """Of the revision it is compacted to, etcd itself keeps no removal, and no key as it was before."""
    await put(store, b"1", b"gone")
    removal = (await store.transact([], [Delete(b"gone"), Put(b"k", b"2")])).revision
    last = await put(store, b"3")
    await compact(store, removal)
    with pytest.raises(CompactedError) as caught:
        await anext(store.watch(b"", from_revision=removal))
    assert caught.value.compact_revision == removal + 1
    batch = await anext(store.watch(b"", from_revision=removal + 1))
    assert batch.revision == last
    [event] = batch.events
    assert event.previous is not None
    assert event.previous.value == b"2"


async def test_compacted_while_the_stream_was_broken(store: EtcdStore) -> None:
    watch = store.watch(b"", from_revision=await put(store, b"0"))
    await anext(watch)
    await break_streams(store)
    for number in range(5):
        last = await put(store, b"%d" % number)
    await compact(store, last)
    with pytest.raises(CompactedError) as caught:
        await anext(watch)
    assert caught.value.compact_revision == last + 1


async def test_compacted_beneath_a_watch_that_has_begun(store: EtcdStore) -> None:
    """etcd looks after watches of the past ten times a second: compacted before, such a one is ended."""
    ended = 0
    for _ in range(10):
        first = await put(store, b"0")
        for number in range(5):
            last = await put(store, b"%d" % number)
        watch = store.watch(b"", from_revision=first)
        assert isinstance(watch, EtcdWatch)
        watch._stream = await watch._connect()
        await compact(store, last)
        try:
            told = (await asyncio.wait_for(anext(watch), 30)).revision
        except CompactedError as error:
            told = error.compact_revision
        assert told in (first, last + 1), "a gap"
        ended += told != first
    assert ended


async def test_a_store_that_begins_anew(start_etcd: StartEtcd, make_store: MakeStore) -> None:
    """A watch resumed on another store's revisions would be wrong without anybody's knowing."""
    server = await asyncio.to_thread(start_etcd)
    store = make_store(server.endpoint)
    for number in range(5):
        last = await put(store, b"%d" % number)
    watch = store.watch(b"", from_revision=last)
    await anext(watch)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread((server.data_dir / "member").rename, server.data_dir / "lost")
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.wait_ready)
    with pytest.raises(FutureRevisionError) as caught:
        await asyncio.wait_for(anext(watch), 30)
    assert (caught.value.asked, caught.value.current) == (last + 1, 1)


async def test_a_quiet_watch_is_moved_on(start_etcd: StartEtcd, make_store: MakeStore) -> None:
    """etcd says now and then how far it is: so a compaction after a break is no loss for a quiet watch."""
    server = await asyncio.to_thread(
        start_etcd, flags=("--experimental-watch-progress-notify-interval", "200ms")
    )
    store = make_store(server.endpoint)
    watch = store.watch(b"quiet/", from_revision=await put(store, b"0", b"quiet/a"))
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    for number in range(5):
        last = await put(store, b"%d" % number, b"loud")
    await asyncio.sleep(0.8)
    await compact(store, last)
    await break_streams(store)
    last = await put(store, b"1", b"quiet/a")
    assert (await asyncio.wait_for(waiting, 30)).revision == last


async def test_a_forgotten_watch_holds_no_stream(store: EtcdStore) -> None:
    first = await put(store, b"0")
    for waits in (False, True):
        watch = store.watch(b"", from_revision=first)
        await anext(watch)
        if waits:
            step = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0.05)
            step.cancel()
            await asyncio.wait([step])
            del step
        assert store._client._calls
        del watch
        gc.collect()
        assert not store._client._calls


async def test_closing_ends_what_is_under_way(
    etcd_server: EtcdServer, start_etcd: StartEtcd, make_store: MakeStore
) -> None:
    """Calls that would have waited for a member that does not answer."""
    server = await asyncio.to_thread(start_etcd)
    store = make_store(server.endpoint, timeout_s=30.0)
    lease = await store.grant_lease(60)
    watch = store.watch(b"", from_revision=await put(store, b"0"))
    await anext(watch)
    await store.keep_lease(lease.lease_id)
    await asyncio.to_thread(server.pause)
    calls = [
        asyncio.ensure_future(work)
        for work in (
            store.get(b"k"),
            store.scan(b""),
            store.transact([], [Put(b"k", b"")]),
            store.transact([], [Put(b"k", b"")]),
            store.grant_lease(10),
            store.keep_lease(lease.lease_id),
            store.revoke_lease(lease.lease_id),
            anext(watch),
            anext(store.watch(b"")),
        )
    ]
    await asyncio.sleep(0.3)
    await asyncio.wait_for(store.aclose(), 30)
    done = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert [type(each) for each in done] == [StoreClosedError] * len(calls)
