"""The etcd store without group commit, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.store.base import Compare, Operation, Transaction
from kvplane.store.etcd import EtcdStore
from kvplane.store.etcd.convert import found, transaction


class UngroupedEtcdStore(EtcdStore):
    """Sends each transaction to etcd by itself, at once; in all else an EtcdStore."""

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store. Raises grpc.aio.AioRpcError where etcd refuses: good enough for a bench."""
        answer = await self._send(transaction(self._prefix, compares, operations))
        if answer.succeeded:
            return Transaction(True, answer.header.revision)
        seen = found(answer.responses[: len(compares)], len(self._prefix))
        return Transaction(False, answer.header.revision, seen)
