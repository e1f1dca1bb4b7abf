"""Two servers over one store, an engine and a caller that know both: one of them goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvplane.client import model as cm
from kvplane.client.client import ControlPlaneClient
from kvplane.client.outbox import Outbox
from kvplane.client.session import EngineSession
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.controlplane.harness import SharedStore
from tests.controlplane.wire import KEY, SPEC, announcement
from tests.fakes.attach import until


class Pair:
    """Two replicas that listen."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.memory = MemoryStore(clock)
        self.servers = [ControlPlaneServer(SharedStore(self.memory), clock) for _ in range(2)]
        self.ports: list[int] = []

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def attached_at(self) -> list[int]:
        """Which servers have the engine's stream."""
        return [number for number, server in enumerate(self.servers) if server.plane.attachments.streams]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pair.memory.aclose)
        for server in pair.servers:
            await stack.enter_async_context(server)
            pair.ports.append(await server.start("127.0.0.1:0"))
        yield pair


async def test_an_engine_attaches_elsewhere_and_callers_notice_nothing(pair: Pair) -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox(monotonic=loop.time, margin_s=0.0)
    session = EngineSession(
        ControlPlaneClient(pair.address),
        SPEC,
        outbox,
        lambda event: None,
        monotonic=loop.time,
    )
    running = asyncio.create_task(session.run())
    async with ControlPlaneClient(pair.address, timeout_s=10) as client:
        try:
            await until(lambda: bool(pair.attached_at()))
            turn = (await client.begin_turn(KEY, "q1")).turn
            outbox.announce(announcement("q1", turn), expires_at=loop.time() + 400)
            session.wake()

            async def is_known() -> bool:
                return isinstance(await client.lookup_location(KEY), cm.Location)

            while not await is_known():  # noqa: ASYNC110 - it comes about over the wire
                await asyncio.sleep(0.01)
            [place] = pair.attached_at()
            began = loop.time()
            await pair.servers[place].stop(0)
            await until(lambda: pair.attached_at() == [1 - place])
            print(f"attached elsewhere after {loop.time() - began:.3f} s")
            assert session.registration is not None
            for number in range(20):
                begun = await client.begin_turn(KEY, f"next-{number}", wait_s=0)
                assert begun.turn > turn
            claim = await client.claim_location(KEY, "claim", "router")
            assert isinstance(claim, cm.Claim)
            assert claim.location.engine_epoch == session.registration.engine_epoch
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await session.aclose()
