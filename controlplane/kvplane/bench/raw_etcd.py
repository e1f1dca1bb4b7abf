"""etcd without a store in between: one bare call per transaction, made before it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc

from kvplane.bench.rig import DEADLINE_S, BenchError
from kvplane.bench.stores import LEASE_S, Act, claimable
from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import Compare, Operation, Transaction
from kvplane.store.etcd import EtcdSettings
from kvplane.store.etcd.convert import range_end, transaction
from kvplane.store.etcd.methods import AUTHENTICATE, LEASE_GRANT, LEASE_REVOKE, STATUS, TXN

_DELETE_RANGE = "/etcdserverpb.KV/DeleteRange"


class RawEtcd:
    """Calls of one endpoint, below the settings' prefix."""

    def __init__(self, settings: EtcdSettings, channel: grpc.aio.Channel) -> None:
        self._settings = settings
        self._channel = channel
        self._metadata: tuple[tuple[str, str], ...] | None = None
        self._txn: Any = channel.unary_unary(TXN.path)
        self._lease_id = 0

    @classmethod
    @asynccontextmanager
    async def connected(cls, settings: EtcdSettings) -> AsyncIterator[Self]:
        """Connect to the first endpoint. Raises BenchError."""
        async with _channel(settings) as channel:
            raw = cls(settings, channel)
            try:
                if settings.user:
                    request = pb.AuthenticateRequest(name=settings.user, password=settings.password)
                    answer = await raw._call(AUTHENTICATE.path, request)
                    token = pb.AuthenticateResponse.FromString(answer).token
                    raw._metadata = (("token", token),)
                else:
                    await raw._call(STATUS.path, pb.StatusRequest())
            except grpc.aio.AioRpcError as error:
                raise BenchError(f"etcd at {settings.endpoints[0]}: {error.details()}") from error
            yield raw

    async def ready(self, count: int) -> Act:
        """Write what `count` claims need; returns the claim, one transaction each."""
        answer = await self._call(LEASE_GRANT.path, pb.LeaseGrantRequest(ttl=LEASE_S))
        self._lease_id = pb.LeaseGrantResponse.FromString(answer).id
        made = await claimable(self._transact, b"raw/%d/" % self._lease_id, count, self._lease_id)
        requests = [self._made(*one.claim()) for one in made]

        async def act(number: int) -> None:
            answer = await self._txn(requests[number], timeout=DEADLINE_S, metadata=self._metadata)
            if not pb.TxnResponse.FromString(answer).succeeded:
                raise BenchError("a raw transaction's compares did not hold")

        return act

    async def undo(self) -> None:
        """Remove everything again."""
        await self._call(LEASE_REVOKE.path, pb.LeaseRevokeRequest(id=self._lease_id))

    async def remove_all(self) -> None:
        """Remove all keys below the prefix."""
        prefix = self._settings.prefix
        request = pb.DeleteRangeRequest(key=prefix, range_end=range_end(prefix))
        await self._call(_DELETE_RANGE, request)

    def _made(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bytes:
        return transaction(self._settings.prefix, compares, operations, find=False).SerializeToString()

    async def _transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        request = self._made(compares, operations)
        answer = await self._txn(request, timeout=DEADLINE_S, metadata=self._metadata)
        done = pb.TxnResponse.FromString(answer)
        return Transaction(done.succeeded, done.header.revision)

    async def _call(self, path: str, request: Any) -> bytes:
        call: Any = self._channel.unary_unary(path)
        answer: bytes = await call(request.SerializeToString(), timeout=DEADLINE_S, metadata=self._metadata)
        return answer


def _channel(settings: EtcdSettings) -> grpc.aio.Channel:
    target, tls = settings.endpoints[0], settings.tls
    if tls is None:
        return grpc.aio.insecure_channel(target)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    options = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else None
    return grpc.aio.secure_channel(target, credentials, options=options)
