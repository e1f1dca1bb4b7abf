"""The HTTP server: routes, start, drain."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvplane.client.client import ControlPlaneClient
from kvplane.client.credentials import open_credentials, setting_of
from kvplane.client.files import FileError
from kvplane.client.model import Engine as RegisteredEngine
from kvplane.client.turns import TurnsStream
from kvplane.router import shapes, traced
from kvplane.router.admission import TENANT, Admission
from kvplane.router.api import Api
from kvplane.router.bodies import Bodies
from kvplane.router.chat import ChatCompletions, Completions
from kvplane.router.clock import wall_s
from kvplane.router.connections import engine_session
from kvplane.router.conversations import Conversations
from kvplane.router.discovery import DnsSource
from kvplane.router.explain import Explanations
from kvplane.router.keys import EngineKeys, KeyFileError
from kvplane.router.kubernetes import KubernetesSource
from kvplane.router.messages import Messages
from kvplane.router.metrics import RouterMetrics
from kvplane.router.passing import Passing
from kvplane.router.plane import Plane, PlaneClient, TurnsClient
from kvplane.router.pool import EnginePool
from kvplane.router.readiness import Readiness
from kvplane.router.reloading import FileProblemError
from kvplane.router.responses import Responses
from kvplane.router.served import Served
from kvplane.router.serving import TurnServer
from kvplane.router.settings import RouterSettings, SettingsError
from kvplane.router.siblings import Siblings
from kvplane.router.silence import Silence
from kvplane.router.status_page import StatusPage
from kvplane.router.tenancy.gate import Gate
from kvplane.router.tls import Tls
from kvplane.router.turn import Turn
from kvplane.router.upstream import Upstream
from kvplane.tracing.context import Tracer

log = structlog.get_logger("kvplane.router")

APIS: Mapping[str, Api] = {
    api.path: api for api in (ChatCompletions(), Completions(), Responses(), Messages())
}
"""The generation APIs by path."""
_GAUGES_EVERY_S = 1.0
_CUT_S = 0.5
"""At the end of a drain, for what is written already; aiohttp takes up to twice that."""
_LINGER_S = 2.0
"""How long the rest of a refused body is read, so that the client hears why."""


def _http_log() -> logging.Logger:
    """Return a log for faults of ours in the server, without one of clients' faults."""

    def ours(record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or not issubclass(kind, (HttpProcessingError, web.RequestPayloadError))

    logger = logging.getLogger("kvplane.router.http")
    logger.filters[:] = [ours]
    return logger


class RouterStartError(SettingsError):
    """The router cannot start; the text is one line that says what to do."""


class RouterNotNowError(RouterStartError):
    """The router cannot start as things are; another start may go better."""


class RouterServer:
    """A router. `async with` starts it and drains it at the end.

    `plane` is used and left open; without one a client of `settings.plane_address` is made and closed.
    `open_turns` opens streams of turns to that control plane by a shorter way, if there is one.
    `owner` is the name under which it claims, unique among routers; `monotonic` reads seconds, `wall` seconds
    since the epoch.
    `siblings` are router processes on the same port.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        registry: CollectorRegistry | None = None,
        plane: PlaneClient | None = None,
        open_turns: Callable[[], Any] | None = None,
        owner: str = "",
        monotonic: Callable[[], float] | None = None,
        wall: Callable[[], float] = wall_s,
        siblings: Siblings | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings = settings
        self._siblings = siblings
        self._tracer = tracer or Tracer()
        self.metrics = RouterMetrics(registry or CollectorRegistry())
        self._plane_client = plane
        self._open_turns = open_turns
        self._own_client: ControlPlaneClient | None = None
        self._own_turns: TurnsStream | None = None
        self._owner = owner or f"router-{uuid.uuid4().hex}"
        self._monotonic = monotonic
        self._wall = wall
        self._plane: Plane | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._front: ssl.SSLContext | None = None
        self._gate: Gate | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: list[str] = []
        """What no longer runs in the background, and why."""
        self._draining = False
        self._settled = False
        """It has begun to serve."""
        self._kubernetes: KubernetesSource | None = None
        self._admission: Admission
        self._bodies: Bodies
        self._explanations: Explanations
        self._pool: EnginePool
        self._silence: Silence
        self._readiness: Readiness
        self._turns: TurnServer
        self._conversations: Conversations
        self._passing: Passing
        self._served: Served
        self.port = 0
        """The port it listens on, once started."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pool(self) -> EnginePool:
        """The engines, once started."""
        return self._pool

    async def start(self) -> int:
        """Look at engines and control plane once, then listen; returns the port. Raises RouterStartError."""
        settings = self.settings
        monotonic = self._monotonic or asyncio.get_running_loop().time
        reach = settings.reach()
        keys = EngineKeys(settings.engine_api_key_file, for_requests=settings.tenants_file is not None)
        try:
            await keys.read()
            to_engines = await self._current(Tls("engine certificates", settings.engine_tls))
            if settings.tls is not None:
                self._front = await self._current(Tls("the router's certificate", settings.tls))
            if settings.tenants_file is not None:
                await self._open_gate(settings.tenants_file, monotonic)
        except (KeyFileError, FileProblemError) as error:
            raise RouterStartError(str(error)) from None
        try:
            credentials = await asyncio.to_thread(open_credentials, settings.plane_security)
        except FileError as error:
            option = setting_of(settings.plane_security, error).replace("_", "-")
            raise RouterStartError(f"--plane-{option} {error}") from None
        self._session = session = engine_session(settings, to_engines, reach)
        self._explanations = Explanations(settings.explained_turns, monotonic, remote=settings.debug_remote)
        self._bodies = Bodies(
            max_bytes=settings.max_body_bytes,
            timeout_s=settings.body_timeout_s,
            budget_bytes=settings.body_budget_bytes,
        )
        self._admission = Admission(settings.admission, monotonic)
        self._pool = EnginePool(
            session,
            prefill_urls=settings.prefill_urls,
            decode_urls=settings.decode_urls,
            probe_interval_s=settings.probe_interval_s,
            monotonic=monotonic,
            health=settings.health,
            max_engine_requests=settings.admission.max_engine_requests,
            on_free=self._admission.freed,
            keys=keys,
            reach=reach,
        )
        self._silence = Silence(self._pool)
        self._readiness = Readiness(
            pool=self._pool,
            silence=self._silence,
            plane=lambda: self._plane,
            draining=lambda: self._draining,
            ended=self._ended,
        )
        client: PlaneClient | None = self._plane_client
        turns: TurnsClient | None = self._plane_client
        if client is None and settings.plane_address is not None:
            client = self._own_client = ControlPlaneClient(settings.plane_address, credentials=credentials)
            turns = self._own_turns = TurnsStream(self._open_turns or client.open_turns)
        if client is not None and turns is not None:
            self._plane = Plane(
                client,
                turns,
                owner=self._owner,
                timeout_s=settings.plane_timeout_s,
                wait_s=settings.turn_wait_s,
                poll_interval_s=settings.poll_interval_s,
                metrics=self.metrics,
                monotonic=monotonic,
            )
            engines = await self._plane.poll()
            if engines is not None:
                self._merge(engines)
            self._watch(self._plane.run(self._merge), "plane poll")
        else:
            log.warning("no_control_plane", effect="nothing is reused", remedy="--plane HOST:PORT")
        await self._discover()
        await self._pool.probe_all()
        self._readiness.begin(looked_for=settings.discovers)
        self._watch(self._pool.run(), "engine probes")
        self._conversations = Conversations(settings, pool=self._pool, plane=self._plane, bodies=self._bodies)
        self._served = Served(pool=self._pool, session=session)
        self._passing = Passing(
            settings,
            pool=self._pool,
            session=session,
            bodies=self._bodies,
            admission=self._admission,
            metrics=self.metrics,
        )
        self._turns = TurnServer(
            settings,
            pool=self._pool,
            upstream=Upstream(
                session,
                self._pool,
                prefill_timeout_s=settings.prefill_timeout_s,
                first_byte_timeout_s=settings.first_byte_timeout_s,
            ),
            plane=self._plane,
            metrics=self.metrics,
            admission=self._admission,
            bodies=self._bodies,
            monotonic=monotonic,
        )
        if self._siblings is not None:
            self._watch(self._tell_siblings(), "gauges")
        await self._listen()
        return self.port

    async def _open_gate(self, file: str, monotonic: Callable[[], float]) -> None:
        """Have all requests be tenants'. Raises FileProblemError."""
        self._gate = Gate(
            file, share=self.settings.processes, metrics=self.metrics, monotonic=monotonic, wall=self._wall
        )
        await self._gate.start()
        self._watch(self._gate.run(), "tenants")

    async def _current(self, tls: Tls) -> ssl.SSLContext:
        """Return a context that is kept current until the router stops. Raises FileProblemError."""
        context = await tls.start()
        if tls.files.paths:
            self._watch(tls.files.run(), "certificates")
        return context

    async def _discover(self) -> None:
        """Look once for engines behind names and labels, and go on looking."""
        settings, found = self.settings, self._pool.found
        sources: list[DnsSource | KubernetesSource] = []
        if settings.prefill_dns or settings.decode_dns:
            interval_s = settings.dns_interval_s
            sources.append(
                DnsSource(settings.prefill_dns, settings.decode_dns, interval_s=interval_s, on_found=found)
            )
        if settings.kubernetes is not None:
            self._kubernetes = kubernetes = KubernetesSource(settings.kubernetes, on_found=found)
            sources.append(kubernetes)
        for source in sources:
            await source.poll()
            self._watch(source.run(), type(source).__name__)

    def _watch(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run in the background what runs until the router stops; it is said where it ends before."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        why = "it returned" if error is None else f"{type(error).__name__}: {error}"
        problem = f"{task.get_name()} ended ({why}) and stays so until the router is restarted"
        self._ended.append(problem)
        log.error("background_task_ended", problem=problem, exc_info=error)

    async def _listen(self) -> None:
        settings = self.settings
        gates = [] if self._gate is None else [self._gate.let_in]
        app = web.Application(client_max_size=settings.max_body_bytes, middlewares=gates)
        for path in APIS:
            app.router.add_post(path, self._generate)
        self._conversations.add_to(app.router)
        self._served.add_to(app.router)
        self._passing.add_to(app.router)
        self._explanations.add_to(app.router)
        StatusPage(
            pool=self._pool,
            metrics=self.metrics,
            explanations=self._explanations,
            readiness=self._readiness.told,
            siblings=self._siblings,
        ).add_to(app.router)
        self._readiness.add_to(app.router)
        app.router.add_get("/metrics", self._metrics)
        app.on_response_prepare.append(shapes.reshape)
        # A client that goes away cancels its handler, and with it the legs.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            # Also for headers that come too slowly.
            keepalive_timeout=settings.keepalive_timeout_s,
            lingering_time=_LINGER_S,
            logger=_http_log(),
            shutdown_timeout=_CUT_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._runner.server.request_handler = shapes.guarded(self._runner.server.request_handler)
        site = web.TCPSite(
            self._runner,
            settings.host,
            settings.port,
            backlog=1024,
            reuse_port=self._siblings is not None,
            ssl_context=self._front,
        )
        try:
            await site.start()
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            if error.errno == errno.EADDRINUSE:
                raise RouterNotNowError(
                    f"port {settings.port} on {settings.host} is taken: choose another with --port"
                ) from error
            raise RouterNotNowError(f"cannot listen on {where}: {error.strerror or error}") from error
        self.port = self._runner.addresses[0][1]
        self._settled = True
        log.info(
            "router_started",
            host=settings.host,
            port=self.port,
            path=str(settings.path),
            tls=settings.tls is not None,
        )

    async def _drain(self, runner: web.AppRunner) -> None:
        """Take nothing new, and wait for the requests under way as long as they may take."""
        for site in tuple(runner.sites):
            await site.stop()
        await asyncio.sleep(0)  # Requests that are there already begin.
        if runner.server is not None:
            runner.server.pre_shutdown()  # Connections end with the request they carry.
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._admission.until_idle()
        except TimeoutError:
            log.warning("requests_cut_off", requests=self._admission.requests)

    async def stop(self) -> None:
        """Stop accepting, let requests under way finish within `drain_timeout_s`, then close. Idempotent.

        For `drain_grace_s` before that it goes on serving and says at /ready that it will not.
        """
        first, self._draining = not self._draining, True
        if self._runner is not None:
            if first and self._settled and self.settings.drain_grace_s:
                log.info("router_draining", grace_s=self.settings.drain_grace_s)
                await asyncio.sleep(self.settings.drain_grace_s)
            await self._drain(self._runner)
            await self._runner.cleanup()
            self._runner = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._kubernetes is not None:
            await self._kubernetes.aclose()
            self._kubernetes = None
        if self._plane is not None:
            await self._plane.aclose()
            self._plane = None
        if self._own_turns is not None:
            await self._own_turns.aclose()
            self._own_turns = None
        if self._own_client is not None:
            await self._own_client.aclose()
            self._own_client = None
        if self._gate is not None:
            await self._gate.aclose()
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Routes

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        request_id = shapes.request_id(request)
        trail = self._explanations.begin(request_id, request.path, TENANT.get())
        turn = Turn(request, APIS[request.path], request_id, asyncio.get_running_loop().time(), trail)
        try:
            return await traced.served(self._tracer, turn, self._turns.serve(turn))
        finally:
            self._bodies.done(request)

    def _merge(self, engines: Sequence[RegisteredEngine]) -> None:
        self._pool.merge(engines)
        self._silence.look()

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=await self.metrics_page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def metrics_page(self) -> bytes:
        """Return the metrics of this router and its siblings in Prometheus' text format."""
        self._set_gauges()
        if self._siblings is None:
            return generate_latest(self.metrics.registry)
        return await asyncio.to_thread(self._siblings.metrics)

    def _set_gauges(self) -> None:
        for role in ("prefill", "decode"):
            up = sum(e.up and getattr(e, role) for e in self._pool.engines)
            self.metrics.engines_up.labels(role).set(up)
            ejected = sum(e.up and getattr(e, role) and self._pool.ejected(e) for e in self._pool.engines)
            self.metrics.engines_ejected.labels(role).set(ejected)
        self.metrics.queued.set(self._admission.queued)
        self.metrics.in_flight.set(self._admission.requests)
        self.metrics.show_engines(self._pool.engines, self._pool.ejected, self._turns.rates)

    async def _tell_siblings(self) -> None:
        """Keep the gauges current: any of the processes may be asked for those of all."""
        while True:
            self._set_gauges()
            await asyncio.sleep(_GAUGES_EVERY_S)


async def serve_router(
    settings: RouterSettings,
    *,
    stop: asyncio.Event,
    registry: CollectorRegistry | None = None,
    plane: PlaneClient | None = None,
    started: Callable[[int], None] | None = None,
) -> None:
    """Serve until `stop` is set, then drain. Calls `started` with the port. Raises RouterStartError."""
    async with RouterServer(settings, registry=registry, plane=plane) as router:
        if started is not None:
            started(router.port)
        await stop.wait()
