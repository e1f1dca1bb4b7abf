"""Retained blocks and waiting requests: ten times more conversations than D's pool holds.

usage: python -m tests.e2e.pressure [--rounds 3] [--bursts 12] [--json PATH]

D's pool holds eight conversations. Bursts of seven reach it at the same moment, each a new conversation
whose prompt P has computed already: stock NixlConnector in one direction has room for all of them at once,
kvplane has to give back what it retained of earlier ones first. Compared is the time from sending the decode
leg to its first token, and what D's own metrics say its requests waited. Both arms serve the same prompts in
turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.arms import Arm, Kind, Served, prompts, running

FITS = 8
BURST = 7
BLOCKS = 16
"""Of 32 tokens, a conversation's."""
MAX_TOKENS = 8
DECODE_OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": FITS * BLOCKS + 1, "max_model_len": 2048}


@dataclass(slots=True)
class Waits:
    """Seconds from sending a decode leg to its first token, by arm, in the same order of prompts."""

    first_s: dict[Kind, list[float]] = field(default_factory=dict)
    queued_s: dict[Kind, float] = field(default_factory=dict)
    different: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the figures, in milliseconds; `beyond` is kvplane's minus stock's."""
        stock, ours = self.first_s[Kind.STOCK], self.first_s[Kind.KVPLANE]
        slowest = [
            1000 * (max(ours[at : at + BURST]) - max(stock[at : at + BURST]))
            for at in range(0, len(stock), BURST)
        ]
        return {
            "conversations": len(stock),
            "fit": FITS,
            "replies_different": self.different,
            **{str(kind): _figures(waits) for kind, waits in self.first_s.items()},
            "queued_ms_per_request": {
                str(kind): round(1000 * waited / len(stock), 1) for kind, waited in self.queued_s.items()
            },
            "beyond_p50_ms": round(1000 * (statistics.median(ours) - statistics.median(stock)), 1),
            "beyond_max_ms": round(1000 * (max(ours) - max(stock)), 1),
            "beyond_slowest_of_a_burst_ms": {
                "median": round(statistics.median(slowest), 1),
                "most": round(max(slowest), 1),
            },
            "later_than_stocks_latest_by_100_ms": sum(one > max(stock) + 0.1 for one in ours),
        }


async def compare(
    arms: Sequence[Arm],
    rounds: int,
    bursts: int,
    *,
    seed: str = "pressure",
    progress: Callable[[str], None] = lambda said: None,
) -> Waits:
    """Serve the bursts in both arms, round by round in alternating order. The first burst warms up."""
    waits = Waits()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        for arm in arms:
            await _burst(session, arm, prompts(f"{seed} warm", BURST, *_LENGTHS))
        for number in range(rounds):
            served = dict[Kind, list[Served]]()
            work = [prompts(f"{seed}/{number}/{burst}", BURST, *_LENGTHS) for burst in range(bursts)]
            for arm in arms if number % 2 else list(reversed(arms)):
                before = await asyncio.to_thread(arm.waited_s)
                served[arm.kind] = []
                for texts in work:
                    served[arm.kind] += await _burst(session, arm, texts)
                queued = await asyncio.to_thread(arm.waited_s) - before
                waits.queued_s[arm.kind] = waits.queued_s.get(arm.kind, 0.0) + queued
                waits.first_s.setdefault(arm.kind, []).extend(one.first_s for one in served[arm.kind])
                progress(f"round {number + 1}/{rounds}, {arm.kind}: {_figures(waits.first_s[arm.kind])}")
            pairs = zip(*served.values(), strict=True)
            waits.different += sum(one.tokens != other.tokens for one, other in pairs)
    return waits


_LENGTHS = (440, 500)


async def _burst(session: aiohttp.ClientSession, arm: Arm, texts: Sequence[Sequence[int]]) -> list[Served]:
    """Have P compute all prompts, then send all decode legs at once."""
    handed = [await arm.prefill_leg(session, text, MAX_TOKENS) for text in texts]
    return list(await asyncio.gather(*(arm.decode_leg(session, one) for one in handed)))


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * one for one in seconds)
    return {
        "p50_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "max_ms": round(ordered[-1], 1),
    }


def pressed(logs: Path) -> list[Arm]:
    """Return the two arms, not started."""
    return [Arm(kind, logs, decode_options=DECODE_OPTIONS) for kind in (Kind.STOCK, Kind.KVPLANE)]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.pressure", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--bursts", type=int, default=12, help="per round (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write figures and every wait to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        arms = pressed(Path(logs))
        print("starting engines", flush=True)
        with running(arms):
            waits = asyncio.run(compare(arms, options.rounds, options.bursts, progress=_say))
    figures = waits.summary()
    if options.json:
        every = {str(kind): first_s for kind, first_s in waits.first_s.items()}
        options.json.write_text(json.dumps({**figures, "first_s": every}, indent=1))
    print(json.dumps(figures, indent=1))
    return 0


def _say(said: str) -> None:
    print(said, flush=True)


if __name__ == "__main__":
    sys.exit(main())
