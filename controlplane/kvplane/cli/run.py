"""The programs behind the commands: put the parts together, run them until a signal, drain, stop."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from kvplane.cli.config import Config, kubernetes_api, watchdog
from kvplane.cli.errors import NotNowError as NotNowError
from kvplane.cli.errors import StartError as StartError
from kvplane.cli.front import check_hops, engine_files, server_files
from kvplane.cli.metrics_port import MetricsPort, MetricsPortError
from kvplane.cli.metrics_tls import metrics_tls
from kvplane.cli.security import check_files, check_grpc_reach, check_up, client_security, server_security
from kvplane.cli.tenant_limits import LimitsFile, following
from kvplane.cli.tracing import tracing
from kvplane.cli.watchdog import signs_of_life
from kvplane.cli.workers import Workers
from kvplane.controlplane.collector import spare_the_old
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.metrics import ControlPlaneMetrics
from kvplane.controlplane.model import Settings
from kvplane.controlplane.schema import SchemaError
from kvplane.controlplane.security import SecurityError
from kvplane.controlplane.server import AddressInUseError, ControlPlaneServer
from kvplane.router.admission import AdmissionLimits
from kvplane.router.app import RouterNotNowError, RouterServer
from kvplane.router.health import HealthLimits
from kvplane.router.policy import PathMode, Thresholds
from kvplane.router.resources import raise_file_limit, too_few_files
from kvplane.router.settings import KubernetesSettings, RouterSettings, SettingsError
from kvplane.router.siblings import Siblings
from kvplane.store.clock import SystemClock
from kvplane.store.errors import StoreError
from kvplane.store.url import StoreUrlError, open_store, without_password

log = structlog.get_logger(__name__)


Program = Callable[[Config, asyncio.Event], Awaitable[None]]
"""What a command runs, until the event is set."""


def until_signalled(program: Program, config: Config) -> None:
    """Run a program on uvloop. It returns when it has stopped after SIGTERM or SIGINT."""

    async def runner() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with signs_of_life(watchdog()):
            await program(config, stop)
        log.info("stopped")

    spare_the_old()
    raise_file_limit()
    try:
        uvloop.run(runner())
    except StoreUrlError as error:
        raise StartError(f"--store: {error}") from None
    except (RouterNotNowError, SchemaError) as error:
        raise NotNowError(str(error)) from None
    except (SecurityError, SettingsError) as error:
        raise StartError(str(error)) from None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


async def _is_own(host: str) -> bool:
    """Tell whether a host is this one: whether some port of it could be listened on."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        for family, kind, number, _, address in found:
            with socket.socket(family, kind, number) as probe:
                probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True


@asynccontextmanager
async def _metrics(config: Config) -> AsyncIterator[MetricsPort]:
    """Serve metrics on a port of their own, if there is to be one; gives it, for pages to be added to."""
    server = MetricsPort()
    if config.metrics_port is None:
        yield server
        return
    host = config.metrics_host
    async with metrics_tls(config) as tls, server:
        try:
            certificates = config.metrics_client_ca is not None
            port = await server.start(host, config.metrics_port, tls, certificates=certificates)
        except MetricsPortError as error:
            raise NotNowError(f"--metrics-{'port' if error.taken else 'host'}: {error}") from None
        log.info("metrics_listening", url=f"http{'s' if tls else ''}://{_joined(host, port)}/metrics")
        yield server


@asynccontextmanager
async def _control_plane(config: Config, shown: MetricsPort) -> AsyncIterator[ControlPlaneServer]:
    """Run a control plane."""
    security = server_security(config)
    check_grpc_reach(config)
    clock = SystemClock()
    settings = Settings(
        max_location_ttl_s=config.location_ttl,
        min_remaining_s=config.min_remaining,
        claim_timeout_s=config.claim_timeout,
        engine_lease_s=config.engine_lease,
        in_flight_wait_s=config.turn_wait,
        max_staleness_s=config.max_staleness,
        max_conversations=config.max_conversations,
    )
    limits = None
    if config.tenant_limits is not None:
        limits = await asyncio.to_thread(LimitsFile, config.tenant_limits)
    meter = None if config.metrics_port is None else Meter(clock)
    async with open_store(config.store, clock) as opened, tracing(config, "kvplane-control-plane") as tracer:
        log.info("store_chosen", store=without_password(config.store), shared=opened.shared)
        store = opened if meter is None else meter.instrument(opened)
        current = None if limits is None else limits.current
        server = ControlPlaneServer(store, clock, settings, current, meter, security, tracer)
        shown.serving = server.is_serving
        try:
            try:
                await server.start(_joined(config.grpc_host, config.grpc_port))
            except AddressInUseError as error:
                option = "grpc-port" if await _is_own(config.grpc_host) else "grpc-host"
                raise NotNowError(f"--{option}: {error}") from None
            with suppress(StoreError):  # it may not be there yet
                if (caution := await store.caution()) is not None:
                    log.warning("store_unsound", problem=caution)
            if meter is not None:
                kind = config.store.partition(":")[0]
                shown.pages.append(
                    ControlPlaneMetrics(CollectorRegistry(), server.plane, meter, store=kind).page
                )
            async with following(limits, clock, server.plane.quotas):
                yield server
        finally:
            await server.stop(min(5.0, config.drain_timeout))


def _kubernetes(config: Config) -> KubernetesSettings | None:
    """Return where pods that are engines are asked for, None if there are to be none."""
    if not config.kubernetes_prefill and not config.kubernetes_decode:
        return None
    api_url = config.kubernetes_api or kubernetes_api()
    if api_url is None:
        raise StartError(
            "--kubernetes-prefill, --kubernetes-decode: this is no pod; say where the API server is with"
            " --kubernetes-api, --kubernetes-token-file, --kubernetes-ca-file and --kubernetes-namespace"
        )
    files = {"token_file": config.kubernetes_token_file, "ca_file": config.kubernetes_ca_file}
    return KubernetesSettings(
        api_url=api_url,
        prefill_selector=config.kubernetes_prefill or "",
        decode_selector=config.kubernetes_decode or "",
        namespace=config.kubernetes_namespace or "",
        port=config.kubernetes_port,
        **{name: file for name, file in files.items() if file is not None},
    )


def _router_settings(config: Config, plane_address: str | None) -> RouterSettings:
    """Return a router's settings. Raises SettingsError."""
    return RouterSettings(
        prefill_urls=config.prefill,
        decode_urls=config.decode,
        prefill_dns=config.prefill_dns,
        decode_dns=config.decode_dns,
        dns_interval_s=config.dns_interval,
        kubernetes=_kubernetes(config),
        engine_api_key_file=config.engine_api_key_file,
        engine_hosts=config.engine_hosts,
        engine_plaintext=config.allow_remote,
        engine_tls=engine_files(config),
        tls=server_files(config),
        plane_address=plane_address,
        plane_security=client_security(config, plane_address),
        host=config.host,
        port=config.port,
        path=PathMode(config.path),
        allow_path_header=config.allow_path_header,
        tenant_id=config.tenant,
        tenants_file=config.tenants,
        processes=config.workers,
        identity_sources=config.identity,
        thresholds=Thresholds(
            direct_max_new_tokens=config.direct_max_new_tokens,
            kv_recompute_threshold=config.recompute_threshold,
        ),
        turn_wait_s=config.turn_wait,
        tool_ttl_s=config.tool_ttl,
        request_timeout_s=config.request_timeout,
        explained_turns=config.explained_turns,
        debug_remote=config.debug_remote,
        admission=AdmissionLimits(
            max_requests=config.max_requests,
            max_engine_requests=config.max_engine_requests,
            max_queued=config.max_queued,
            queue_timeout_s=config.queue_timeout,
        ),
        health=HealthLimits(
            consecutive_failures=config.eject_after,
            ejection_s=config.ejection_time,
            slow_start_s=config.slow_start,
        ),
        drain_timeout_s=config.drain_timeout,
        drain_grace_s=config.drain_grace,
    )


@asynccontextmanager
async def router(
    config: Config,
    plane_address: str | None,
    siblings: Siblings | None = None,
    shown: MetricsPort | None = None,
    open_turns: Callable[[], Any] | None = None,
) -> AsyncIterator[int]:
    """Run a router, alone or as one of several; gives its port, and has its metrics shown.

    `open_turns`, as RouterServer has it.
    """
    if problem := too_few_files(config.max_requests):
        log.warning("too_few_files", problem=problem)
    async with tracing(config, "kvplane-router") as tracer:
        owner = f"router-{secrets.token_hex(8)}"
        server = RouterServer(
            _router_settings(config, plane_address),
            open_turns=open_turns,
            owner=owner,
            siblings=siblings,
            tracer=tracer,
        )
        try:
            port = await server.start()
            if shown is not None:
                shown.pages.append(server.metrics_page)
            yield port
        finally:
            await server.stop()


@asynccontextmanager
async def _routers(
    config: Config,
    plane_address: str | None,
    shown: MetricsPort,
    open_turns: Callable[[], Any] | None = None,
) -> AsyncIterator[int]:
    """Run a router, in as many processes as are wanted; gives its port. One of them takes `open_turns`."""
    check_hops(config)
    if config.workers == 1:
        async with router(config, plane_address, shown=shown, open_turns=open_turns) as port:
            yield port
        return
    _router_settings(config, plane_address)
    async with Workers(config, plane_address) as workers:
        shown.pages.append(workers.metrics_page)
        yield workers.port


async def _until(stop: asyncio.Event, plane: ControlPlaneServer) -> None:
    """Wait for the signal to stop, or for a fault of the control plane's: then another process is better."""
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(plane.failed.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
    if plane.refusal is not None:
        raise NotNowError(str(plane.refusal))
    if plane.failed.is_set():
        raise NotNowError("a task of the control plane's failed, see the log; this is a fault of kvplane's")


async def serve(config: Config, stop: asyncio.Event) -> None:
    """Run a control plane alone."""
    await check_files(config, serves=True)
    async with _metrics(config) as shown, _control_plane(config, shown) as plane:
        await _until(stop, plane)


async def route(config: Config, stop: asyncio.Event) -> None:
    """Run a router alone."""
    await check_files(config, asks=True)
    async with _metrics(config) as shown, _routers(config, config.plane, shown):
        await stop.wait()


async def up(config: Config, stop: asyncio.Event) -> None:
    """Run a control plane and a router that uses it."""
    check_up(config)
    await check_files(config, serves=True, asks=True)
    async with (
        _metrics(config) as shown,
        _control_plane(config, shown) as plane,
        _routers(
            config, _joined(config.grpc_host, plane.port), shown, open_turns=plane.open_turns
        ) as http_port,
    ):
        scheme = "http" if config.tls_cert is None else "https"
        log.info("ready", http=f"{scheme}://{_joined(config.host, http_port)}", grpc_port=plane.port)
        await _until(stop, plane)
