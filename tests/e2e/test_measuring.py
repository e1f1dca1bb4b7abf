"""What the harnesses make of what they measured, without engines."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from deploy.rig.usage import Usage, usage_of
from tests.e2e.arms import Kind, in_turn, prompts
from tests.e2e.histories import Report
from tests.e2e.player import OneModel, Result
from tests.e2e.pressure import BURST, Waits
from tests.e2e.throughput import Comparison, Round

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


def test_cpu_time_of_a_program_and_what_it_started() -> None:
    before = usage_of(os.getpid())
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = usage_of(child.pid)
        assert (usage_of(os.getpid()) - before).total_s >= used.total_s - 0.05
        child.communicate(b"\n")
    assert 0.25 <= used.total_s < 5
    assert used.core_s == 0, "no engine"
    with pytest.raises(ProcessLookupError):
        usage_of(child.pid)


def test_usage_adds_up() -> None:
    assert Usage(3, 2) + Usage(1, 1) - Usage(2, 2) == Usage(2, 1)


def test_ratios_say_how_much_more_is_done_than_in_the_first_arm() -> None:
    comparison = Comparison([Kind.STOCK, Kind.KVPLANE])
    for cost in (1.0, 2.0, 4.0):
        stock = Round(requests=10, wall_s=10.0, cpu_s=8.0, core_s=6.0, slowest_s=1.0)
        comparison.rounds.append(
            {Kind.STOCK: stock, Kind.KVPLANE: replace(stock, wall_s=10 * cost, cpu_s=16.0)}
        )
    figures = comparison.summary()
    assert figures["kvplane"]["throughput_ratio"]["by_wall"] == {"median": 0.5, "low": 0.375, "high": 0.75}
    assert figures["kvplane"]["throughput_ratio"]["by_engine_cpu"]["median"] == 0.5
    assert figures["stock"]["engine_cpu_ms_per_request"]["median"] == 800.0
    assert "throughput_ratio" not in figures["stock"]


def test_waits_beyond_stock() -> None:
    stock = [0.010] * (2 * BURST)
    ours = [*stock[:-1], 0.150]
    waits = Waits(
        first_s={Kind.STOCK: stock, Kind.KVPLANE: ours}, queued_s={Kind.STOCK: 0.14, Kind.KVPLANE: 0.28}
    )
    figures = waits.summary()
    assert figures["beyond_p50_ms"] == 0
    assert figures["beyond_max_ms"] == 140
    assert figures["beyond_slowest_of_a_burst_ms"] == {"median": 70, "most": 140}
    assert figures["later_than_stocks_latest_by_100_ms"] == 1
    assert figures["queued_ms_per_request"] == {"stock": 10, "kvplane": 20}


def result(conversation: str, **members: object) -> Result:
    base = Result(conversation, "continue", "pull", "pull", "pulled", 200, 100, 100, (100,), 100, equal=True)
    return replace(base, **members)  # type: ignore[arg-type]  # names are checked by replace


def test_a_history_is_equal_if_every_turn_of_it_is() -> None:
    report = Report(
        [
            result("a"),
            result("a", equal=False),
            result("b", reused=64),
            result("c"),
            result("d", fault="served cold, not pull"),
        ]
    )
    figures = report.summary()
    assert (figures["histories"], figures["histories_equal"], figures["histories_reuse_exact"]) == (4, 3, 2)
    assert (figures["turns"], figures["turns_equal"], figures["turns_reuse_exact"]) == (5, 4, 3)
    assert figures["turns_with_part_reused"] == 1
    assert figures["tokens_pulled"] == 464
    assert len(figures["faults"]) == 3


async def test_requests_of_two_models_do_not_run_at_once() -> None:
    gate, running, seen = OneModel(), list[str](), list[tuple[str, ...]]()

    async def one(number: int) -> None:
        model = "ab"[number % 2]
        async with gate.of(model):
            running.append(model)
            seen.append(tuple(running))
            await asyncio.sleep(0)
            running.remove(model)

    await in_turn(20, 6, one)
    assert all(len(set(models)) == 1 for models in seen)
    assert any(len(models) > 1 for models in seen), "those of one model do"


async def test_in_turn_keeps_the_order_and_the_limit() -> None:
    running, most = 0, 0

    async def square(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number**2

    assert await in_turn(9, 3, square) == [number**2 for number in range(9)]
    assert most == 3


def test_prompts_share_no_beginning() -> None:
    made = prompts("x", 50, 10, 20)
    assert made == prompts("x", 50, 10, 20)
    assert len({tuple(prompt[:4]) for prompt in made}) == 50
    assert {len(prompt) for prompt in made} <= set(range(10, 21))
