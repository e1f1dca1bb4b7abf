"""Calls to etcd: deadlines, failover, tokens. Knows what a call is, and nothing of what it says.

Errors of etcd are told apart by their gRPC codes only.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc import StatusCode

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.clock import Clock
from kvplane.store.errors import StoreClosedError, StoreFullError, StoreUnavailableError
from kvplane.store.etcd.endpoints import Cancel, Endpoint, Endpoints, look_at_result
from kvplane.store.etcd.methods import ALARM, AUTHENTICATE, RANGE, A, Method, Q
from kvplane.store.etcd.password import read_password
from kvplane.store.etcd.settings import EtcdSettings
from kvplane.store.files import FileError

_NO_SPACE = 1  # alarm
_CALLS_END_S = 0.02
_LAST_ATTEMPT_S = 0.3  # with less time left than twice this, an attempt gets all of it
_PAUSES_S = (0.0, 0.05, 0.1, 0.2)  # between attempts
_REFUSALS = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.OUT_OF_RANGE,
        StatusCode.PERMISSION_DENIED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.UNIMPLEMENTED,
    }
)

Metadata = tuple[tuple[str, str], ...]
R = TypeVar("R")


def refused(error: grpc.aio.AioRpcError) -> bool:
    """Whether etcd declined: it did nothing, and another member would say the same."""
    return error.code() in _REFUSALS


def unavailable(error: grpc.aio.AioRpcError) -> StoreUnavailableError:
    """Return the store's error for one of a call; etcd's own words are for people only."""
    return StoreUnavailableError(f"etcd: {error.code().name}: {error.details()}")


class StreamBrokenError(Exception):
    """A stream ended that should not have; try elsewhere."""


class EtcdClient:
    """Calls methods of one etcd cluster. Nothing is connected before the first call.

    All calls raise StoreUnavailableError or, after `aclose`, also while they wait, StoreClosedError; and
    grpc.aio.AioRpcError where etcd refused (see `refused`).
    """

    def __init__(self, settings: EtcdSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._endpoints = Endpoints(settings, clock, self._probe)
        self._calls: set[Cancel] = set()
        self._closed = False
        self._token = ""
        self._password = settings.password
        self._authenticating: asyncio.Task[None] | None = None
        self._asking_why: asyncio.Task[bool] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def timeout_s(self) -> float:
        """The deadline of a call."""
        return self._settings.timeout_s

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._closed

    async def once(self, method: Method[Q, A], request: Q) -> A:
        """Call a method once, on a connected endpoint: for what must not be done twice.

        On StoreUnavailableError it may have been done. It is sent again in one case: etcd did not accept
        the token, and so has done nothing.
        """
        until = self._clock.monotonic() + self.timeout_s
        endpoint = await self._ready(until)
        try:
            return await self.attempt(endpoint, method, request, until - self._clock.monotonic())
        except grpc.aio.AioRpcError as error:
            if refused(error):
                raise
            self._endpoints.leave(endpoint)
            raise unavailable(error) from error

    async def repeated(self, method: Method[Q, A], request: Q) -> A:
        """Call a method that may be done twice, on one endpoint after another until the deadline."""
        return await self.trying(lambda endpoint, left_s: self.attempt(endpoint, method, request, left_s))

    async def trying(self, attempt: Callable[[Endpoint, float], Awaitable[R]]) -> R:
        """Make attempts on connected endpoints until one succeeds, is refused, or the deadline has passed.

        An attempt is given the endpoint and its share of the time left, in seconds. It fails with an
        AioRpcError, StreamBrokenError or TimeoutError.
        """
        until = self._clock.monotonic() + self.timeout_s
        attempts = 0
        while True:
            endpoint = await self._ready(until)
            left_s = until - self._clock.monotonic()
            share_s = left_s / 2 if self._endpoints.several and left_s > 2 * _LAST_ATTEMPT_S else left_s
            try:
                return await attempt(endpoint, max(0.001, share_s))
            except grpc.aio.AioRpcError as error:
                if refused(error):
                    raise
                failure = unavailable(error)
                failure.__cause__ = error
            except (StreamBrokenError, TimeoutError) as error:
                failure = StoreUnavailableError("etcd did not answer in time")
                failure.__cause__ = error
            self._endpoints.leave(endpoint)
            pause_s = _PAUSES_S[min(attempts, len(_PAUSES_S) - 1)]
            attempts += 1
            if self._clock.monotonic() + pause_s >= until:
                raise failure
            await self._clock.sleep(pause_s)

    async def attempt(self, endpoint: Endpoint, method: Method[Q, A], request: Q, timeout_s: float) -> A:
        """Call a method of one endpoint. Raises grpc.aio.AioRpcError, whatever the reason."""
        until = self._clock.monotonic() + timeout_s
        token = await self.token(endpoint, timeout_s)
        try:
            return await self._call(endpoint, method, request, timeout_s, _metadata(token))
        except grpc.aio.AioRpcError as error:
            if not token or error.code() not in (StatusCode.UNAUTHENTICATED, StatusCode.INVALID_ARGUMENT):
                raise
            self.forget_token(token)
        left_s = max(0.001, until - self._clock.monotonic())
        token = await self.token(endpoint, left_s)
        return await self._call(endpoint, method, request, left_s, _metadata(token))

    async def token(self, endpoint: Endpoint, timeout_s: float) -> str:
        """Return a token for the store's user, "" without a user. Raises as `attempt`."""
        if not self._settings.user:
            return ""
        if not self._token:
            task = self._authenticating
            if task is None or task.done():
                task = self._authenticating = self.start(self._authenticate(endpoint, timeout_s))
            await self._shared(task)
        return self._token

    def forget_token(self, token: str) -> None:
        """Have the next call get another token, if `token` is the one in use."""
        if token == self._token:
            self._token = ""

    def opened(self, endpoint: Endpoint, cancel: Cancel) -> Callable[[], None]:
        """Have a stream ended when the store is closed or the endpoint is left. Returns how to undo that."""
        self._calls.add(cancel)
        endpoint.streams.add(cancel)

        def forget() -> None:
            self._calls.discard(cancel)
            endpoint.streams.discard(cancel)

        return forget

    async def exhausted(self, error: grpc.aio.AioRpcError) -> StoreFullError | StoreUnavailableError:
        """Return what RESOURCE_EXHAUSTED means: no space left, or something that will pass."""
        task = self._asking_why
        if task is None or task.done():
            task = self._asking_why = self.start(self._out_of_space())
        if await self._shared(task):
            return StoreFullError("etcd's database is full; see etcd's quota-backend-bytes and defragment")
        return unavailable(error)

    def close(self) -> None:
        """Refuse further calls; `aclose` ends those under way. Idempotent."""
        self._closed = True

    async def aclose(self) -> None:
        """End all calls and connections. Idempotent."""
        self._closed = True
        calls, tasks = [*self._calls], [*self._tasks]
        for cancel in calls:
            cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if calls:
            # gRPC tells the loop of each cancelled call's end a little later, also if nobody asks.
            await self._clock.sleep(_CALLS_END_S)
        await self._endpoints.aclose()

    async def _call(
        self,
        endpoint: Endpoint,
        method: Method[Q, A],
        request: Q,
        timeout_s: float,
        metadata: Metadata | None,
    ) -> A:
        if self._closed:
            raise StoreClosedError("the store is closed")
        call = endpoint.unary(method)(request, timeout=timeout_s, metadata=metadata)
        self._calls.add(call.cancel)
        try:
            return await call
        except asyncio.CancelledError:
            self.raise_if_closed()
            raise
        finally:
            self._calls.discard(call.cancel)

    async def _ready(self, until: float) -> Endpoint:
        if self._closed:
            raise StoreClosedError("the store is closed")
        return await self._endpoints.ready(until)

    def raise_if_closed(self) -> None:
        """Raise StoreClosedError if that is why something of ours was cancelled, not the calling task."""
        task = asyncio.current_task()
        if self._closed and not (task is not None and task.cancelling()):
            raise StoreClosedError("the store is closed") from None

    async def _probe(self, endpoint: Endpoint, timeout_s: float) -> None:
        request = pb.RangeRequest(key=self._settings.prefix, limit=1, keys_only=True)
        try:
            await self._call(endpoint, RANGE, request, timeout_s, _metadata(self._token))
        except grpc.aio.AioRpcError as error:
            if not refused(error):  # a token that etcd no longer knows is another matter
                raise

    async def _authenticate(self, endpoint: Endpoint, timeout_s: float) -> None:
        settings, problem = self._settings, ""
        if settings.password_file:
            try:
                self._password = await asyncio.to_thread(read_password, settings.password_file)
            except FileError as error:
                problem = str(error)  # the one before may still do
        request = pb.AuthenticateRequest(name=settings.user, password=self._password)
        try:
            self._token = (await self._call(endpoint, AUTHENTICATE, request, timeout_s, None)).token
        except grpc.aio.AioRpcError as error:
            if not problem:
                raise
            said = f"{error.details()}; the password was not read again: {problem}"
            raise grpc.aio.AioRpcError(
                error.code(), error.initial_metadata(), error.trailing_metadata(), said
            ) from None

    async def _out_of_space(self) -> bool:
        try:
            answer = await self.repeated(ALARM, pb.AlarmRequest())
        except (grpc.aio.AioRpcError, StoreUnavailableError):
            return False
        return any(alarm.alarm == _NO_SPACE for alarm in answer.alarms)

    def start(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Start what outlives the call that needs it first. `aclose` ends it."""
        # A context of its own: what is traced is not that call.
        task = asyncio.get_running_loop().create_task(
            work, name="kvplane-etcd", context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(look_at_result)
        return task

    async def _shared(self, task: asyncio.Task[R]) -> R:
        await asyncio.wait([task])
        if task.cancelled():
            raise StoreClosedError("the store is closed")
        return task.result()


def _metadata(token: str) -> Metadata | None:
    return (("token", token),) if token else None
