"""The store on etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import grpc
import grpc.aio

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import (
    Compare,
    EventBatch,
    KeyValue,
    Lease,
    Operation,
    Page,
    Put,
    Store,
    StoreFacts,
    Transaction,
)
from kvplane.store.clock import Clock
from kvplane.store.errors import LeaseNotFoundError, StoreClosedError
from kvplane.store.etcd import versions
from kvplane.store.etcd.batching import IN_FLIGHT, CommitCounters, Committed, GroupCommit
from kvplane.store.etcd.client import EtcdClient, unavailable
from kvplane.store.etcd.convert import found, key_value, range_end, reads, transaction
from kvplane.store.etcd.leases import Leases
from kvplane.store.etcd.methods import RANGE, STATUS, TXN
from kvplane.store.etcd.settings import EtcdSettings
from kvplane.store.etcd.watch import EtcdWatch
from kvplane.store.limits import check_key, check_scan, check_transaction

_MAX_REQUEST_BYTES = 1_560_000
"""etcd refuses what is larger than 1.5 MiB, by default."""


class EtcdStore(Store):
    """A Store in an etcd cluster (3.4 or later), below one prefix. Connects at the first call.

    Reads are linearizable. Revisions are the cluster's, so they also count what others write there.
    Transactions go in batches (see batching), at most `in_flight` at a time.
    """

    def __init__(self, settings: EtcdSettings, clock: Clock, *, in_flight: int = IN_FLIGHT) -> None:
        self._prefix = settings.prefix
        self._client = EtcdClient(settings, clock)
        self._commits = GroupCommit(self._send, timeout_s=settings.timeout_s, in_flight=in_flight)
        self._leases = Leases(self._client, clock)

    @property
    def counters(self) -> CommitCounters:
        """How many transactions went in how many batches, since the store was made."""
        return self._commits.counters

    async def get(self, key: bytes) -> KeyValue | None:
        """See Store."""
        self._check_open()
        check_key(key)
        answer = await self._range(pb.RangeRequest(key=self._prefix + key))
        return key_value(answer.kvs[0], len(self._prefix)) if answer.kvs else None

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        """See Store."""
        self._check_open()
        check_scan(prefix, after, limit)
        first = self._prefix + (prefix if after < prefix else after + b"\0")
        request = pb.RangeRequest(key=first, range_end=range_end(self._prefix + prefix), limit=limit)
        answer = await self._range(request)
        items = tuple([key_value(item, len(self._prefix)) for item in answer.kvs])
        return Page(items, answer.header.revision, answer.more)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store."""
        self._check_open()
        check_transaction(compares, operations)
        request = transaction(self._prefix, compares, operations)
        finds = request.ByteSize() <= _MAX_REQUEST_BYTES
        if not finds:
            request = transaction(self._prefix, compares, operations, find=False)
        done = await self._commit(request, operations)
        if done.answer.succeeded:
            return Transaction(True, done.revision)
        if not finds:
            done = await self._commit(reads(self._prefix, compares), ())
        return Transaction(False, done.revision, found(done.answer.responses, len(self._prefix)))

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See Store. Whole seconds, rounded up."""
        self._check_open()
        return await self._leases.grant(ttl_s)

    async def keep_lease(self, lease_id: int) -> Lease:
        """See Store. Another store's renewals count as well."""
        self._check_open()
        return await self._leases.keep(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        """See Store."""
        self._check_open()
        await self._leases.revoke(lease_id)

    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        """See Store. After a cancelled step, and after StoreUnavailableError, the next step goes on."""
        return EtcdWatch(self._client, self._prefix, prefix, from_revision)

    async def caution(self) -> str | None:
        """See Store. Goes by the version of one member."""
        return versions.caution((await self._status()).version)

    async def facts(self) -> StoreFacts:
        """See Store. Of one member."""
        status = await self._status()
        trouble = "; ".join(status.errors)
        return StoreFacts(f"etcd {status.version}", status.db_size, status.db_size_quota, trouble)

    async def _status(self) -> pb.StatusResponse:
        self._check_open()
        try:
            return await self._client.repeated(STATUS, pb.StatusRequest())
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from None

    async def aclose(self) -> None:
        """See Store. Calls under way end with StoreClosedError."""
        self._client.close()
        await self._commits.aclose()
        await self._client.aclose()

    def _check_open(self) -> None:
        if self._client.closed:
            raise StoreClosedError("the store is closed")

    async def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        try:
            return await self._client.repeated(RANGE, request)
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from error

    async def _send(self, request: pb.TxnRequest) -> pb.TxnResponse:
        return await self._client.once(TXN, request)

    async def _commit(self, request: pb.TxnRequest, operations: Sequence[Operation]) -> Committed:
        try:
            return await self._commits.commit(request)
        except grpc.aio.AioRpcError as error:
            await self._raise_refusal(error, operations)

    async def _raise_refusal(self, error: grpc.aio.AioRpcError, operations: Sequence[Operation]) -> NoReturn:
        """Raise what etcd's refusal of a transaction means."""
        leases = [o.lease_id for o in operations if isinstance(o, Put) and o.lease_id]
        if error.code() is grpc.StatusCode.NOT_FOUND and leases:
            raise LeaseNotFoundError(await self._leases.missing([*dict.fromkeys(leases)])) from error
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise await self._client.exhausted(error) from error
        raise unavailable(error) from error
