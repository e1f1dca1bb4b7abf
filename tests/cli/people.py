"""A control plane with engines and conversations, and commands run against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog
from typer.testing import CliRunner

from kvplane.cli.entry import app
from kvplane.cli.errors import ConfigError, StartError
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.controlplane.model import Settings
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.controlplane.wire import announcement


@dataclass(frozen=True, slots=True)
class Done:
    """What a command said and how it ended. `error` is its one line, "" if it has none."""

    code: int
    said: str
    told: str
    error: str

    @property
    def json(self) -> Any:
        return json.loads(self.said)

    @property
    def lines(self) -> list[str]:
        return self.said.splitlines()


async def run(*arguments: str) -> Done:
    """Run a command in a thread of its own, as the program would."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    if isinstance(result.exception, StartError | ConfigError):
        assert "\n" not in str(result.exception)
        return Done(2, result.stdout, result.stderr, str(result.exception))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr, "")


def key(conversation: str = "c", tenant: str = "default", model: str = "m") -> m.ConversationKey:
    return m.ConversationKey(tenant, model, conversation)


class Plane:
    """A control plane over memory on a port, with a client of it."""

    def __init__(self, client: ControlPlaneClient, port: int) -> None:
        self.client = client
        self.address = f"127.0.0.1:{port}"
        self._requests = 0

    async def engine(self, engine_id: str = "d", role: str = "decode", **members: Any) -> int:
        spec = m.EngineSpec(
            m.EngineId(engine_id),
            m.EngineRole(role),
            m.EngineProfile(model="m", block_size=16),
            **{"served_models": ("m",), **members},
        )
        return (await self.client.register_engine(spec)).engine_epoch

    async def retain(self, epoch: int, where: m.ConversationKey, engine_id: str = "d") -> int:
        self._requests += 1
        turn = (await self.client.begin_turn(where, f"b{self._requests}", wait_s=0)).turn
        said = announcement(f"q{self._requests}", turn, where)
        params = {**json.loads(said.kv_transfer_params), "remote_engine_id": engine_id}
        said = replace(said, kv_transfer_params=json.dumps(params).encode())
        await self.client.announce_location(m.EngineId(engine_id), epoch, said)
        return turn

    async def run(self, *arguments: str) -> Done:
        return await run(*arguments, "--plane", self.address)


@asynccontextmanager
async def plane(settings: Settings | None = None, clock: SystemClock | None = None) -> AsyncIterator[Plane]:
    # Commands in this process have its standard output, which their server's log would go to.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    clock = clock or SystemClock()
    async with MemoryStore(clock) as store, ControlPlaneServer(store, clock, settings) as server:
        port = await server.start("127.0.0.1:0")
        async with ControlPlaneClient(f"127.0.0.1:{port}", timeout_s=10) as client:
            yield Plane(client, port)
