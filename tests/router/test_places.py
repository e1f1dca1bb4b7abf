"""Which engines a request may still go to, when others are down, full, ejected or have left."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvplane.client.model import EngineRole
from kvplane.router.admission import AdmissionLimits
from kvplane.router.health import HealthLimits
from kvplane.router.pool import Engine, EnginePool
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.router.rig import Rig, chat, rig, until

ONE_EACH = AdmissionLimits(max_engine_requests=1)
DECODE = EngineConfig(EngineRole.DECODE, announces_endpoint=True)
PREFILL = EngineConfig(EngineRole.PREFILL, announces_endpoint=True)


def known(r: Rig, engine: FakeEngine) -> Engine:
    """Return what the router knows of an engine."""
    return next(e for e in r.router.pool.engines if e.url == engine.url)


@pytest.mark.parametrize("fault", ["500", "disconnect"])
async def test_one_that_failed_once_serves_where_all_others_are_down(fault: str) -> None:
    async with rig(decode=2, probe_interval_s=60) as r:
        await r.decode[1].stop()
        await r.router.pool.probe_all()
        r.d.faults.append(fault)
        assert (await r.say("hello")).reason == "decode_failed"
        assert len(r.d.requests) == 2


async def test_one_that_failed_once_serves_where_all_others_are_ejected() -> None:
    async with rig(decode=2, health=HealthLimits(consecutive_failures=1, ejection_s=60)) as r:
        r.router.pool.erred(known(r, r.decode[1]), "broke")
        r.d.faults.append("500")
        assert (await r.say("hello")).reason == "decode_failed"
        assert not r.decode[1].requests


async def test_one_that_failed_once_goes_on_with_what_only_it_has_stored() -> None:
    async with rig(decode=2) as r:
        asked = {"model": "fake", "input": "hello"}
        first = await r.post(asked, to="/v1/responses")
        holder = next(e for e in r.decode if e.requests)
        holder.faults.append("500")
        more = asked | {"input": "next", "previous_response_id": first.body["id"]}
        assert (await r.post(more, to="/v1/responses")).status == 200
        assert len(holder.requests) == 3


async def test_requests_on_an_engine_that_left_and_fell_silent_are_served_by_another() -> None:
    async with rig(
        prefill=[PREFILL], decode=[DECODE] * 2, static=False, poll_interval_s=0.02, probe_interval_s=0.02
    ) as r:
        for engine in r.decode:
            engine.faults.append("hang")
        waiting = asyncio.create_task(r.post(chat("hello")))
        await until(lambda: not all(engine.faults for engine in r.decode))
        silent = next(engine for engine in r.decode if not engine.faults)
        for engine in r.decode:
            engine.faults.clear()
        await r.plane.deregister_engine(silent.engine_id, 0)
        await until(lambda: len(r.router.pool.decode_engines()) == 1)
        assert not waiting.done()  # one that drains may finish what it has
        silent.healthy = False
        assert (await asyncio.wait_for(waiting, 5)).status == 200
        await until(lambda: not r.router.pool._leaving)


async def test_an_engine_that_registers_takes_what_waits() -> None:
    async with rig(
        prefill=[PREFILL], decode=[DECODE], static=False, poll_interval_s=0.02, admission=ONE_EACH
    ) as r:
        r.d.gate.clear()
        first = asyncio.create_task(r.post(chat("hello")))
        await until(lambda: r.d.requests)
        second = asyncio.create_task(r.post(chat("hello", conversation="c2")))
        await until(lambda: r.router._admission.queued == 1)
        async with FakeEngine(DECODE, r.plane):
            assert (await asyncio.wait_for(second, 5)).status == 200
        r.d.gate.set()
        assert (await first).status == 200


async def test_an_ejected_engine_without_a_place_is_not_tried() -> None:
    now = 100.0
    async with aiohttp.ClientSession() as session:
        pool = EnginePool(
            session,
            prefill_urls=(),
            decode_urls=("http://a:1", "http://b:1"),
            probe_interval_s=1,
            monotonic=lambda: now,
            health=HealthLimits(consecutive_failures=1, ejection_s=5),
            max_engine_requests=2,
        )
        sick, well = pool.engines
        sick.outstanding = 2
        pool.erred(sick, "broke")
        now += 6
        assert pool.choose(pool.engines) is well
        sick.outstanding = 1
        assert pool.choose(pool.engines) is sick
