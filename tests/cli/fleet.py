"""A small fleet in one process: control plane, attached engines with HTTP and side channels, a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from kvplane.cli.connection import Target
from kvplane.cli.doctor.command import diagnose
from kvplane.cli.doctor.findings import Finding
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.outbox import Outbox
from kvplane.client.session import EngineSession
from kvplane.controlplane.model import Settings
from kvplane.controlplane.replicas import VERSION
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from kvplane.store.base import Store
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.fakes.attach import until

METRICS = (
    'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0\n'
    "kvplane_connector_turns_total 3\n"
)


class EngineHttp:
    """What of vLLM's HTTP server the doctor and a router look at."""

    def __init__(self, metrics: str = METRICS, date: str = "") -> None:
        self.metrics = metrics
        self.date = date
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> None:
        app = web.Application()
        app.router.add_get("/health", self._answer(lambda: web.Response()))
        app.router.add_get("/version", self._answer(lambda: web.json_response({"version": "0.32.0"})))
        app.router.add_get("/metrics", self._answer(lambda: web.Response(text=self.metrics)))
        data = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        app.router.add_get("/v1/models", self._answer(lambda: web.json_response(data)))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def _answer(self, make: Callable[[], web.Response]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            response = make()
            if self.date:
                response.headers["Date"] = self.date
            return response

        return handle


class Fleet:
    """What a test plants its mistakes in: `engine` and `router` take what is to differ."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.addresses: list[str] = []
        self.routers: list[str] = []
        self.servers: list[ControlPlaneServer] = []
        self.sessions: dict[str, asyncio.Task[None]] = {}

    @property
    def target(self) -> Target:
        return Target(",".join(self.addresses), 5.0)

    async def plane(
        self, store: Store | None = None, clock: SystemClock | None = None, settings: Settings | None = None
    ) -> str:
        clock = clock or SystemClock()
        store = await self._stack.enter_async_context(store or MemoryStore(clock))
        server = ControlPlaneServer(store, clock, settings)
        await self._stack.enter_async_context(server)
        self.servers.append(server)
        self.addresses.append(f"127.0.0.1:{await server.start('127.0.0.1:0')}")
        return self.addresses[-1]

    async def client(self) -> ControlPlaneClient:
        return await self._stack.enter_async_context(ControlPlaneClient(self.addresses[0], timeout_s=10))

    async def side_channel(self) -> int:
        """Listen as NIXL does; returns the port."""
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        self._stack.callback(server.close)
        return int(server.sockets[0].getsockname()[1])

    async def spec(
        self,
        engine_id: str,
        role: str,
        *,
        http: EngineHttp | None = None,
        profile: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        **members: Any,
    ) -> m.EngineSpec:
        if http is None:
            http = EngineHttp()
        if not http.url:
            await http.start(self._stack)
        alike = m.EngineProfile("m", "", "bfloat16", 16, 1, 1, 1, "0.32.0")
        said = m.EngineSettings(
            kv_role={"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}[role],
            kvplane_version=VERSION,
            side_channel_host="127.0.0.1",
            side_channel_port=await self.side_channel(),
            prefix_caching=True,
            kv_load_failure_policy="recompute",
            kv_blocks_ttl_s=480.0,
            max_ttl_s=480.0,
            kv_digest="d" * 32,
        )
        return m.EngineSpec(
            m.EngineId(engine_id),
            m.EngineRole(role),
            replace(alike, **(profile or {})),
            **{"endpoint": http.url, "served_models": ("m",), **members},
            settings=replace(said, **(settings or {})),
        )

    async def engine(self, engine_id: str, role: str, **differing: Any) -> m.EngineSpec:
        """Start an engine that keeps a stream to the control plane, as the connector does."""
        spec = await self.spec(engine_id, role, **differing)
        outbox = Outbox(monotonic=time.monotonic, margin_s=5.0)
        client = await self.client()
        session = EngineSession(client, spec, outbox, lambda event: None, monotonic=time.monotonic)
        task = self.sessions[engine_id] = asyncio.create_task(session.run())
        self._stack.push_async_callback(_ended, task)
        await until(lambda: session.attached)
        return spec

    async def router(self, **settings: Any) -> str:
        settings.setdefault("plane_address", self.addresses[0] if self.addresses else None)
        server = RouterServer(RouterSettings(port=0, **settings))
        await self._stack.enter_async_context(server)
        self.routers.append(f"http://127.0.0.1:{server.port}")
        return self.routers[-1]

    async def diagnosed(self, *engines: str, **options: Any) -> dict[str, Finding]:
        """Return what the doctor finds, the last of each kind."""
        found, _ = await diagnose(self.target, self.routers, list(engines), **options)
        return {finding.code: finding for finding in found}


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    # Commands in this process have its standard output, which their servers' log would go to.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    async with AsyncExitStack() as stack:
        yield Fleet(stack)


async def healthy(f: Fleet, **settings: Any) -> None:
    """Start what is right, for a test to add what is wrong."""
    await f.plane(**settings)
    await f.engine("p", "prefill")
    await f.engine("d", "decode")


def says(found: dict[str, Finding], code: str, fix: str, *evidence: str) -> None:
    """Check that a finding is there, with its fix and what was seen."""
    assert code in found, found
    assert fix in found[code].fix
    assert found[code].what
    for part in evidence:
        assert part in f"{found[code].what} {found[code].evidence}"


async def comes_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what other tasks bring about."""
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - it has to be asked for
            await asyncio.sleep(0.01)


# A healthy fleet
