"""etcd's members as seen from here: a channel to each, which of them works, and which one to use.

One is used until it fails; the next is whichever first answers a question that only a member with a leader
can answer. So no write is sent to where nothing is known to work.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvplane.store.clock import Clock
from kvplane.store.errors import StoreClosedError, StoreUnavailableError
from kvplane.store.etcd.methods import A, Method, Q
from kvplane.store.etcd.settings import EtcdSettings, EtcdTls
from kvplane.store.etcd.tls import read_again
from kvplane.store.files import FileError

_READY = grpc.ChannelConnectivity.READY
_DOWN = frozenset({grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN})
# etcd closes the connection of a client that pings more often than every 5 s.
_PING_AFTER_S = 6.0
_ANSWER_S = 2.0  # to a ping, and to the beginning of a connection
_RECONNECT_AFTER_S = (0.1, 1.0)
_LOOK_AGAIN_S = 0.01
_PROBE_AGAIN_S = 0.1
_WHY_S = 0.2
_WHY_LENGTH = 200

T = TypeVar("T")

Cancel = Callable[[], object]
Probe = Callable[["Endpoint", float], Coroutine[Any, Any, None]]


class Endpoint:
    """One member's address and its channel."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.streams: set[Cancel] = set()
        """How to end the streams that are open there; called when another endpoint is used."""
        self._unary: dict[str, Any] = {}

    def unary(self, method: Method[Q, A]) -> grpc.aio.UnaryUnaryMultiCallable[Q, A]:
        """Return a method to call."""
        made: grpc.aio.UnaryUnaryMultiCallable[Q, A] | None = self._unary.get(method.path)
        if made is None:
            made = self._unary[method.path] = self.channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        return made

    def stream(self, method: Method[Q, A]) -> grpc.aio.StreamStreamMultiCallable[Q, A]:
        """Return a method to open a stream of."""
        return self.channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )

    def state(self) -> grpc.ChannelConnectivity:
        """Return the channel's state now, and have it connect if it does not try to."""
        return self.channel.get_state(try_to_connect=True)


class Endpoints:
    """The members. Connects on first use, which has to be in the event loop that uses it.

    `probe` asks one whether it works, its leader included, within a time in seconds; it raises AioRpcError.
    """

    def __init__(self, settings: EtcdSettings, clock: Clock, probe: Probe) -> None:
        self._settings = settings
        self._clock = clock
        self._probe = probe
        self._tls = settings.tls
        self._unusable = ""  # why files of certificates are not used
        self._retiring: dict[asyncio.Task[None], Endpoint] = {}
        self._all: Sequence[Endpoint] = ()
        self._choosing: asyncio.Task[Endpoint] | None = None
        self._closed = False
        self.used: Endpoint | None = None
        """The one that calls go to now."""

    @property
    def several(self) -> bool:
        """Whether there is another to move on to."""
        return len(self._settings.endpoints) > 1

    async def ready(self, until: float) -> Endpoint:
        """Return the endpoint in use if it is connected; else the first of all to answer a probe.

        Waits for that until `until` (of the clock), but not when all are known to be down. Raises
        StoreUnavailableError.
        """
        used = self.used
        if used is not None and used.state() is _READY:
            return used
        choosing = self._start_choosing()
        await asyncio.wait([choosing], timeout=max(0.0, until - self._clock.monotonic()))
        if not choosing.done():
            raise StoreUnavailableError("no endpoint of etcd answers")
        if choosing.cancelled():
            raise StoreClosedError("the store is closed")
        error = choosing.exception()
        if error is not None:
            raise StoreUnavailableError(str(error)) from error
        return choosing.result()

    def leave(self, endpoint: Endpoint) -> None:
        """Take note that an endpoint failed, and see which one works."""
        if self.used is endpoint:
            self.used = None
            if not self._closed:
                self._start_choosing()

    async def aclose(self) -> None:
        """End all connections. Idempotent."""
        self._closed = True
        if self._choosing is not None:
            self._choosing.cancel()
            await asyncio.gather(self._choosing, return_exceptions=True)
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        for endpoint in (*self._all, *retiring.values()):
            await endpoint.channel.close()

    def _start_choosing(self) -> asyncio.Task[Endpoint]:
        if self._choosing is None or self._choosing.done():
            # A context of its own: it outlives the call that needs it first, and its tracing span.
            self._choosing = asyncio.get_running_loop().create_task(
                self._choose(), name="kvplane-etcd-choose", context=contextvars.Context()
            )
            self._choosing.add_done_callback(look_at_result)
        return self._choosing

    def _use(self, chosen: Endpoint) -> None:
        """Have calls go to an endpoint, and what streams at others as well: those may hang."""
        self.used = chosen
        for endpoint in self._all:
            if endpoint is not chosen:
                for cancel in [*endpoint.streams]:
                    cancel()

    async def _choose(self) -> Endpoint:
        """Connect and probe all at once: one that hangs, or has no leader, is no hindrance."""
        await self._refresh()
        if not self._all:
            self._connect()
        until = self._clock.monotonic() + self._settings.timeout_s
        probes: dict[asyncio.Task[None], Endpoint] = {}
        not_before = dict.fromkeys(self._all, 0.0)
        try:
            while (now := self._clock.monotonic()) < until:
                states = {endpoint: endpoint.state() for endpoint in self._all}
                if not probes and all(state in _DOWN for state in states.values()):
                    raise StoreUnavailableError(f"no endpoint of etcd can be reached: {await self._why()}")
                for endpoint, state in states.items():
                    if state is _READY and now >= not_before[endpoint]:
                        not_before[endpoint] = until
                        work = self._probe(endpoint, until - now)
                        probes[asyncio.get_running_loop().create_task(work)] = endpoint
                # gRPC can tell of a channel's changes, but a wait for that has no end before the channel's.
                if probes:
                    await asyncio.wait(probes, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await self._clock.sleep(_LOOK_AGAIN_S)
                for task in [task for task in probes if task.done()]:
                    endpoint = probes.pop(task)
                    if task.exception() is None:
                        self._use(endpoint)
                        return endpoint
                    not_before[endpoint] = self._clock.monotonic() + _PROBE_AGAIN_S
            raise StoreUnavailableError("no endpoint of etcd answers")
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _why(self) -> str:
        """Return for people why each endpoint cannot be reached."""
        probes = [self._probe(endpoint, _WHY_S) for endpoint in self._all]
        reasons = list[str]()
        for endpoint, outcome in zip(
            self._all, await asyncio.gather(*probes, return_exceptions=True), strict=True
        ):
            text = outcome.details() if isinstance(outcome, grpc.aio.AioRpcError) else str(outcome or "")
            reason = (text or "").rpartition("last error: ")[2].strip() or "it does not answer"
            reasons.append(f"{endpoint.address}: {reason[:_WHY_LENGTH]}")
        if self._unusable:
            reasons.append(f"certificates not read again: {self._unusable}")
        return "; ".join(reasons)

    async def _refresh(self) -> None:
        """Take the certificates as their files have them now; with others, all connections are made anew.

        Files that cannot be used leave what was in use.
        """
        if self._tls is None:
            return
        self._unusable = ""
        try:
            tls = await asyncio.to_thread(read_again, self._tls)
        except FileError as error:
            self._unusable = str(error)
            return
        if tls is not self._tls:
            self._tls, self.used, old, self._all = tls, None, self._all, ()
            for endpoint in old:
                for cancel in [*endpoint.streams]:
                    cancel()
                task = asyncio.get_running_loop().create_task(self._retire(endpoint))
                self._retiring[task] = endpoint
                task.add_done_callback(self._retiring.pop)

    async def _retire(self, endpoint: Endpoint) -> None:
        """Close a connection that nothing new goes to, when what is under way has had its time."""
        await endpoint.channel.close(self._settings.timeout_s + _ANSWER_S)

    def _connect(self) -> None:
        credentials, options = _credentials(self._tls), _options(self._settings)
        self._all = [
            Endpoint(
                address,
                grpc.aio.insecure_channel(address, options)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, options),
            )
            for address in self._settings.endpoints
        ]


def look_at_result(task: asyncio.Task[T]) -> None:
    """Have asyncio know that a failure is not overlooked when all who wait for it were cancelled."""
    if not task.cancelled():
        task.exception()


def _credentials(tls: EtcdTls | None) -> grpc.ChannelCredentials | None:
    if tls is None:
        return None
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)


def _options(settings: EtcdSettings) -> list[tuple[str, Any]]:
    first_s, longest_s = _RECONNECT_AFTER_S
    options: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),  # no two stores share a connection, or its back-off
        ("grpc.initial_reconnect_backoff_ms", round(first_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(longest_s * 1000)),
        # Despite its name how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", round(_ANSWER_S * 1000)),
        ("grpc.keepalive_time_ms", round(_PING_AFTER_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(_ANSWER_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", -1),  # a page of large values; etcd's side is the one to limit
        ("grpc.max_send_message_length", -1),
    ]
    if settings.tls is not None and settings.tls.server_name:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    return options
