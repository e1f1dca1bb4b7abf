"""Group commit: transactions that come while others are under way go to etcd together, as one.

etcd writes each transaction of its own through raft and to disk; what goes together shares that. Together
means nested transactions, each with its own compares, inside one that compares nothing.

etcd evaluates all compares of such a tree before it writes anything. A transaction that writes a key which
another one of the same batch compares would therefore not be seen by it, and both would win; and a key that
two of them write etcd refuses. So two of which one writes what the other compares or writes never go
together.

etcd overlooks puts of nested transactions when it compares the size of its database with its quota (3.4 and
3.5). So a batch that puts anything has, where it will never be done, a put that etcd does see.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc.aio

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.errors import StoreClosedError, StoreError, StoreUnavailableError
from kvplane.store.etcd.client import refused

IN_FLIGHT = 2
MAX_BATCH_BYTES = 1_000_000
"""etcd refuses requests above 1.5 MiB by default."""
_ETCD_MAX_OPS = 128
_MAX_CANDIDATES = 512  # looked at for one batch
_FRAMING_BYTES = 16  # per nested transaction

Send = Callable[[pb.TxnRequest], Awaitable[pb.TxnResponse]]


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction's answer, and the revision of the store after it."""

    answer: pb.TxnResponse
    revision: int


@dataclass(slots=True)
class CommitCounters:
    """What was sent: `transactions` by the store's callers, in so many `batches`; `alone` after a refusal."""

    transactions: int = 0
    batches: int = 0
    alone: int = 0


@dataclass(slots=True, eq=False)
class _Member:
    """A transaction that waits or is under way."""

    request: pb.TxnRequest
    answer: asyncio.Future[Committed]
    reads: frozenset[bytes]
    writes: frozenset[bytes]
    ops: int
    size: int


@dataclass(slots=True)
class _Batch:
    """Members that may go together."""

    max_members: int
    members: list[_Member] = field(default_factory=list)
    reads: set[bytes] = field(default_factory=set)
    writes: set[bytes] = field(default_factory=set)
    ops: int = 0
    size: int = 0

    def take(self, member: _Member) -> bool:
        """Add a member, if it is independent of the others and keeps the whole within etcd's limits."""
        ops, size = max(self.ops, member.ops), self.size + member.size
        # etcd's limit counts down with the depth: what a level has less, the next has at most. A transaction
        # that goes alone is not nested.
        if self.members and (
            len(self.members) >= self.max_members
            or len(self.members) + 1 + ops > _ETCD_MAX_OPS
            or size > MAX_BATCH_BYTES
            or not member.writes.isdisjoint(self.reads)
            or not member.writes.isdisjoint(self.writes)
            or not member.reads.isdisjoint(self.writes)
        ):
            return False
        self.members.append(member)
        self.reads |= member.reads
        self.writes |= member.writes
        self.ops, self.size = ops, size
        return True


class GroupCommit:
    """Sends transactions, at most `in_flight` batches at a time; the first of an idle store at once."""

    def __init__(self, send: Send, *, timeout_s: float, in_flight: int = IN_FLIGHT) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._max_members = _ETCD_MAX_OPS
        self._waiting: dict[_Member, None] = {}  # in the order of arrival
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._closed = False
        self.counters = CommitCounters()

    async def commit(self, request: pb.TxnRequest) -> Committed:
        """Commit one transaction, in a batch or alone.

        Raises StoreUnavailableError when there is no answer within the timeout: if it had been sent, the
        outcome is unknown. Raises grpc.aio.AioRpcError where etcd refused this very transaction, which then
        did nothing. Cancelling it concerns no other: what was not sent is not, what was sent goes on.
        """
        if self._closed:
            raise StoreClosedError("the store is closed")
        member = _Member(
            request,
            asyncio.get_running_loop().create_future(),
            _read_keys(request),
            frozenset([_written(step) for step in request.success if not step.HasField("request_range")]),
            max(len(request.compare), len(request.success), len(request.failure)),
            request.ByteSize() + _FRAMING_BYTES,
        )
        self.counters.transactions += 1
        self._waiting[member] = None
        self._wake()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await member.answer
        except TimeoutError:
            raise StoreUnavailableError("etcd did not answer a transaction in time") from None
        finally:
            self._waiting.pop(member, None)

    async def aclose(self) -> None:
        """End all: who waits gets StoreClosedError. Idempotent."""
        self._closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _fail([*self._waiting], lambda: StoreClosedError("the store is closed"))

    def _wake(self) -> None:
        """See to it that batches are sent when all who can come in this turn of the loop have come."""
        if self._waiting and not self._scheduled and len(self._tasks) < self._in_flight and not self._closed:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start, context=contextvars.Context())

    def _start(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._tasks) < self._in_flight and not self._closed:
            batch = self._next_batch()
            task = asyncio.get_running_loop().create_task(self._run(batch), name="kvplane-etcd-commit")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()

    def _next_batch(self) -> list[_Member]:
        """Take what goes together out of those that wait. The first always goes, so none waits for ever."""
        batch = _Batch(self._max_members)
        for member in itertools.islice(self._waiting, _MAX_CANDIDATES):
            if not member.answer.done():
                batch.take(member)
        for member in batch.members:
            del self._waiting[member]
        return batch.members

    async def _run(self, members: list[_Member]) -> None:
        """Commit a batch and tell its members. Raises nothing but CancelledError."""
        if not members:
            return
        self.counters.batches += 1
        try:
            await (self._send_alone(members[0]) if len(members) == 1 else self._send_together(members))
        except asyncio.CancelledError:
            _fail(members, lambda: StoreClosedError("the store is closed"))
            raise
        except StoreClosedError as error:
            text = str(error)
            _fail(members, lambda: StoreClosedError(text))
        except Exception as error:
            # Whatever it was: nobody must be left waiting.
            text = str(error)
            _fail(members, lambda: StoreUnavailableError(text))

    async def _send_together(self, members: list[_Member]) -> None:
        request = pb.TxnRequest()
        for member in members:
            request.success.add().request_txn.CopyFrom(member.request)
        puts = (step.request_put.key for member in members for step in member.request.success)
        put = next(filter(None, puts), None)
        if put is not None:
            request.failure.add().request_put.key = put
        try:
            answer = await self._send(request)
        except grpc.aio.AioRpcError as error:
            if not refused(error):
                raise
            # Refused for the sake of one, and nothing was done: so each may be sent again by itself.
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._max_members = max(1, len(members) // 2)  # a server with lower limits than etcd's own
            self.counters.alone += len(members)
            await asyncio.gather(*[self._send_alone(member) for member in members])
            return
        if len(members) == self._max_members:
            self._max_members = min(_ETCD_MAX_OPS, 2 * self._max_members)
        for member, step in zip(members, answer.responses, strict=True):
            _tell(member, Committed(step.response_txn, answer.header.revision))

    async def _send_alone(self, member: _Member) -> None:
        try:
            answer = await self._send(member.request)
        except (StoreError, grpc.aio.AioRpcError) as error:
            failure: Exception = error
            _fail([member], lambda: failure)
        else:
            _tell(member, Committed(answer, answer.header.revision))


def _read_keys(request: pb.TxnRequest) -> frozenset[bytes]:
    reads = [step.request_range.key for step in request.success if step.HasField("request_range")]
    return frozenset([*[compare.key for compare in request.compare], *reads])


def _written(step: pb.RequestOp) -> bytes:
    key: bytes = step.request_put.key if step.HasField("request_put") else step.request_delete_range.key
    return key


def _tell(member: _Member, committed: Committed) -> None:
    if not member.answer.done():
        member.answer.set_result(committed)


def _fail(members: list[_Member], error: Callable[[], Exception]) -> None:
    for member in members:
        if not member.answer.done():
            member.answer.set_exception(error())
            member.answer.exception()  # seen, should the caller be cancelled at this moment
