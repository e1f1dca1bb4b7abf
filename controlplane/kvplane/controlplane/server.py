"""The control plane's server: parts put together, started, drained, stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvplane.controlplane import model as m
from kvplane.controlplane import reflection
from kvplane.controlplane.attachments import Attachments
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.claims import Claims
from kvplane.controlplane.connections import most_connections
from kvplane.controlplane.decoding import MAX_REQUEST_BYTES, Checked
from kvplane.controlplane.engine_service import EngineServicer
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.expiry import Sweeper
from kvplane.controlplane.fleet_time import FleetTime
from kvplane.controlplane.gate import Gate
from kvplane.controlplane.guard import Counted, guarded
from kvplane.controlplane.holdings import HoldingsCount
from kvplane.controlplane.ledger import Ledger
from kvplane.controlplane.local_turns import LocalTurns
from kvplane.controlplane.location_service import LocationServicer
from kvplane.controlplane.locations import Locations
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.mirror import Mirror
from kvplane.controlplane.prefixes import Prefixes
from kvplane.controlplane.probing import HealthServicer
from kvplane.controlplane.quotas import Quotas, TenantLimits
from kvplane.controlplane.rates import OperationRates
from kvplane.controlplane.releases import Releases
from kvplane.controlplane.replicas import Replicas
from kvplane.controlplane.roles import ENGINE_SERVICE, HEALTH_SERVICE, LOCATION_SERVICE, STATUS_SERVICE
from kvplane.controlplane.schema import SchemaError, ensure_schema
from kvplane.controlplane.security import Security, SecuritySettings, open_security
from kvplane.controlplane.status import Status
from kvplane.controlplane.status_service import StatusServicer
from kvplane.controlplane.touches import Touches
from kvplane.controlplane.turns import Turns
from kvplane.store.base import Store
from kvplane.store.clock import Clock
from kvplane.store.errors import StoreClosedError, StoreError
from kvplane.tracing.context import Tracer
from kvplane.v1 import engine_pb2_grpc, location_pb2_grpc, status_pb2_grpc

log = structlog.get_logger(__name__)

SERVICES = (ENGINE_SERVICE, LOCATION_SERVICE, STATUS_SERVICE)
LIVENESS = "liveness"
"""The service by which health finds a process that hangs: SERVING whenever it answers, store or not."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_CALLS = 1024
"""Calls and streams under way on one connection; callers wait with more."""
HANDSHAKE_S = 30
"""For so many seconds a connection may be made."""
UNREAD_BYTES = 1024 * 1024
"""Of a connection so much is received before somebody reads it. gRPC would otherwise let it grow with how
fast a caller sends, up to several megabytes a stream."""
_FIRST_READ_S = 3.0
_RETRY_S = 0.5
_HEALTH_EVERY_S = 1.0
_HEALTH_DEADLINE_S = 2.0


class AddressInUseError(Exception):
    """The address to listen on is taken or not this machine's."""


class ControlPlane:
    """Everything the control plane knows and does, over one store. Transport comes on top.

    With a `meter`, what it does is measured beyond bare counts.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        settings: m.Settings,
        limits: TenantLimits | None = None,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self._clock = clock
        time = FleetTime(clock, patience_s=2 * settings.claim_life_s)
        self.mirror = Mirror(store, time, max_staleness_s=settings.max_staleness_s if store.shared else None)
        ledger = Ledger(store, time, self.mirror)
        self.tally = ledger.tally
        operations = None if meter is None else meter.follow(self.mirror, self.tally)
        self.replicas = Replicas(ledger, time, settings)
        self.engines = EngineRegistry(ledger, settings)
        self.releases = Releases(ledger, settings)
        availability = Availability(self.engines, time, settings)
        self.prefixes = Prefixes(ledger, availability)
        self.quotas = None if limits is None else Quotas(ledger, self.releases, limits)
        """What tenants retain and may; None if there are no limits."""
        self.rates = None if self.quotas is None else OperationRates(self.quotas.rate_of, clock.monotonic)
        """How often tenants may ask; None likewise."""
        self.locations = Locations(
            ledger, self.engines, self.releases, availability, self.prefixes, settings, self.quotas
        )
        self.turns = Turns(ledger, self.locations, availability, self.prefixes, settings)
        self.claims = Claims(ledger, availability, self.turns, settings)
        self.touches = Touches(ledger, self.engines, settings)
        self.sweeper = Sweeper(
            self.mirror,
            self.releases,
            self.engines,
            time,
            settings,
            rank=self.replicas.rank,
            quotas=self.quotas,
        )
        self.attachments = Attachments(ledger, self.engines, self.locations, self.releases)
        self.status = Status(ledger, self.replicas, settings, clock)
        self.engine_servicer = EngineServicer(self.engines, self.attachments, HoldingsCount(ledger), settings)
        self.status_servicer = StatusServicer(self.status)
        self.location_servicer = LocationServicer(
            ledger,
            self.engines,
            self.locations,
            self.turns,
            self.claims,
            self.releases,
            self.touches,
            self.rates,
            operations,
            tracer,
        )

    def start(self) -> list[asyncio.Task[None]]:
        """Start what has to run as long as the control plane does; the tasks are the caller's to cancel."""
        running = [
            asyncio.create_task(self._follow(), name="mirror"),
            asyncio.create_task(self._after(self.mirror.caught_up, self.sweeper.run), name="sweeper"),
        ]
        if self.store.shared:
            pulsing = self._after(self.mirror.listed, self.replicas.run)
            running.append(asyncio.create_task(pulsing, name="replicas"))
        return running

    async def _follow(self) -> None:
        """Follow the store, once it has been found to be one that this software may use."""
        cause = ""
        while self.store.shared:
            try:
                await ensure_schema(self.store)
                break
            except StoreClosedError:
                return None
            except StoreError as error:
                if str(error) != cause:
                    cause = str(error)
                    log.warning("store_not_usable_yet", cause=cause)
                await self._clock.sleep(_RETRY_S)
        while True:
            running = asyncio.create_task(self.mirror.run())
            doubted = asyncio.create_task(self.mirror.doubted.wait())
            try:
                await asyncio.wait([running, doubted], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return await running
            finally:
                running.cancel()
                doubted.cancel()
                await asyncio.gather(running, doubted, return_exceptions=True)
            log.warning("store_began_anew", cause="a record is older than it was")
            self.mirror.forget_everything()

    async def _after(self, event: asyncio.Event, run: Callable[[], Awaitable[None]]) -> None:
        await event.wait()
        await run()


class ControlPlaneServer:
    """A gRPC server of a control plane. The store is the caller's and outlives it.

    With a `meter`, calls are counted and timed.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        settings: m.Settings | None = None,
        limits: TenantLimits | None = None,
        meter: Meter | None = None,
        security: SecuritySettings | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or Tracer()
        self._security_settings = security or SecuritySettings()
        self._security: Security | None = None  # as long as the server: gRPC asks it for certificates
        self.plane = ControlPlane(store, clock, settings or m.Settings(), limits, meter, self._tracer)
        self._counted = None if meter is None else Counted(self.plane.tally, meter.calls)
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._health = HealthServicer()
        self._serving: bool | None = None
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.failed = asyncio.Event()
        """Set when one of its own tasks has failed: a fault of ours, or `refusal`. It is not healthy then."""
        self.refusal: SchemaError | None = None
        """Why it cannot work on this store, where that was not known before it has started."""

    async def start(self, address: str) -> int:
        """Listen on "host:port" (port 0: any) and return the port.

        Raises AddressInUseError, SchemaError, SecurityError.

        A store that does not answer yet is waited for while serving: calls are answered as unavailable.
        """
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", MAX_CALLS),
            ("grpc.max_allowed_incoming_connections", most_connections()),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        security = self._security = await open_security(self._security_settings)
        server = self._server = grpc.aio.server(options=options)
        access, counted = security.access, self._counted
        gate = Gate(access, counted) if access is not None and security.tokens_only else None
        checked: Any = Checked(server, gate)
        servicer: Any = self.plane.engine_servicer
        engines = guarded(servicer, ENGINE_SERVICE, counted, access=access, streams={"AttachEngine"})
        engine_pb2_grpc.add_EngineServiceServicer_to_server(engines, checked)
        servicer = self.plane.location_servicer
        locations = guarded(
            servicer, LOCATION_SERVICE, counted, access=access, streams={"Turns"}, tracer=self._tracer
        )
        location_pb2_grpc.add_LocationServiceServicer_to_server(locations, checked)
        status = guarded(self.plane.status_servicer, STATUS_SERVICE, counted, access=access)
        status_pb2_grpc.add_StatusServiceServicer_to_server(status, checked)
        probed: Any = Checked(server)  # by everyone
        health_pb2_grpc.add_HealthServicer_to_server(guarded(self._health, HEALTH_SERVICE), probed)
        reflection.enable(server, (*SERVICES, health.SERVICE_NAME), access)
        try:
            self.port = security.add_port(server, address)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise AddressInUseError(
                f"cannot listen on {address}: it is taken, or not an address of this host"
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_READ_S):
                if self.plane.store.shared:
                    with contextlib.suppress(StoreError):
                        await ensure_schema(self.plane.store)
                self._start_tasks()
                await self._until_ready()
        if not self._tasks:
            self._start_tasks()
        if security.follows_files:
            self._watch_over(asyncio.create_task(security.follow(self._clock), name="security"))
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._check_health()
        await server.start()
        tls = self._security_settings.tls
        log.info(
            "control_plane_started",
            address=address,
            port=self.port,
            tls=("mutual" if tls.client_ca else "server") if tls is not None else "none",
            roles=access is not None,
        )
        return self.port

    async def _until_ready(self) -> None:
        """Wait until calls can be answered. Raises SchemaError, and what else a task failed with."""
        ready = asyncio.create_task(self.plane.mirror.caught_up.wait())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def _start_tasks(self) -> None:
        for task in (*self.plane.start(), asyncio.create_task(self._watch_health(), name="health")):
            self._watch_over(task)

    def _watch_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.append(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, SchemaError):  # for an operator to mend: `start` raises it, or who waits
                self.refusal = error
            else:
                log.critical("task_failed", task=task.get_name(), exc_info=error)
            self.failed.set()

    async def _watch_health(self) -> None:
        while True:
            await self._clock.sleep(_HEALTH_EVERY_S)
            await self._check_health()

    async def _check_health(self) -> None:
        """SERVING only while the store answers and the mirror keeps up with it."""
        try:
            self.plane.mirror.require_fresh()
            async with asyncio.timeout(_HEALTH_DEADLINE_S):
                await self.plane.store.get(b"health")
            trouble = str(self.refusal or "a task failed") if self.failed.is_set() else ""
        except StoreError as error:
            trouble = str(error)
        except TimeoutError:
            trouble = "the store does not answer"
        serving = self.plane.status.serving = not trouble
        if serving != self._serving:
            self._serving = serving
            if serving:
                log.info("health_changed", serving=True)
            else:
                log.warning("health_changed", serving=False, cause=trouble)
            await self._set_health(serving)

    def is_serving(self) -> bool:
        """Whether its health is SERVING: as of a second ago at most, while it runs."""
        return self._server is not None and self.plane.status.serving

    async def _set_health(self, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if serving else kind.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    def open_turns(self) -> LocalTurns:
        """Open a Turns stream for a router in this process, in its event loop: no caller is asked for."""
        return LocalTurns(self.plane.location_servicer.serve_turns)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no new calls, let those under way finish for at most `grace_s` seconds, stop. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._set_health(False)
        self.plane.attachments.close()
        await server.stop(grace_s)
        await self.plane.attachments.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        log.info("control_plane_stopped")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0)
