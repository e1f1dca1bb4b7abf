"""Group commit on a real etcd: what etcd does with nested transactions, and what the store makes of it."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import MAX_KEY_BYTES, MAX_TXN_OPERATIONS, Compare, Delete, Put, Transaction
from kvplane.store.errors import LeaseNotFoundError
from kvplane.store.etcd import EtcdStore
from kvplane.store.etcd.convert import transaction
from kvplane.store.etcd.methods import TXN
from kvplane.store.etcd.settings import MAX_PREFIX_BYTES
from tests.store.etcd.conftest import MakeStore

MISSING = 7_777_777_777


def together(*members: pb.TxnRequest) -> pb.TxnRequest:
    request = pb.TxnRequest()
    for member in members:
        request.success.add().request_txn.CopyFrom(member)
    return request


async def test_etcd_compares_all_before_it_writes_any(store: EtcdStore) -> None:
    """Why conflicting transactions are kept apart: sent together, both of these win."""
    prefix = store._prefix
    both = together(
        transaction(prefix, [Compare(b"k", 0)], [Put(b"k", b"one")]),
        transaction(prefix, [Compare(b"k", 0)], [Put(b"other", b"two")]),
    )
    answer = await store._client.once(TXN, both)
    assert [step.response_txn.succeeded for step in answer.responses] == [True, True]
    assert await store.get(b"k")
    assert await store.get(b"other")


async def test_the_store_keeps_them_apart(store: EtcdStore) -> None:
    for number in range(20):
        key = b"%d" % number
        one, two, three = await asyncio.gather(
            store.transact([Compare(key, 0)], [Put(key, b"one")]),
            store.transact([Compare(key, 0)], [Put(b"two/" + key, b"")]),
            store.transact([Compare(key, 0)], [Put(key, b"three")]),
        )
        winner, loser = (one, three) if one.succeeded else (three, one)
        assert (winner.succeeded, loser.succeeded) == (True, False)
        found = await store.get(key)
        assert loser.found == (found,)
        # Batches under way at the same time come in any order, but they are not one.
        assert two.revision < winner.revision if two.succeeded else two.found == (found,)


@pytest.mark.parametrize(("members", "ops"), [(2, 126), (64, 64), (124, 4), (127, 1)])
async def test_etcd_takes_the_largest_batches_and_no_larger_ones(
    store: EtcdStore, members: int, ops: int
) -> None:
    """128 less the operations of the level above: of each level, for compares and operations alike."""

    def batch(ops: int) -> pb.TxnRequest:
        keys = [[b"%d/%d" % (member, op) for op in range(ops)] for member in range(members)]
        return together(
            *[
                transaction(store._prefix, [Compare(k, 0) for k in some], [Put(k, b"") for k in some])
                for some in keys
            ]
        )

    answer = await store._client.once(TXN, batch(ops))
    assert all(step.response_txn.succeeded for step in answer.responses)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await store._client.once(TXN, batch(ops + 1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_many_at_once_take_few_batches_and_share_revisions(store: EtcdStore) -> None:
    await store.get(b"k")  # connected
    done = await asyncio.gather(
        *[store.transact([Compare(b"%d" % n, 0)], [Put(b"%d" % n, b"%d" % n)]) for n in range(100)]
    )
    assert all(each.succeeded for each in done)
    assert store.counters.batches == 1
    assert len({each.revision for each in done}) == 1
    page = await store.scan(b"")
    assert {item.mod_revision for item in page.items} == {done[0].revision}
    assert {item.key: item.value for item in page.items} == {b"%d" % n: b"%d" % n for n in range(100)}
    batch = await anext(store.watch(b"", from_revision=done[0].revision))
    assert len(batch.events) == 100


async def test_each_of_a_batch_succeeds_or_fails_by_its_own_compares(store: EtcdStore) -> None:
    taken = [await store.transact([], [Put(b"taken/%d" % n, b"%d" % n)]) for n in range(3)]
    right = [store.transact([Compare(b"free/%d" % n, 0)], [Put(b"free/%d" % n, b"")]) for n in range(3)]
    wrong = [
        store.transact([Compare(b"absent", 0), Compare(b"taken/%d" % n, 0)], [Put(b"w/%d" % n, b"")])
        for n in range(3)
    ]
    batches = store.counters.batches
    done = await asyncio.gather(*right, *wrong)
    assert store.counters.batches - batches == 1
    assert [each.succeeded for each in done] == [True] * 3 + [False] * 3
    for number, failed in enumerate(done[3:]):
        absent, found = failed.found
        assert absent is None
        assert found is not None
        assert (found.key, found.value, found.mod_revision) == (
            b"taken/%d" % number,
            b"%d" % number,
            taken[number].revision,
        )
        assert await store.get(b"w/%d" % number) is None


async def test_a_missing_lease_is_its_owners_problem_only(store: EtcdStore) -> None:
    lease = await store.grant_lease(60)
    done = await asyncio.gather(
        *[store.transact([], [Put(b"%d" % n, b"", lease.lease_id)]) for n in range(5)],
        store.transact([], [Put(b"a", b"", lease.lease_id), Put(b"b", b"", MISSING)]),
        return_exceptions=True,
    )
    assert all(isinstance(each, Transaction) and each.succeeded for each in done[:5])
    assert isinstance(done[5], LeaseNotFoundError)
    assert done[5].lease_id == MISSING
    assert [item.key for item in (await store.scan(b"")).items] == [b"%d" % n for n in range(5)]
    await store.revoke_lease(lease.lease_id)


async def test_cancelled_callers_halve_nothing(store: EtcdStore) -> None:
    await store.get(b"k")
    for turns in range(8):
        prefix = b"%d/" % turns
        tasks = [
            asyncio.ensure_future(
                store.transact([], [Put(prefix + b"%d/a" % n, b""), Put(prefix + b"%d/b" % n, b"")])
            )
            for n in range(6)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, Transaction) for each in done[1::2])
        await store.transact([], [Put(b"barrier", b"")])
        written = [item.key for item in (await store.scan(prefix)).items]
        for n in range(6):
            pair = [key for key in written if key.startswith(prefix + b"%d/" % n)]
            assert len(pair) == 2 if n % 2 else len(pair) in (0, 2)


async def test_a_transaction_too_large_to_read_its_keys_finds_them_nevertheless(
    make_store: MakeStore, store: EtcdStore
) -> None:
    """The largest compares beside the largest values: only without the reads etcd would take them."""
    large = make_store(
        store._client._settings.endpoints[0], prefix=b"/" + b"p" * (MAX_PREFIX_BYTES - 2) + b"/"
    )
    keys = [b"%03d" % n + b"k" * (MAX_KEY_BYTES - 3) for n in range(MAX_TXN_OPERATIONS)]
    first = await large.transact([], [Put(keys[7], b"there")])
    size = 1_500_000 - MAX_TXN_OPERATIONS * MAX_KEY_BYTES - 1
    compares = [Compare(key, 0) for key in keys]
    tried = await large.transact(compares, [Put(b"v", bytes(size))])
    assert not tried.succeeded
    assert tried.revision >= first.revision
    assert [n for n, found in enumerate(tried.found) if found is not None] == [7]
    compares[7] = Compare(keys[7], first.revision)
    assert (await large.transact(compares, [Put(b"v", bytes(size))])).succeeded
    await large.transact([], [Delete(keys[7]), Delete(b"v")])
