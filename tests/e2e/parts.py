"""A stack whose parts are programs of their own, so that each can be killed alone, shared by many tests.

float32 on both engines, so that reuse and recomputation give the same tokens bit for bit; P has no prefix
cache: what it did not pull it computed. The tests that share it come in any order: what one of them ends it
starts again, and none counts on what others left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.rig.engines import MODEL_NAME, RIG, Engine, EngineSettings, Role
from deploy.rig.plane import ControlPlane, Router
from deploy.rig.process import LOCALHOST, RigProcess, free_ports
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from tests.e2e.histories import engine_options

_ATTACH_S = 60.0


class Parts:
    """Control plane, P and D, and in front of them whatever a test asks for: a router, or a plain proxy.

    The engines have vLLM's calls for developers, an adapter, and time to end in.
    """

    def __init__(self, venv: Path, model: Path, logs: Path, stops: ExitStack) -> None:
        self._logs, self._stops = logs, stops
        self._routers = dict[tuple[str, ...], Router]()
        self._proxy_url = ""
        self._numbers = itertools.count(1)
        port = free_ports(1)[0]
        self.plane = ControlPlane(port=port, log_file=logs / "plane.log")
        common: dict[str, Any] = {
            **engine_options(model, logs),
            "venv": venv,
            "model": model,
            "dtype": "float32",
            "kvplane_address": f"{LOCALHOST}:{port}",
            "variables": {"VLLM_SERVER_DEV_MODE": "1"},
            "arguments": ["--shutdown-timeout", "20"],
        }
        self.prefill = Engine(
            EngineSettings(
                **common,
                role=Role.PREFILL,
                core=0,
                log_file=logs / "prefill.log",
                prefix_caching=False,
                extra_config={"kvplane_ttl_s": 300},
            )
        )
        self.decode = Engine(
            EngineSettings(
                **common, role=Role.DECODE, core=1, log_file=logs / "decode.log", engine_id=self._new_id()
            )
        )

    def _new_id(self) -> str:
        return f"decode-{next(self._numbers)}"

    def start(self) -> None:
        """Start control plane and engines and wait until all are ready and know of each other."""
        programs = (self.plane, self.prefill, self.decode)
        for program in programs:
            program.start()
        self._stops.callback(self.prefill.stop)
        self._stops.callback(lambda: self.decode.stop())  # whichever it is by then
        self._stops.callback(self.plane.stop)
        for program in programs:
            program.wait_ready()
        self.until_attached()

    def router(self, *extra: str) -> Router:
        """Return a router with these arguments, which is started when it is asked for first."""
        router = self._routers.get(extra)
        if router is None:
            router = self._routers[extra] = Router(
                prefill_urls=[self.prefill.url],
                decode_urls=[self.decode.url],
                port=free_ports(1)[0],
                extra=["--plane", self.plane.address, *extra],
                log_file=self._logs / f"router{len(self._routers)}.log",
            )
            router.start()
            self._stops.callback(router.stop)
            router.wait_ready()
        router.wait_engines()
        return router

    def proxy_url(self) -> str:
        """Return the base URL of a proxy that knows nothing of kvplane, started when first asked for."""
        if not self._proxy_url:
            port = free_ports(1)[0]
            proxy = RigProcess(
                "plain proxy",
                [
                    *(sys.executable, str(RIG / "plain_proxy.py"), "--port", str(port)),
                    *("--prefill", self.prefill.url, "--decode", self.decode.url),
                ],
                environment={},
                log_file=self._logs / "proxy.log",
                ready_url=f"http://{LOCALHOST}:{port}/health",
            )
            proxy.start()
            self._stops.callback(proxy.stop)
            proxy.wait_ready()
            self._proxy_url = f"http://{LOCALHOST}:{port}"
        return self._proxy_url

    def restart_decode(self, *, same_id: bool) -> None:
        """Start the decode engine, which was stopped or killed, and wait until it has registered anew."""
        known = self.engines()
        if not same_id:
            settings = dataclasses.replace(self.decode.settings, engine_id=self._new_id())
            self.decode = Engine(settings)
        self.decode.start()
        self.decode.wait_ready()
        self.until_attached(not_only=known)

    def engines(self) -> dict[str, int]:
        """Return the epochs of the live engines by their ids."""

        async def ask() -> list[m.Engine]:
            async with ControlPlaneClient(self.plane.address) as client:
                return await client.list_engines()

        return {engine.spec.engine_id: engine.engine_epoch for engine in asyncio.run(ask())}

    def location(self, conversation_id: str) -> m.Location | None:
        """Return the location that the control plane would hand out now, if any."""

        async def lookup() -> m.Location | None:
            async with ControlPlaneClient(self.plane.address) as client:
                key = m.ConversationKey("default", MODEL_NAME, conversation_id)
                found = await client.lookup_location(key)
            return found if isinstance(found, m.Location) else None

        return asyncio.run(lookup())

    def held(self, engine_id: str) -> int:
        """Return how many conversations an engine is known to hold."""

        async def ask() -> int:
            async with ControlPlaneClient(self.plane.address) as client:
                return len((await client.list_locations(engine_id=engine_id))[0])

        return asyncio.run(ask())

    @property
    def decode_id(self) -> str:
        """The id that the decode engine has now."""
        assert self.decode.settings.engine_id is not None
        return self.decode.settings.engine_id

    def until_attached(self, not_only: dict[str, int] | None = None) -> None:
        """Wait until both engines have registered; with `not_only`, the decode engine not only as there."""
        before, ends = (not_only or {}).get(self.decode_id), time.monotonic() + _ATTACH_S
        while len(seen := self.engines()) < 2 or seen.get(self.decode_id, before) == before:
            assert time.monotonic() < ends, f"registered: {seen}"
            time.sleep(0.1)
