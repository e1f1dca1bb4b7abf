"""How long anybody waits while very many locations end at one instant."""

from __future__ import annotations

import asyncio
import time

from kvplane.bench import payload
from kvplane.bench.engine import BATCH, Engine, check_accepted
from kvplane.bench.figures import Cpu, Row, Target, percentile
from kvplane.bench.probe import Probes, probing
from kvplane.bench.process import cores
from kvplane.bench.rig import BenchError, Options, measured, served

COUNT = 100_000
"""Locations that end at once."""
_EVERY_S = 0.005
_QUIET_S = 3.0
_PATIENCE_S = 120.0
_CHUNK = 64 * BATCH
_LONGEST_MS = 50.0


async def run(options: Options, core: int | None, *, count: int = COUNT) -> list[Row]:
    """Retain `count` conversations until one instant, and look up another every 5 ms meanwhile."""
    async with served(options, "plane", core) as (server, channel):
        engine = await Engine.attached(channel)
        other = payload.conversations("stall-probed", options.blocks)
        await engine.retain(other, [0])
        made = payload.conversations("stall", options.blocks)
        rate = await _rate(engine, made, count)
        ends = time.monotonic() + 2.5 * count / rate + _QUIET_S + 2
        await _retain_until(engine, made, count, ends, options)
        options.progress("stall: quiet, then everything expires")
        own_core = cores()[0] if core is not None else None
        request = other.lookup(0).SerializeToString()
        async with (
            measured(server) as stretch,
            probing(server.address, request, _EVERY_S, own_core) as probes,
        ):
            gone_at = await _until_gone(engine, count, ends)
        await engine.aclose()
    return _rows(probes, ends, gone_at, count, stretch.cpu)


async def _rate(engine: Engine, made: payload.Conversations, count: int) -> float:
    """Return announcements per second."""
    some = range(count, count + min(count, _CHUNK))
    began = time.monotonic()
    await engine.retain(made, some)
    rate = len(some) / (time.monotonic() - began)
    await engine.free(made.request_id(number) for number in some)
    return rate


async def _retain_until(
    engine: Engine, made: payload.Conversations, count: int, ends: float, options: Options
) -> None:
    for start in range(0, count, _CHUNK):
        options.progress(f"stall: retaining {count:,} conversations, {start:,} done")
        numbers = range(start, min(count, start + _CHUNK))
        for batch in range(numbers.start, numbers.stop, BATCH):
            part = range(batch, min(numbers.stop, batch + BATCH))
            left_s = ends - time.monotonic()
            if left_s <= _QUIET_S:
                raise BenchError("the control plane slowed down while conversations were announced")
            messages = engine.announcements(made.announcement(number, left_s) for number in part)
            check_accepted(await engine.send(messages), len(part))


async def _until_gone(engine: Engine, count: int, ends: float) -> float:
    """Free what the control plane orders to free, as an engine does, until that was everything."""
    freed = 0
    while freed < count:
        if time.monotonic() > ends + _PATIENCE_S:
            raise BenchError(f"only {freed:,} of {count:,} expired locations were ordered to be freed")
        await asyncio.sleep(0.05)
        orders, engine.orders = engine.orders, []
        await engine.free(orders)
        freed += len(orders)
    return time.monotonic()


def _rows(probes: Probes, ends: float, gone_at: float, count: int, cpu: Cpu) -> list[Row]:
    if probes.misses:
        raise BenchError(f"{probes.misses} lookups of the conversation that did not expire were no hit")
    waited = list(zip(probes.due, probes.waited_s, strict=True))
    during = [seconds * 1000 for due, seconds in waited if ends <= due <= gone_at]
    quiet = [seconds * 1000 for due, seconds in waited if due < ends - 0.5]
    if not during or not quiet:
        raise BenchError("the prober saw nothing of it")
    name = f"lookup every {_EVERY_S * 1000:g} ms while {count:,} locations expire"
    late_ms = probes.late_s * 1000
    note = f"{gone_at - ends:.1f} s until all are freed; prober late by at most {late_ms:.1f} ms"
    return [
        Row(
            "stall",
            f"{name}: longest",
            "ms",
            (max(during),),
            (max(quiet),),
            Target(_LONGEST_MS, at_most=True),
            cpu,
            note=note,
        ),
        Row(
            "stall",
            f"{name}: p99.9",
            "ms",
            (percentile(during, 0.999),),
            (percentile(quiet, 0.999),),
            cpu=cpu,
            note=f"{len(during)} lookups; against {len(quiet)} before",
        ),
    ]
