"""Leases: granted and ended by calls, kept over one stream for all.

etcd itself never renews a lease whose time is up: while it is about to end it, it lets the renewal wait, and
then says that it is gone. There is one exception, an election: the new leader gives every lease its whole
time anew. A lease whose time had passed by then, as far as this store knows, is not renewed but ended here.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import Lease
from kvplane.store.clock import Clock
from kvplane.store.errors import InvalidStoreRequestError, LeaseNotFoundError, StoreClosedError
from kvplane.store.etcd.client import EtcdClient, StreamBrokenError, refused, unavailable
from kvplane.store.etcd.endpoints import Endpoint
from kvplane.store.etcd.methods import (
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    LEASE_TIME_TO_LIVE,
)
from kvplane.store.limits import lease_ttl

MAX_TTL_S = 9_000_000_000
"""etcd refuses longer ones."""
_FORGET_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Note:
    """When a lease was last granted or kept from here: it may have ended at `deadline`; the term then."""

    deadline: float
    term: int


class Leases:
    """Grants, keeps and ends leases."""

    def __init__(self, client: EtcdClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._notes: dict[int, _Note] = {}
        self._forget_at = 64
        self._stream: _KeepAliveStream | None = None

    async def grant(self, ttl_s: float) -> Lease:
        """See Store.grant_lease."""
        ttl = math.ceil(lease_ttl(ttl_s))
        if ttl > MAX_TTL_S:
            raise InvalidStoreRequestError(f"a lease's ttl is at most {MAX_TTL_S} s, not {ttl_s}")
        since = self._clock.monotonic()
        try:
            answer = await self._client.repeated(LEASE_GRANT, pb.LeaseGrantRequest(ttl=ttl))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise await self._client.exhausted(error) from error
            raise unavailable(error) from error
        self._note(answer.id, since + answer.ttl, answer.header.raft_term)
        return Lease(answer.id, float(answer.ttl))

    async def keep(self, lease_id: int) -> Lease:
        """See Store.keep_lease."""
        note = self._notes.get(lease_id)
        in_time = note is None or self._clock.monotonic() < note.deadline
        if note is not None and not in_time and await self._term(lease_id) != note.term:
            # A new leader gave it its whole time anew, but it had ended before.
            await self.revoke(lease_id)
            raise LeaseNotFoundError(lease_id)
        since = self._clock.monotonic()
        # etcd answers for an ended lease only when it is gone for good, and until then for no other of the
        # same stream: so what may have ended goes by itself.
        keep = self._keep_in_common if in_time else self._keep_alone
        try:
            answer = await self._client.trying(lambda endpoint, left_s: keep(endpoint, left_s, lease_id))
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from error
        if answer.ttl <= 0:
            self._notes.pop(lease_id, None)
            raise LeaseNotFoundError(lease_id)
        self._note(lease_id, since + answer.ttl, answer.header.raft_term)
        return Lease(lease_id, float(answer.ttl))

    async def revoke(self, lease_id: int) -> None:
        """See Store.revoke_lease."""
        try:
            await self._client.repeated(LEASE_REVOKE, pb.LeaseRevokeRequest(id=lease_id))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise unavailable(error) from error
        self._notes.pop(lease_id, None)

    async def missing(self, lease_ids: list[int]) -> int:
        """Return which of the leases does not exist, the first if etcd cannot tell.

        Raises StoreUnavailableError.
        """
        for lease_id in lease_ids if len(lease_ids) > 1 else ():
            answer = await self._time_to_live(lease_id)
            if answer.ttl <= 0:
                return lease_id
        return lease_ids[0]

    async def _term(self, lease_id: int) -> int:
        """Return etcd's term now. Raises LeaseNotFoundError if the lease is gone."""
        answer = await self._time_to_live(lease_id)
        if answer.ttl < 0:
            self._notes.pop(lease_id, None)
            raise LeaseNotFoundError(lease_id)
        return answer.header.raft_term

    async def _time_to_live(self, lease_id: int) -> pb.LeaseTimeToLiveResponse:
        try:
            return await self._client.repeated(LEASE_TIME_TO_LIVE, pb.LeaseTimeToLiveRequest(id=lease_id))
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from error

    async def _keep_in_common(
        self, endpoint: Endpoint, left_s: float, lease_id: int
    ) -> pb.LeaseKeepAliveResponse:
        stream = self._stream
        if stream is None or stream.broken or stream.endpoint is not endpoint:
            if stream is not None:
                stream.retire()
            stream = self._stream = _KeepAliveStream(self._client, endpoint)
        async with asyncio.timeout(left_s):
            return await stream.keep(lease_id)

    async def _keep_alone(
        self, endpoint: Endpoint, left_s: float, lease_id: int
    ) -> pb.LeaseKeepAliveResponse:
        stream = _KeepAliveStream(self._client, endpoint)
        try:
            async with asyncio.timeout(left_s):
                return await stream.keep(lease_id)
        finally:
            stream.retire()

    def _note(self, lease_id: int, deadline: float, term: int) -> None:
        self._notes[lease_id] = _Note(deadline, term)
        if len(self._notes) > self._forget_at:
            oldest = self._clock.monotonic() - _FORGET_AFTER_S
            self._notes = {known: note for known, note in self._notes.items() if note.deadline > oldest}
            self._forget_at = 2 * len(self._notes) + 64


class _KeepAliveStream:
    """A stream on which leases are kept, and who waits for which answer. Ends with the client."""

    def __init__(self, client: EtcdClient, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.broken = False
        self._client = client
        self._retired = False
        self._waiting: dict[int, deque[asyncio.Future[pb.LeaseKeepAliveResponse]]] = {}
        self._requests: asyncio.Queue[pb.LeaseKeepAliveRequest | None] = asyncio.Queue()
        self._task = client.start(self._run())

    async def keep(self, lease_id: int) -> pb.LeaseKeepAliveResponse:
        """Keep a lease and return the answer. Raises StreamBrokenError, StoreClosedError."""
        answer: asyncio.Future[pb.LeaseKeepAliveResponse] = asyncio.get_running_loop().create_future()
        # Answers come in the order of the requests; who was cancelled keeps the place.
        self._waiting.setdefault(lease_id, deque()).append(answer)
        self._requests.put_nowait(pb.LeaseKeepAliveRequest(id=lease_id))
        return await answer

    def retire(self) -> None:
        """End it once nobody waits any more."""
        self._retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._retired and not any(
            not answer.done() for queue in self._waiting.values() for answer in queue
        ):
            self._task.cancel()

    async def _run(self) -> None:
        token = ""
        try:
            token = await self._client.token(self.endpoint, self._client.timeout_s)
            call = self.endpoint.stream(LEASE_KEEP_ALIVE)(
                self._sent(), metadata=(("hasleader", "true"), *((("token", token),) if token else ()))
            )
            forget = self._client.opened(self.endpoint, call.cancel)
            try:
                async for answer in call:
                    self._tell(answer)
            finally:
                forget()
                call.cancel()
                self._requests.put_nowait(
                    None
                )  # else the call's own task waits for more until it is collected
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._client.forget_token(token)
            elif refused(error):
                self._fail(error)
        finally:
            self.broken = True
            closed = self._client.closed
            self._fail(StoreClosedError("the store is closed") if closed else StreamBrokenError())

    async def _sent(self) -> AsyncIterator[pb.LeaseKeepAliveRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def _tell(self, answer: pb.LeaseKeepAliveResponse) -> None:
        waiting = self._waiting.get(answer.id)
        if waiting:
            first = waiting.popleft()
            if not first.done():
                first.set_result(answer)
            if not waiting:
                del self._waiting[answer.id]
        self._end_if_idle()

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
        self._waiting.clear()
