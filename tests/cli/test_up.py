"""Router and control plane in one process go without gRPC between them."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from structlog.testing import capture_logs

from kvplane.cli import run
from kvplane.cli.config import load_config
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import EngineRole
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.plane import FakePlane
from tests.router.rig import CHAT, chat, until


async def test_turns_are_begun_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    monkeypatch.setattr(ControlPlaneClient, "open_turns", lambda _: called.append("open_turns"))
    plane, stop = FakePlane(), asyncio.Event()
    async with (
        FakeEngine(EngineConfig(EngineRole.PREFILL), plane) as p,
        FakeEngine(EngineConfig(EngineRole.DECODE), plane) as d,
        aiohttp.ClientSession() as http,
    ):
        config = load_config({"prefill": [p.url], "decode": [d.url], "port": 0, "grpc_port": 0})
        with capture_logs() as logs:
            running = asyncio.create_task(run.up(config, stop))
            await until(lambda: running.done() or any(line["event"] == "ready" for line in logs))
            url = next(line["http"] for line in logs if line["event"] == "ready")
            async with http.post(url + CHAT, json=chat("hello")) as answer:
                assert answer.status == 200
                assert answer.headers["x-kvplane-reason"] == "unknown_conversation"
            stop.set()
            await running
    assert not called
