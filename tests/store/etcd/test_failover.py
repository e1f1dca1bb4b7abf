"""Members that die, stop or come back, under a store that several of them serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from deploy.rig.etcd import EtcdCluster, EtcdServer
from deploy.rig.process import LOCALHOST, free_ports
from kvplane.store.base import Compare, EventBatch, Put
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.etcd import EtcdStore
from tests.store.etcd.conftest import MakeStore, StartEtcd

TIMEOUT_S = 2.0
LONG_S = 15.0
"""What takes no time ends within this on the busiest machine; calls that could take twice as long do not."""
MARGIN_S = 5.0


async def eventually(store: EtcdStore, key: bytes, seconds: float = 30.0) -> float:
    """Write until it succeeds; returns after how many seconds."""
    begin = time.monotonic()
    while True:
        try:
            await store.transact([], [Put(key, b"")])
        except StoreUnavailableError:
            assert time.monotonic() - begin < seconds
            await asyncio.sleep(0.02)
        else:
            return time.monotonic() - begin


async def follow(store: EtcdStore, told: list[EventBatch], from_revision: int, last: bytes) -> None:
    """Watch as a user does: an error is no end, a new watch goes on from the last revision."""
    next_revision = from_revision
    while True:
        watch: AsyncIterator[EventBatch] = store.watch(b"", from_revision=next_revision)
        try:
            async for batch in watch:
                told.append(batch)
                next_revision = batch.revision + 1
                if any(event.key == last for event in batch.events):
                    return
        except StoreUnavailableError:
            await asyncio.sleep(0.02)


def used(cluster: EtcdCluster, store: EtcdStore) -> EtcdServer:
    endpoint = store._client._endpoints.used
    assert endpoint is not None
    return next(member for member in cluster.members if member.endpoint == endpoint.address)


@pytest.mark.parametrize("how", ["kill", "pause"])
@pytest.mark.parametrize("which", ["leader", "used"])
async def test_a_lost_member_costs_time_and_nothing_else(
    cluster: EtcdCluster, make_store: MakeStore, how: str, which: str
) -> None:
    """Counted by compare and write, and watched: nothing is lost, nothing is done twice or told twice."""
    store = make_store(cluster.endpoints, timeout_s=TIMEOUT_S)
    start = await store.transact([], [Put(b"start", b"")])
    told: list[EventBatch] = []
    following = asyncio.ensure_future(follow(store, told, start.revision + 1, b"end"))
    stop = asyncio.Event()
    known, unknown, longest = [0] * 4, [0] * 4, 0.0

    async def count(number: int) -> None:
        nonlocal longest
        key = b"count/%d" % number
        while not stop.is_set():
            begin = time.monotonic()
            try:
                found = await store.get(key)
                value, revision = (0, 0) if found is None else (int(found.value), found.mod_revision)
                begin = time.monotonic()
                done = await store.transact([Compare(key, revision)], [Put(key, b"%d" % (value + 1))])
                known[number] += done.succeeded
            except StoreUnavailableError:
                unknown[number] += 1
                await asyncio.sleep(0.02)
            longest = max(longest, time.monotonic() - begin)

    counting = [asyncio.ensure_future(count(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    member = await asyncio.to_thread(cluster.leader) if which == "leader" else used(cluster, store)
    await asyncio.to_thread(member.kill if how == "kill" else member.pause)
    before = sum(known)
    async with asyncio.timeout(4 * LONG_S):  # else the cluster goes on, and the store does not
        while sum(known) < before + 20:  # noqa: ASYNC110 - the counting tasks bring it about
            await asyncio.sleep(0.02)
    await asyncio.to_thread(member.start if how == "kill" else member.resume)
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*counting)
    await eventually(store, b"end")
    await asyncio.wait_for(following, 60)
    assert longest < TIMEOUT_S + MARGIN_S
    for number in range(4):
        found = await store.get(b"count/%d" % number)
        assert found is not None
        assert known[number] <= int(found.value) <= known[number] + unknown[number]
    revisions = [batch.revision for batch in told]
    assert revisions == sorted(set(revisions))
    values = [int(e.current.value) for b in told for e in b.events if e.current and e.key == b"count/0"]
    assert values == [*range(1, len(values) + 1)]
    assert values[-1] >= known[0]


async def test_a_paused_member_is_left_within_one_deadline(
    cluster: EtcdCluster, make_store: MakeStore
) -> None:
    """Reads do not even notice; a watch and a kept lease follow to another member."""
    store = make_store(cluster.endpoints, timeout_s=3 * TIMEOUT_S)
    lease = await store.grant_lease(30)
    start = await store.transact([], [Put(b"k", b"v")])
    watch = store.watch(b"", from_revision=start.revision)
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await store.keep_lease(lease.lease_id)
    leader = await asyncio.to_thread(cluster.leader)
    member = used(cluster, store)
    if member is leader:  # an election would be measured too
        endpoint = store._client._endpoints.used
        assert endpoint is not None
        store._client._endpoints.leave(endpoint)
        await asyncio.to_thread(member.pause)
        await store.get(b"k")
        await asyncio.to_thread(member.resume)
        member = used(cluster, store)
    await asyncio.to_thread(member.pause)
    assert await store.get(b"k")
    assert used(cluster, store) is not member
    assert await store.keep_lease(lease.lease_id) == lease
    await store.transact([], [Put(b"k", b"w")])
    assert (await asyncio.wait_for(waiting, LONG_S)).events[0].key == b"k"
    await asyncio.to_thread(member.resume)


async def test_a_dead_endpoint_in_the_list_costs_nothing(
    etcd_server: EtcdServer, make_store: MakeStore
) -> None:
    dead = [f"{LOCALHOST}:{port}" for port in free_ports(2)]
    store = make_store(",".join([dead[0], etcd_server.endpoint, dead[1]]), timeout_s=2 * LONG_S)
    begin = time.monotonic()
    for number in range(20):
        assert (await store.transact([Compare(b"%d" % number, 0)], [Put(b"%d" % number, b"")])).succeeded
    assert time.monotonic() - begin < LONG_S


async def test_without_any_endpoint_calls_fail_at_once_and_come_back_soon(
    start_etcd: StartEtcd, make_store: MakeStore
) -> None:
    server = await asyncio.to_thread(start_etcd)
    store = make_store(server.endpoint, timeout_s=2 * LONG_S)
    start = await store.transact([], [Put(b"k", b"v")])
    lease = await store.grant_lease(30)
    await store.keep_lease(lease.lease_id)
    watch = store.watch(b"", from_revision=start.revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.kill)
    with pytest.raises(StoreUnavailableError):
        await store.get(b"k")
    for call in (
        lambda: store.get(b"k"),
        lambda: store.scan(b""),
        lambda: store.transact([], [Put(b"k", b"w")]),
        lambda: store.grant_lease(10),
        lambda: store.keep_lease(lease.lease_id),
        lambda: store.revoke_lease(lease.lease_id),
    ):
        begin = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await call()
        assert time.monotonic() - begin < LONG_S
    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(waiting, LONG_S)
    await asyncio.sleep(2.0)  # so that gRPC's back-off has grown as far as it may
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.wait_ready)
    assert await eventually(store, b"back") < LONG_S
    batch = await asyncio.wait_for(anext(watch), LONG_S)  # the same watch, from where it was
    assert batch.revision == start.revision + 1
    assert await store.keep_lease(lease.lease_id) == lease


async def test_an_address_where_nothing_listens(make_store: MakeStore) -> None:
    store = make_store(f"{LOCALHOST}:{free_ports(1)[0]}", timeout_s=2 * LONG_S)
    begin = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="no endpoint of etcd can be reached"):
        await store.get(b"k")
    with pytest.raises(StoreUnavailableError):
        await anext(store.watch(b""))
    assert time.monotonic() - begin < LONG_S


async def test_something_that_is_not_etcd(make_store: MakeStore) -> None:
    """It accepts connections and says nothing."""
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    async with await asyncio.start_server(accept, LOCALHOST, 0) as server:
        store = make_store(f"{LOCALHOST}:{server.sockets[0].getsockname()[1]}", timeout_s=0.5)
        begin = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.transact([], [Put(b"k", b"")])
        assert time.monotonic() - begin < LONG_S
        await store.aclose()
        for connection in connections:
            connection.close()
            await connection.wait_closed()
