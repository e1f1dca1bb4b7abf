"""What metrics and logs cost: CPU time per call of the control plane with both, against one without.

With both means as `kvplane serve --metrics-port` runs, at the log level info. CPU time, unlike a rate, says
about the same while other programs use the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import grpc

from kvplane.bench import payload
from kvplane.bench.engine import Engine
from kvplane.bench.figures import Of, Row, Target
from kvplane.bench.process import Server
from kvplane.bench.rig import Options, served
from kvplane.bench.turns import IN_FLIGHT, TurnsBench
from kvplane.bench.unary import KINDS, SERVICE, calls, check

_CALLS_PER_S = 4000
"""Made for each second that a stretch is to last; it lasts about as long on a machine of today."""
_AT_ONCE = 64
_TARGET = Target(1.1, at_most=True, of=Of.RATIO)


class _End(NamedTuple):
    server: Server
    channel: grpc.aio.Channel
    engine: Engine
    turns: TurnsBench


async def _end(server: Server, channel: grpc.aio.Channel, options: Options) -> _End:
    engine = await Engine.attached(channel)
    return _End(server, channel, engine, TurnsBench(engine, channel, "sight-turns", options))


async def _costs_us(end: _End, name: str, count: int, blocks: int) -> dict[str, float]:
    """Return CPU microseconds of the server per call of each kind, and per pair over the stream."""
    costs = dict[str, float]()
    made = payload.conversations(f"sight-{name}", blocks)
    await end.engine.retain(made, range(count))
    for kind in KINDS:
        requests = [kind.request(made, number).SerializeToString() for number in range(count)]
        done = await calls(end.server, end.channel, SERVICE + kind.method, requests, _AT_ONCE)
        check(kind, made, done, count)
        costs[f"{kind.name}, unary"] = done.stretch.server_cpu_s / count * 1e6
    await end.engine.free(made.request_id(number) for number in range(count))
    stretch, _ = await end.turns.round(end.server, count, IN_FLIGHT)
    costs["begin-turn and claim, over the stream"] = stretch.server_cpu_s / count * 1e6
    return costs


async def run(options: Options, core: int | None) -> list[Row]:
    """Measure both in turn; each round begins with the other."""
    count = max(256, round(_CALLS_PER_S * options.seconds))
    async with (
        served(options, "plane", core) as (plain, plain_channel),
        served(options, "plane", core, seen=True) as (seen, seen_channel),
    ):
        ends = [await _end(plain, plain_channel, options), await _end(seen, seen_channel, options)]
        taken: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for number in range(-1, options.rounds):
            options.progress(f"sight: round {number + 1} of {options.rounds}, {count} calls of each kind")
            for which in (0, 1) if number % 2 else (1, 0):
                costs = await _costs_us(ends[which], f"{number}", count, options.blocks)
                if number >= 0:  # the one before warms up
                    taken[which].append(costs)
        for end in ends:
            await end.engine.aclose()
    return [_row(name, *taken) for name in taken[0][0]]


def _row(name: str, plain: Sequence[dict[str, float]], seen: Sequence[dict[str, float]]) -> Row:
    return Row(
        "sight",
        f"{name}: CPU with metrics and logs, over without",
        "us",
        tuple(costs[name] for costs in seen),
        tuple(costs[name] for costs in plain),
        _TARGET,
    )
