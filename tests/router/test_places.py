"""Which engines a request may still go to, when others are down, full, ejected or have left."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvplane.client.model import EngineRole
from kvplane.router.admission import Admission, AdmissionLimits
from kvplane.router.discovery import Roles
from kvplane.router.engine import Engine
from kvplane.router.health import HealthLimits
from kvplane.router.pool import EnginePool
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.router.rig import Rig, chat, long_text, rig, until

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
        assert (await asyncio.wait_for(waiting, 60)).status == 200
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
            assert (await asyncio.wait_for(second, 60)).status == 200
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


async def test_whoever_came_first_is_first_whichever_line_it_is_in() -> None:
    engine, order = Engine("http://e:1", prefill=False, decode=True, static=True), list[str]()
    admission = Admission(ONE_EACH, lambda: 0.0)
    engine.outstanding = 1

    async def work(name: str, line: str) -> None:
        await admission.place(line, lambda: engine)
        engine.outstanding += 1
        order.append(name)
        await asyncio.sleep(0)
        engine.outstanding -= 1
        admission.freed()

    lines = {"a": "1", "b": "2", "c": "2", "d": "1", "e": "2"}
    async with asyncio.TaskGroup() as tasks:
        for name, line in lines.items():
            tasks.create_task(work(name, line))
        await until(lambda: admission.queued == len(lines))
        engine.outstanding = 0
        admission.freed()
    assert order == list(lines)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_that_may_not_go_back_holds_up_nobody_who_may(leg: str) -> None:
    async with rig(prefill=2, decode=2, admission=ONE_EACH) as r:
        sick, full = r.prefill if leg == "prefill" else r.decode
        known(r, full).outstanding += 1
        sick.faults.append("500")
        waiting = asyncio.create_task(r.post(chat("hello", conversation="c1")))
        await until(lambda: r.router._admission.queued == 1)
        assert not sick.faults
        await asyncio.wait_for(r.say("hello", "c2"), 60)
        known(r, full).outstanding -= 1
        r.router._admission.freed()
        assert (await waiting).status == 200
        assert len(full.requests) == 1


async def test_a_prefill_engine_that_comes_while_one_waits_is_asked() -> None:
    async with rig(admission=ONE_EACH) as r:
        known(r, r.p).outstanding += 1
        waiting = asyncio.create_task(r.post(chat("hello")))
        await until(lambda: r.router._admission.queued == 1)
        async with FakeEngine(EngineConfig(EngineRole.PREFILL), r.plane) as more:
            r.router.pool.found("dns", {more.url: Roles(prefill=True, decode=False)})
            assert (await asyncio.wait_for(waiting, 60)).status == 200
            assert len(more.requests) == 1
        known(r, r.p).outstanding -= 1


@pytest.mark.parametrize(
    ("asked", "path", "reason"), [({}, "pull", "pulled"), ({"echo": True, "n": 2}, "cold", "holder_full")]
)
async def test_a_direct_turn_whose_holder_is_full_runs_where_there_is_a_place(
    asked: dict[str, object], path: str, reason: str
) -> None:
    async with rig(decode=2, admission=ONE_EACH) as r:
        await r.say(long_text(200))
        await until(lambda: r.plane.locations)
        holder = next(e for e in r.decode if e.requests)
        known(r, holder).outstanding += 1
        body = chat(*r.said["c1"], "next", **asked)
        reply = await asyncio.wait_for(r.post(body), 60)
        assert (reply.status, reply.path, reply.reason) == (200, path, reason)
        assert len(holder.requests) == 1
        known(r, holder).outstanding -= 1
        if path == "pull":
            # It lives where the turn ran; nothing of it is left where it was.
            await until(lambda: r.plane.finished)


async def test_a_direct_turn_that_waits_goes_where_a_place_is_first() -> None:
    async with rig(decode=2, admission=ONE_EACH) as r:
        await r.say(long_text(200))
        await until(lambda: r.plane.locations)
        for engine in r.decode:
            known(r, engine).outstanding += 1
        waiting = asyncio.create_task(r.say("next"))
        await until(lambda: r.router._admission.queued == 1)
        other = next(e for e in r.decode if not e.requests)
        r.router.pool.end(known(r, other))
        assert (await asyncio.wait_for(waiting, 60)).path == "pull"
        assert len(other.requests) == 1
