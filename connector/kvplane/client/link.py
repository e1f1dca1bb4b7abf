"""A client's channel to the control plane, and another one when what it shows of itself has changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from kvplane.client.address import grpc_target
from kvplane.client.credentials import Credentials, Metadata
from kvplane.client.errors import ControlPlaneUnavailableError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_LOOK_S = 1.0
"""How often the files of credentials are looked at."""
_GRACE_S = 5.0
"""What calls under way are given to end on a channel that is replaced."""
_SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                # Every unary call is idempotent (claims and turns by their request_id).
                "name": [
                    {"service": f"kvplane.v1.{service}"}
                    for service in ("EngineService", "LocationService", "StatusService")
                ],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.02s",
                    "maxBackoff": "0.2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
)


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """Open a channel to an address as `checked_address` takes it; calls go round the replicas.

    Without `credentials` it is in plaintext.
    """
    target = grpc_target(address)
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A replica that hangs, or is cut off without a word, is given up after three seconds.
        ("grpc.keepalive_time_ms", 2_000),
        ("grpc.keepalive_timeout_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.ping_timeout_ms", 1_000),
        ("grpc.http2.bdp_probe", 0),  # its pings stand in for those above, with a minute's patience
        # A plane that is back is found within half a second. Who is slow to answer is given a second.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # in fact the least timeout of an attempt to connect
        ("grpc.max_reconnect_backoff_ms", 400),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if credentials is None or not credentials.tls:
        return grpc.aio.insecure_channel(target, options=options)
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.aio.secure_channel(target, credentials.channel_credentials(), options=options)


class Link:
    """The channel that calls go over now. With credentials it belongs to the running event loop.

    Args:
        address: of the control plane, see open_channel.
        channel: to begin with; None: one is opened.
        credentials: whose files are looked at every second; None: nothing is shown.
        use: told of each channel that calls are to go over from then on.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel | None,
        credentials: Credentials | None,
        use: Callable[[grpc.aio.Channel], None],
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._use = use
        self._streams: dict[grpc.aio.Channel, set[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.channel = channel or open_channel(address, credentials)
        use(self.channel)
        if credentials is not None:
            credentials.warn_if_readable(address)
            self._start(self._follow())

    @property
    def metadata(self) -> Metadata | None:
        """What goes with each call."""
        return None if self._credentials is None else self._credentials.metadata

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Look at the files once; what is called from then on shows what is in them.

        Streams that are open stay on their connection, which is closed after the last of them.
        """
        if self._credentials is None or not await asyncio.to_thread(self._credentials.look):
            return
        old, self.channel = self.channel, open_channel(self._address, self._credentials)
        self._use(self.channel)
        if not self._streams.get(old):
            self._start(self._retire(old))

    def opened(self, call: Any) -> Any:
        """Take note of a stream on the channel, and return it."""
        if self._credentials is not None:
            channel = self.channel
            self._streams.setdefault(channel, set()).add(call)
            call.add_done_callback(lambda ended: self._ended(channel, ended))
        return call

    def _ended(self, channel: grpc.aio.Channel, call: Any) -> None:
        streams = self._streams.get(channel, set())
        streams.discard(call)
        if not streams and channel is not self.channel and not self._closed:
            self._start(self._retire(channel))

    async def _retire(self, channel: grpc.aio.Channel) -> None:
        self._streams.pop(channel, None)
        await channel.close(_GRACE_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="kvplane-link")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_connected(self) -> None:
        """Connect, if need be, and wait for it. Raises ControlPlaneUnavailableError once that has failed."""
        while True:
            channel = self.channel
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return
            if state in (
                grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                grpc.ChannelConnectivity.SHUTDOWN,
            ):
                raise ControlPlaneUnavailableError("cannot connect")
            try:
                await channel.wait_for_state_change(state)
            except grpc.aio.UsageError:  # it was closed meanwhile
                if channel is self.channel:
                    raise ControlPlaneUnavailableError("the client is closed") from None

    async def aclose(self) -> None:
        """Close all channels; calls under way fail as unavailable. Idempotent."""
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in {*self._streams, self.channel}:
            await channel.close()
