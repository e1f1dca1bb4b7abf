"""Random histories on real vLLM: every reply compared with recomputing, every reuse with the true prefix.

usage: python -m tests.e2e.histories [--count 300] [--seed 1] [--json PATH] [--at-once 2] [--no-adapters]

Starts `kvplane up`, P without prefix caching and D with it, in float32. Turns go through the router by pull,
direct and cold in a random mix. Recomputing is the same request sent to P alone, which has no prefix cache
and is told of no KV: plain vLLM. What can be reused is counted on token ids (truth.py), and the sum is
compared with what P's own metrics say was transferred.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from deploy.rig import metrics
from deploy.rig.engines import small_model, vllm_venv
from deploy.rig.make_tiny_adapter import write_adapter
from deploy.rig.stack import Stack
from kvplane.client.client import ControlPlaneClient
from tests.e2e.asking import NotAnsweredError
from tests.e2e.edits import Plan, plan
from tests.e2e.player import Addresses, Player, Result

REQUEST_S = 300.0


@dataclass(slots=True)
class Report:
    """A whole run."""

    results: list[Result] = field(default_factory=list)
    transferred_tokens: int = 0
    """As P's own metrics count them."""
    seconds: float = 0.0

    def conversations(self) -> dict[str, list[Result]]:
        """Return the turns by conversation."""
        found = dict[str, list[Result]]()
        for result in self.results:
            found.setdefault(result.conversation, []).append(result)
        return found

    def summary(self) -> dict[str, Any]:
        """Return the figures."""
        conversations = list(self.conversations().values())
        pulled = sum(result.reused for result in self.results if result.served == "pull")
        return {
            "histories": len(conversations),
            "histories_equal": sum(all(turn.equal for turn in turns) for turns in conversations),
            "histories_reuse_exact": sum(all(turn.exact for turn in turns) for turns in conversations),
            "turns": len(self.results),
            "turns_equal": sum(result.equal for result in self.results),
            "turns_reuse_exact": sum(result.exact for result in self.results),
            "served": dict(Counter(result.served for result in self.results)),
            "different_replies": len({result.reply for result in self.results}),
            "turns_with_reuse": sum(result.reused > 0 for result in self.results),
            "turns_with_part_reused": sum(0 < result.reused < result.held_tokens for result in self.results),
            "tokens_pulled": pulled,
            "tokens_transferred_by_p_metrics": self.transferred_tokens,
            "edits": dict(sorted(Counter(result.edit for result in self.results).items())),
            "faults": [dataclasses.asdict(r) for r in self.results if not (r.equal and r.exact)][:50],
            "seconds": round(self.seconds, 1),
        }


async def run(
    at: Addresses,
    count: int,
    seed: int,
    *,
    at_once: int = 2,
    adapters: bool = True,
    progress: Callable[[Report, int], None] = lambda report, done: None,
) -> Report:
    """Play `count` conversations, `at_once` of them at any time, on a running stack.

    A request that an engine refuses is a fault of its conversation, not an end of the run.
    """
    report, began, done = Report(), time.monotonic(), 0
    before = await asyncio.to_thread(metrics.read, at.prefill)
    waiting = iter(range(count))
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_S)) as session,
        ControlPlaneClient(at.plane) as plane,
    ):
        player = Player(at, session, plane)

        async def work() -> None:
            nonlocal done
            for number in waiting:
                one = plan(seed, number, adapters=adapters)
                try:
                    report.results += await player.play(one)
                except (NotAnsweredError, aiohttp.ClientError, TimeoutError) as error:
                    report.results.append(_broken(one, error))
                done += 1
                report.seconds = time.monotonic() - began
                progress(report, done)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    after = await asyncio.to_thread(metrics.read, at.prefill)
    report.transferred_tokens = round((after - before).transferred_tokens)
    return report


def _broken(one: Plan, error: Exception) -> Result:
    return Result(
        one.name, "", "", "", "", 0, 0, 0, (), 0, equal=False, fault=f"{type(error).__name__}: {error}"
    )


def engine_options(model: Path, logs: Path, *, adapters: bool = True) -> dict[str, Any]:
    """Return settings of both engines: room for histories, and an adapter unless told otherwise."""
    options: dict[str, Any] = {"kv_cache_gib": 1, "max_model_len": 4096}
    if adapters:
        options["adapter"] = logs / "adapter"
        write_adapter(model, options["adapter"])
    return options


def exact_stack(model: Path, logs: Path, *, adapters: bool = True) -> Stack:
    """Return a stack for comparing tokens, not started: float32, and an adapter unless told otherwise."""
    options = engine_options(model, logs, adapters=adapters)
    return Stack(
        venv=vllm_venv(),
        model=model,
        log_dir=logs,
        dtype="float32",
        prefill_options=options,
        decode_options=options,
    )


def main() -> int:
    """Run from the command line; 1 when a reply or a count of reused tokens is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.histories", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="conversations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write figures and every turn to this file")
    parser.add_argument(
        "--at-once", type=int, default=2, help="conversations at a time (default: %(default)s)"
    )
    parser.add_argument("--no-adapters", action="store_true", help="engines without LoRA")
    options = parser.parse_args()

    def progress(report: Report, done: int) -> None:
        if done % 10 and done != options.count:
            return
        figures = report.summary()
        print(
            f"{done}/{options.count}: {figures['histories_equal']} equal,"
            f" {figures['histories_reuse_exact']} reused exactly, {figures['turns']} turns,"
            f" {report.seconds:.0f} s",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as logs:
        print("starting engines", flush=True)
        with exact_stack(small_model(), Path(logs), adapters=not options.no_adapters) as stack:
            report = asyncio.run(
                run(
                    Addresses(stack.url, stack.prefill.url, stack.decode.url, stack.plane.grpc_address),
                    options.count,
                    options.seed,
                    at_once=options.at_once,
                    adapters=not options.no_adapters,
                    progress=progress,
                )
            )
    figures = report.summary()
    if options.json:
        turns = [dataclasses.asdict(result) for result in report.results]
        options.json.write_text(json.dumps({**figures, "results": turns}, indent=1))
    print(json.dumps(figures, indent=1))
    return 0 if figures["histories_equal"] == figures["histories_reuse_exact"] == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
