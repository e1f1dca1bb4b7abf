"""Whether many conversations make each operation dearer, and how much memory each takes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc

from kvplane.bench import payload
from kvplane.bench.engine import Engine, check_accepted
from kvplane.bench.figures import Of, Row, Target
from kvplane.bench.operations import METHOD, Retained, at_once, check, work
from kvplane.bench.process import Server
from kvplane.bench.rig import Options, Stretch, measured, served

SIZES = (1_000, 100_000, 1_000_000)
"""Live conversations, of the options' blocks each, at which operations are measured."""
MEMORY_BLOCKS = 500
MEMORY_SIZE = 100_000
_MAX_BYTES = 6 * 1024
_STEPS = 4
OPERATIONS = 4096
"""How many of each kind are measured per round."""
_IN_FLIGHT = 256
_FLAT = Target(1.3, at_most=True, of=Of.RATIO)


@dataclass(slots=True)
class _Filled:
    """A control plane that holds `size` conversations, and what was measured on it."""

    size: int
    blocks: int
    server: Server
    engine: Engine
    channel: grpc.aio.Channel
    made: payload.Conversations
    renewed: dict[int, payload.Conversations] = field(default_factory=dict)
    grown_bytes: list[int] = field(default_factory=list)
    costs_us: dict[str, list[float]] = field(default_factory=dict)

    def some(self, count: int) -> list[Retained]:
        """Return some of its conversations, any."""
        numbers = random.sample(range(self.size), count)
        return [(self.renewed.get(number, self.made), number) for number in numbers]

    async def retain_all(self, options: Options) -> None:
        """Announce all, noting after each quarter how much memory the process has taken."""
        before, step = (await self.server.usage()).resident_bytes, max(1, self.size // _STEPS)
        for start in range(0, self.size, step):
            options.progress(
                f"scale: retaining {self.size:,} conversations of {self.blocks} blocks, {start:,} done"
            )
            await self.engine.retain(self.made, range(start, min(self.size, start + step)))
            self.grown_bytes.append((await self.server.usage()).resident_bytes - before)

    async def measure(self, operations: int) -> None:
        """Look up, begin, claim and announce anew some conversations, at least `operations` times each."""
        count = min(operations, self.size)
        times, costs = -(-operations // count), dict[str, float]()
        for _ in range(times):
            some = self.some(count)
            for kind in ("lookup", "begin_turn", "claim"):
                _add(costs, kind, await self._operations(some, kind))
            await self.engine.free(made.request_id(number) for made, number in some)
            later = self.made.next_turn()
            messages = self.engine.announcements(later.announcement(number) for _, number in some)
            async with measured(self.server) as stretch:
                acks = await self.engine.send(messages)
            check_accepted(acks, count)
            _add(costs, "announce", stretch)
            self.renewed |= {number: later for _, number in some}
        for kind, cost_s in costs.items():
            self.costs_us.setdefault(kind, []).append(cost_s / (times * count) * 1e6)

    async def _operations(self, some: Sequence[Retained], kind: str) -> Stretch:
        todo, call = work(some, kind), self._stream()
        async with measured(self.server) as stretch:
            await at_once([call], todo, _IN_FLIGHT)
        check(todo)
        await call.done_writing()
        return stretch

    def _stream(self) -> Any:
        return self.channel.stream_stream(METHOD)()


def _add(costs: dict[str, float], kind: str, stretch: Stretch) -> None:
    costs[kind] = costs.get(kind, 0.0) + stretch.server_cpu_s


@asynccontextmanager
async def _filled(options: Options, core: int | None, size: int, blocks: int) -> AsyncIterator[_Filled]:
    """Run a control plane and retain `size` conversations on it."""
    async with served(options, "plane", core) as (server, channel):
        engine = await Engine.attached(channel)
        warm_up = payload.conversations(f"warm-up-{size}", blocks)
        await engine.retain(warm_up, range(_IN_FLIGHT))
        await engine.free(warm_up.request_id(number) for number in range(_IN_FLIGHT))
        made = payload.conversations(f"live-{size}", blocks)
        plane = _Filled(size, blocks, server, engine, channel, made)
        await plane.retain_all(options)
        try:
            yield plane
        finally:
            await engine.aclose()


async def run(
    options: Options,
    core: int | None,
    *,
    sizes: Sequence[int] = SIZES,
    memory_size: int = MEMORY_SIZE,
    operations: int = OPERATIONS,
) -> list[Row]:
    """Fill one control plane per size and measure them by turns; then memory with many blocks each."""
    rows = list[Row]()
    async with _filled(options, core, memory_size, MEMORY_BLOCKS) as plane:
        rows += _memory(plane, None)
    async with AsyncExitStack() as stack:
        filled = [
            await stack.enter_async_context(_filled(options, core, size, options.blocks)) for size in sizes
        ]
        for number in range(options.rounds):
            for plane in filled:
                options.progress(
                    f"scale: round {number + 1} of {options.rounds}, {plane.size:,} conversations"
                )
                await plane.measure(operations)
        smallest = filled[0]
        for kind in smallest.costs_us:
            rows += [_cost(kind, plane, smallest) for plane in filled]
        for smaller, plane in pairwise(filled):
            rows += _memory(plane, smaller)
    return rows


def _cost(kind: str, plane: _Filled, smallest: _Filled) -> Row:
    compared = plane is not smallest
    return Row(
        "scale",
        f"{kind.replace('_', '-')} at {plane.size:,} conversations",
        "us CPU",
        tuple(plane.costs_us[kind]),
        tuple(smallest.costs_us[kind]) if compared else (),
        _FLAT if compared else None,
        note=f"against {smallest.size:,} conversations" if compared else "",
    )


def _memory(plane: _Filled, smaller: _Filled | None) -> list[Row]:
    each = plane.grown_bytes[-1] / plane.size
    name = f"memory, {plane.size:,} conversations of {plane.blocks} blocks"
    half = len(plane.grown_bytes) // 2
    rows = [
        Row(
            "scale",
            f"{name}: each",
            "bytes",
            (each,),
            target=Target(_MAX_BYTES, at_most=True) if smaller is None else None,
            note=f"{len(plane.made.announcement(0).SerializeToString())} bytes each on the wire",
        )
    ]
    if half:
        grown = plane.grown_bytes
        rows.append(
            Row(
                "scale",
                f"{name}: growth by the second half",
                "MB",
                ((grown[-1] - grown[half - 1]) / 1e6,),
                (grown[half - 1] / 1e6,),
                _FLAT,
                note="against the first half",
            )
        )
    return rows
