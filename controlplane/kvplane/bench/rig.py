"""What every bench of the API uses: servers, a channel, a meter, and somebody to tell how far it is."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from kvplane.bench.figures import Cpu
from kvplane.bench.process import Server, ServerSpec, cores, cpu_s, pin, running
from kvplane.store.etcd import EtcdSettings

DEADLINE_S = 120.0
"""Deadline of every measured call and stream message; whoever reaches it has hung."""
Progress = Callable[[str], None]
"""Told what is being done now."""


class BenchError(Exception):
    """A bench that cannot go on: one line that says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure. `seconds` is the length of one measured stretch; each is done `rounds` times."""

    seconds: float = 1.0
    rounds: int = 5
    blocks: int = 64
    store: str | EtcdSettings = "memory://"
    profile: Path | None = None
    progress: Progress = field(default=lambda text: None)


@dataclass(slots=True)
class Stretch:
    """One measured stretch: seconds of wall time, and what each side used of its core."""

    elapsed_s: float = 0.0
    server_cpu_s: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def cpu(self) -> Cpu:
        """The shares."""
        return Cpu(self.server_cpu_s / self.elapsed_s, self.client_cpu_s / self.elapsed_s)


@contextmanager
def placed() -> Iterator[tuple[int | None, int | None]]:
    """Pin this process, the load generator; gives the cores of server and client, None where not pinned."""
    before = cores()
    if len(before) < 2:
        yield None, None
        return
    pin(before[1])
    try:
        yield before[0], before[1]
    finally:
        pin(*before)


@asynccontextmanager
async def served(
    options: Options,
    kind: Literal["plane", "echo"],
    core: int | None,
    *,
    grouped: bool = True,
    seen: bool = False,
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    """Run a server and a channel to it; a control plane has the options' store and profile.

    `grouped` and `seen` are as in ServerSpec.
    """
    plane = kind == "plane"
    spec = ServerSpec(kind, options.store, grouped, core, options.profile if plane else None, seen=seen)
    async with running(spec) as server, channel_to(server) as channel:
        yield server, channel


@asynccontextmanager
async def channel_to(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """Open a connection of its own."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", 64 * 1024 * 1024),
        ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ]
    channel = grpc.aio.insecure_channel(server.address, options=options)
    try:
        yield channel
    finally:
        await channel.close()


@asynccontextmanager
async def measured(server: Server) -> AsyncIterator[Stretch]:
    """Measure what happens within: wall time, and CPU of both sides. No garbage is collected meanwhile."""
    stretch = Stretch()
    gc.collect()
    gc.disable()
    await server.profile(True)
    theirs, ours, began = await server.usage(), cpu_s(), time.perf_counter()
    try:
        yield stretch
    finally:
        stretch.elapsed_s = time.perf_counter() - began
        stretch.client_cpu_s = cpu_s() - ours
        stretch.server_cpu_s = (await server.usage()).cpu_s - theirs.cpu_s
        await server.profile(False)
        gc.enable()
