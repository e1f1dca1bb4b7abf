"""Watches: one stream each, read as its reader asks for it, begun again elsewhere when it breaks.

The network's flow control is the buffer. A step that is cancelled loses nothing: what it waited for is
handed to the next.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeAlias

import grpc
import grpc.aio

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import EventBatch
from kvplane.store.errors import CompactedError, FutureRevisionError, StoreClosedError
from kvplane.store.etcd.client import EtcdClient, StreamBrokenError, unavailable
from kvplane.store.etcd.convert import event, range_end
from kvplane.store.etcd.endpoints import Endpoint
from kvplane.store.etcd.methods import RANGE, WATCH
from kvplane.store.limits import check_watch

_WatchCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]"


class EtcdWatch(AsyncIterator[EventBatch]):
    """A position in etcd's history, and the stream on which it moves on."""

    def __init__(self, client: EtcdClient, store_prefix: bytes, prefix: bytes, from_revision: int) -> None:
        self._client = client
        self._skip = len(store_prefix)
        self._asked_prefix = prefix
        self._prefix = store_prefix + prefix
        self._next = from_revision
        self._begun = False
        self._ready: deque[EventBatch] = deque()
        self._stream: _Stream | None = None
        self._streams: list[_Stream] = []  # the one to end if this is forgotten
        weakref.finalize(self, _close, self._streams).atexit = False

    async def __anext__(self) -> EventBatch:
        if self._client.closed:
            raise StoreClosedError("the store is closed")
        if not self._begun:
            check_watch(self._asked_prefix, self._next)
            self._begun = True
        while not self._ready:
            stream = self._stream
            if stream is None:
                stream = self._stream = await self._connect()
            try:
                answer = await stream.read()
            except (grpc.aio.AioRpcError, StreamBrokenError):
                self._drop_stream()
                continue
            self._take(answer)
        return self._ready.popleft()

    def _take(self, parts: list[pb.WatchResponse]) -> None:
        """Take note of an answer, given in all its parts."""
        last = parts[-1]
        if last.canceled:
            self._drop_stream()
            if last.compact_revision:
                # What etcd has from there on lacks the removals of that very revision.
                raise CompactedError(last.compact_revision + 1)
            return
        for batch in _batches([change for part in parts for change in part.events], self._skip):
            # The first revision asked for is the one before; see _connect.
            if batch.revision >= self._next:
                self._ready.append(batch)
                self._next = batch.revision + 1
        if not any(part.events for part in parts) and not last.created:
            self._next = max(self._next, last.header.revision + 1)  # nothing to tell up to there

    async def _connect(self) -> _Stream:
        """Begin to watch on an endpoint that works."""
        try:
            return await self._client.trying(self._open)
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from error

    async def _open(self, endpoint: Endpoint, left_s: float) -> _Stream:
        async with asyncio.timeout(left_s):
            read = pb.RangeRequest(key=self._prefix or b"\0", limit=1, keys_only=True)
            current = (await self._client.attempt(endpoint, RANGE, read, left_s)).header.revision
            if self._next > current + 1:
                raise FutureRevisionError(self._next, current)
            self._next = self._next or current + 1
            # From the revision before on: if that is still there, then all of this one is, its removals and
            # what its keys were before. etcd keeps neither of the revision to which it is compacted.
            create = pb.WatchCreateRequest(
                key=self._prefix,
                range_end=range_end(self._prefix),
                start_revision=max(1, self._next - 1),
                progress_notify=True,
                prev_kv=True,
                fragment=True,
            )
            token = await self._client.token(endpoint, left_s)
            stream = _Stream(self._client, endpoint, token, create)
            self._streams[:] = [stream]
            await stream.begun()
        return stream

    def _drop_stream(self) -> None:
        self._stream = None
        _close(self._streams)


class _Stream:
    """An open watch stream. Reads one answer ahead at most, and only when asked."""

    def __init__(
        self, client: EtcdClient, endpoint: Endpoint, token: str, create: pb.WatchCreateRequest
    ) -> None:
        self._client = client
        # Without a leader a member knows nothing new: etcd then ends the stream.
        metadata = (("hasleader", "true"), *((("token", token),) if token else ()))
        self._call = endpoint.stream(WATCH)(metadata=metadata)
        self._forget: Callable[[], None] = client.opened(endpoint, self._call.cancel)
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Task[list[pb.WatchResponse]] | None = client.start(
            _begin(self._call, pb.WatchRequest(create_request=create))
        )

    async def begun(self) -> None:
        """Wait for the beginning. Raises as `read`, and CompactedError."""
        last = (await self.read())[-1]
        if last.canceled and last.compact_revision:
            raise CompactedError(last.compact_revision + 1)
        if last.canceled or not last.created:
            raise StreamBrokenError

    async def read(self) -> list[pb.WatchResponse]:
        """Return the next answer in all its parts. May be cancelled and called again.

        Raises AioRpcError, StreamBrokenError, StoreClosedError.
        """
        if self._reading is None:
            self._reading = self._client.start(_read(self._call))
        await asyncio.wait([self._reading])
        reading, self._reading = self._reading, None
        if reading.cancelled():
            if self._client.closed:
                raise StoreClosedError("the store is closed")
            raise StreamBrokenError
        return reading.result()

    def close(self) -> None:
        """End it. Idempotent."""
        self._forget()
        if not self._loop.is_closed():
            self._call.cancel()


def _close(streams: list[_Stream]) -> None:
    while streams:
        streams.pop().close()


async def _begin(call: _WatchCall, request: pb.WatchRequest) -> list[pb.WatchResponse]:
    try:
        await call.write(request)
    except asyncio.InvalidStateError as error:
        raise StreamBrokenError from error
    return await _read(call)


async def _read(call: _WatchCall) -> list[pb.WatchResponse]:
    """Return an answer in all its parts."""
    parts: list[pb.WatchResponse] = []
    while True:
        part = await call.read()
        if not isinstance(part, pb.WatchResponse):
            raise StreamBrokenError
        parts.append(part)
        if not part.fragment:
            return parts


def _batches(changes: Iterable[pb.Event], skip: int) -> Iterator[EventBatch]:
    for revision, group in groupby(changes, key=lambda change: change.kv.mod_revision):
        yield EventBatch(revision, tuple([event(change, skip) for change in group]))
