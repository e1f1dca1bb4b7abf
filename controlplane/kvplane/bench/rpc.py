"""`kvplane bench rpc`: the benches of the API, by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import uvloop

from kvplane.bench import attach, scale, sight, stall, turns, unary
from kvplane.bench.figures import Row
from kvplane.bench.rig import Options, placed

Bench = Callable[[Options, int | None], Awaitable[list[Row]]]
QUICK: dict[str, Bench] = {"unary": unary.run, "turns": turns.run, "attach": attach.run, "sight": sight.run}
LARGE: dict[str, Bench] = {"scale": scale.run, "stall": stall.run}
"""Those that take minutes and gigabytes."""
BENCHES = QUICK | LARGE
PROFILABLE = frozenset(BENCHES) - {"scale", "sight"}
"""Those that measure a single control plane."""


def run(names: Sequence[str], options: Options) -> list[Row]:
    """Run benches one after another; blocks. Raises BenchError, ServerDiedError."""
    rows = list[Row]()
    with placed() as (server_core, _):
        for name in names:
            rows += uvloop.run(_run(BENCHES[name], options, server_core))
    return rows


async def _run(bench: Bench, options: Options, core: int | None) -> list[Row]:
    return await bench(options, core)
