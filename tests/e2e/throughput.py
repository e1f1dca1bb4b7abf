"""What the connector costs where nothing can be reused: engines with kvplane against engines with stock NIXL.

usage: python -m tests.e2e.throughput [--arms stock,kvplane] [--rounds 8] [--requests 32] [--json PATH]

Arms: stock (NixlConnector in one direction), kvplane, routed (a router asks the control plane, not P), gone
(kvplane whose control plane is an address where nobody listens, for the whole run). Every round serves the
same unique prompts in each arm, one arm after the other, in alternating order. Reported per arm against the
first: requests per second, and requests per CPU second of the engines, which says the same on a machine that
others use too; medians over the rounds with the quartiles. Tokens are compared too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.arms import Arm, Kind, Served, in_turn, prompts, running

AT_ONCE = 8
MAX_TOKENS = 32
SHORTEST, LONGEST = 150, 450


@dataclass(frozen=True, slots=True)
class Round:
    """One arm's part of a round. CPU seconds are of both engines; `core_s` of their computing processes."""

    requests: int
    wall_s: float
    cpu_s: float
    core_s: float
    slowest_s: float


@dataclass(slots=True)
class Comparison:
    """All rounds, by arm; the first arm is the measure."""

    arms: Sequence[Kind]
    rounds: list[dict[Kind, Round]] = field(default_factory=list)
    compared: int = 0
    different: int = 0
    log_lines: dict[Kind, int] = field(default_factory=dict)

    def ratios(self, kind: Kind, member: str) -> list[float]:
        """Return, per round, how much more the arm gets done than the first: per second of `member`."""
        first = self.arms[0]
        return [getattr(one[first], member) / getattr(one[kind], member) for one in self.rounds]

    def summary(self) -> dict[str, Any]:
        """Return the figures."""
        figures: dict[str, Any] = {
            "rounds": len(self.rounds),
            "requests_per_round": self.rounds[0][self.arms[0]].requests if self.rounds else 0,
            "replies_compared": self.compared,
            "replies_different": self.different,
        }
        for kind in self.arms:
            of_arm = [one[kind] for one in self.rounds]
            figures[str(kind)] = {
                "requests_per_s": _spread([one.requests / one.wall_s for one in of_arm]),
                "engine_cpu_ms_per_request": _spread([1000 * one.cpu_s / one.requests for one in of_arm]),
                "core_cpu_ms_per_request": _spread([1000 * one.core_s / one.requests for one in of_arm]),
                "kvplane_log_lines": self.log_lines.get(kind, 0),
            }
            if kind is not self.arms[0]:
                figures[str(kind)]["throughput_ratio"] = {
                    "by_wall": _spread(self.ratios(kind, "wall_s")),
                    "by_engine_cpu": _spread(self.ratios(kind, "cpu_s")),
                    "by_core_cpu": _spread(self.ratios(kind, "core_s")),
                }
        return figures


async def compare(
    arms: Sequence[Arm],
    rounds: int,
    requests: int,
    *,
    seed: str = "throughput",
    progress: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """Serve the rounds in every arm. A round before them, of half the size, warms up and is not counted."""
    comparison = Comparison([arm.kind for arm in arms])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        for number in range(-1, rounds):
            work = prompts(f"{seed}/{number}", requests if number >= 0 else requests // 2, SHORTEST, LONGEST)
            served, figures = dict[Kind, list[Served]](), dict[Kind, Round]()
            for arm in arms if number % 2 else list(reversed(arms)):
                served[arm.kind], figures[arm.kind] = await _round(session, arm, work)
            if number < 0:
                continue
            comparison.rounds.append(figures)
            for arm in arms[1:]:
                pairs = zip(served[arms[0].kind], served[arm.kind], strict=True)
                comparison.compared += len(work)
                comparison.different += sum(one.tokens != other.tokens for one, other in pairs)
            progress(comparison)
        for arm in arms:
            comparison.log_lines[arm.kind] = len(await asyncio.to_thread(arm.log_lines))
            await arm.aclose()
    return comparison


async def _round(
    session: aiohttp.ClientSession, arm: Arm, work: Sequence[Sequence[int]]
) -> tuple[list[Served], Round]:
    before, began = await asyncio.to_thread(arm.usage), time.perf_counter()

    async def one(index: int) -> Served:
        return await arm.serve(session, work[index], MAX_TOKENS)

    served: list[Served] = await in_turn(len(work), AT_ONCE, one)
    wall_s = time.perf_counter() - began
    used = await asyncio.to_thread(arm.usage) - before
    slowest_s = max(request.total_s for request in served)
    return served, Round(len(work), wall_s, used.total_s, used.core_s, slowest_s)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles."""
    if len(values) < 2:
        return {"median": round(values[0], 4)} if values else {}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.throughput", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--arms", default="stock,kvplane", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="per arm and round (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write figures and rounds to this file")
    options = parser.parse_args()

    def progress(comparison: Comparison) -> None:
        last = comparison.rounds[-1]
        said = ", ".join(f"{kind} {one.wall_s:.1f} s ({one.cpu_s:.1f} CPU)" for kind, one in last.items())
        print(f"round {len(comparison.rounds)}/{options.rounds}: {said}", flush=True)

    with tempfile.TemporaryDirectory() as logs:
        arms = [Arm(Kind(name), Path(logs)) for name in options.arms.split(",")]
        print("starting engines", flush=True)
        with running(arms):
            comparison = asyncio.run(compare(arms, options.rounds, options.requests, progress=progress))
    figures = comparison.summary()
    if options.json:
        rounds = [{str(kind): asdict(one) for kind, one in each.items()} for each in comparison.rounds]
        options.json.write_text(json.dumps({**figures, "each": rounds}, indent=1))
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
