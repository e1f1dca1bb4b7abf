"""Runs a plan, and the same without a control plane to compare it with."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import replace

from kvplane.bench.fleet.fleet import Fleet, Plan
from kvplane.bench.fleet.outcome import Line, Outcome, lines, outcome


def run(
    plan: Plan,
    *,
    compared: bool = False,
    begun: Callable[[str], None] = lambda _: None,
    told: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Simulate a plan; with `compared`, before that also with cold turns only.

    Args:
        plan: what to simulate.
        compared: whether to.
        begun: called with what begins.
        told: called with the number of conversations that ended since the last call.
    """
    cold_only: tuple[Line, ...] | None = None
    if compared:
        begun("cold only")
        without = replace(plan, without_plane=True, replicas=1)
        fleet, _ = _simulate(without, told)
        cold_only = lines(fleet)
        del fleet
        gc.collect()
    begun("as planned")
    fleet, cpu_s = _simulate(plan, told)
    return outcome(fleet, cpu_s, cold_only)


def _simulate(plan: Plan, told: Callable[[int], None]) -> tuple[Fleet, float]:
    began = time.process_time()
    fleet = Fleet(plan, told)
    # Nearly all that is made lives for long: looking for garbage in it again and again takes time.
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 100)
    try:
        asyncio.run(fleet.run())
    finally:
        gc.set_threshold(*before)
    return fleet, time.process_time() - began
