"""Engines that are killed or drain, routers that stop: what is open finishes, and nobody hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from kvplane.client.model import EngineId, EngineRole
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.router.rig import CHAT, Body, Rig, chat, expected_reply, long_text, rig, until
from tests.router.test_streams import text_of

DONE = b"data: [DONE]\n\n"


async def stream(r: Rig, body: Body) -> tuple[int, bool]:
    """Return a stream's status, and whether it came to its end; 0 for a connection that broke before."""
    try:
        async with r.http.post(r.url + CHAT, json={**body, "stream": True}) as response:
            data = await response.read()
            return response.status, data.endswith(DONE) and text_of(data) == expected_reply(body)
    except aiohttp.ClientPayloadError:
        return 200, False
    except aiohttp.ClientError:
        return 0, False


def engine_at(r: Rig, engine: FakeEngine) -> bool:
    return next(e.up for e in r.router.pool.engines if e.url == engine.url)


# Engines


@pytest.mark.parametrize("same_id", [True, False])
async def test_case_39_an_engine_killed_and_back_on_its_address(same_id: bool) -> None:
    decode = [EngineConfig(EngineRole.DECODE, announces_endpoint=True)] * 2
    async with rig(decode=decode, poll_interval_s=0.02, probe_interval_s=0.05) as r, asyncio.timeout(60):
        for index in range(6):
            await r.say(long_text(100), f"c{index}")
        killed = r.d
        held = {key for key, location in r.plane.locations.items() if location.endpoint == killed.url}
        assert held
        killed.gate.clear()
        open_turns = [
            asyncio.create_task(stream(r, chat(long_text(100), conversation=f"open{index}")))
            for index in range(4)
        ]
        await until(lambda: len(killed.requests) >= len(held) + 2)
        await killed.stop()
        killed.gate.set()
        # Nobody hangs: what had a first byte ends, without looking whole; the rest is served by the other.
        outcomes = await asyncio.gather(*open_turns)
        assert {status for status, _ in outcomes} == {200}
        assert [whole for _, whole in outcomes].count(False) <= 2
        if not same_id:
            await r.plane.deregister_engine(killed.engine_id, 0)
            killed.engine_id = EngineId("decode-new")
        await killed.start()
        assert not any(location.endpoint == killed.url for location in r.plane.locations.values())
        await until(lambda: engine_at(r, killed))
        # What it held is computed again, and no turn fails on what is no longer there.
        for index in range(6):
            await r.say("next", f"c{index}")
        again = [await r.say("more", f"c{index}") for index in range(6)]
        assert {reply.path for reply in again} == {"direct"}


async def test_case_40_an_engine_that_drains_finishes_and_gets_nothing_new() -> None:
    decode = [EngineConfig(EngineRole.DECODE, announces_endpoint=True)] * 2
    async with rig(decode=decode, poll_interval_s=0.02) as r:
        await r.say(long_text(200))
        drained = next(e for e in r.decode if e.requests)
        drained.gate.clear()
        tasks = [asyncio.create_task(stream(r, chat("hello", conversation=f"o{i}"))) for i in range(2)]
        await until(lambda: len(drained.requests) == 2)
        record = r.plane.engines[drained.engine_id]
        r.plane.engines[drained.engine_id] = replace(record, draining=True)
        engine = next(e for e in r.router.pool.engines if e.url == drained.url)
        await until(lambda: engine.draining)
        seen = len(drained.requests)
        for index in range(4):
            await r.say("hello", f"new{index}")
        # What it holds is pulled while it may still be.
        assert (await r.say("next")).path == "pull"
        assert len(drained.requests) == seen
        drained.gate.set()
        assert await asyncio.gather(*tasks) == [(200, True)] * 2


async def test_engines_named_by_url_that_drain_get_nothing_new_once_it_is_known_which_they_are() -> None:
    async with rig(prefill=2, decode=2, poll_interval_s=0.02) as r:
        await r.say(long_text(200))
        assert (await r.say("next")).path == "direct"  # so the router has seen where it lies
        used = [next(e for e in engines if e.requests) for engines in (r.prefill, r.decode)]
        for engine in used:
            record = r.plane.engines[engine.engine_id]
            assert not record.spec.endpoint
            r.plane.engines[engine.engine_id] = replace(record, draining=True)
        known = [next(e for e in r.router.pool.engines if e.url == engine.url) for engine in used]
        await until(lambda: all(engine.draining for engine in known))
        seen = [len(engine.requests) for engine in used]
        for index in range(4):
            await r.say("hello", f"new{index}")
        assert [len(engine.requests) for engine in used] == seen
        for engine in used:
            record = r.plane.engines[engine.engine_id]
            r.plane.engines[engine.engine_id] = replace(record, draining=False)
        await until(lambda: not any(engine.draining for engine in known))


async def test_that_all_decode_engines_drain_is_said() -> None:
    decode = [EngineConfig(EngineRole.DECODE, announces_endpoint=True)] * 2
    async with rig(decode=decode, poll_interval_s=0.02) as r:
        for engine in r.decode:
            record = r.plane.engines[engine.engine_id]
            r.plane.engines[engine.engine_id] = replace(record, draining=True)
        await until(lambda: all(e.draining for e in r.router.pool.engines if e.decode))
        async with r.http.get(r.url + "/ready") as response:
            assert response.status == 503
            (said,) = (await response.json())["problems"]
            assert said.startswith("all decode engines that answer drain")
        reply = await r.post(chat("hello"))
        assert (reply.status, reply.reason) == (503, "decode_unreachable")
        assert reply.body["error"]["message"].startswith("All decode engines that answer drain: start one")


async def test_case_40_a_router_told_to_stop_during_a_claim_finishes_the_turn() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        r.d.gate.clear()
        task = asyncio.create_task(r.say("next", path="pull"))
        await until(lambda: r.plane.claims or r.plane.finished)
        stopping = asyncio.create_task(r.router.stop())
        await asyncio.sleep(0.05)
        assert not task.done()
        with pytest.raises(aiohttp.ClientConnectorError):
            await r.http.get(r.url + "/health")
        r.d.gate.set()
        assert (await task).reason == "pulled"
        await stopping
        assert r.plane.finished
        assert not r.plane.claims


async def test_a_stream_that_outlasts_the_drain_is_cut_then_and_not_after_twice_the_time() -> None:
    async with rig(drain_timeout_s=5.0) as r:
        r.d.gate.clear()
        task = asyncio.create_task(stream(r, chat("hello")))
        await until(lambda: r.d.requests)
        async with asyncio.timeout(9.5):
            await r.router.stop()
        assert await task in [(200, False), (0, False)]


async def test_case_40_a_drain_during_a_prefill_that_hangs_is_bounded() -> None:
    async with rig(drain_timeout_s=0.2) as r:
        await r.say(long_text(200))
        r.p.faults.append("hang")
        task = asyncio.create_task(r.post(chat("next"), path="pull"))
        await until(lambda: len(r.p.requests) == 2)
        async with asyncio.timeout(60):
            await r.router.stop()
        with pytest.raises(aiohttp.ClientError):
            await task
        await until(lambda: r.p.aborted == 1)


async def test_case_40_for_a_while_a_router_that_stops_says_so_and_goes_on() -> None:
    async with rig(drain_grace_s=3.0) as r:
        stopping = asyncio.create_task(r.router.stop())
        await asyncio.sleep(0.05)
        async with r.http.get(r.url + "/ready") as response:
            assert response.status == 503
            assert (await response.json())["draining"]
        assert (await r.post(chat("hello"))).status == 200
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await r.http.get(r.url + "/health")


async def test_case_41_a_decode_engine_killed_under_load_costs_only_what_runs_there() -> None:
    decode = [EngineConfig(EngineRole.DECODE, token_gap_s=0.01)] * 3
    async with rig(decode=decode) as r, asyncio.timeout(30):
        tasks = []
        for index in range(40):
            tasks.append(asyncio.create_task(stream(r, chat("hello", conversation=f"c{index}"))))
            await asyncio.sleep(0.02)
            if index == 20:
                running = next(e for e in r.router.pool.engines if e.url == r.d.url).outstanding
                await r.d.stop()
        outcomes = await asyncio.gather(*tasks)
        broken = [outcome for outcome in outcomes if outcome != (200, True)]
        assert len(broken) <= running
        # Those saw the beginning of an answer; everybody else had a whole one.
        assert set(broken) <= {(200, False)}
        assert not engine_at(r, r.d)


async def test_case_48_256_streams_at_once_all_come_to_their_end() -> None:
    # Without probes: on a busy machine an engine that answers none in time has its requests sent elsewhere.
    async with rig(prefill=2, decode=2, probe_interval_s=600) as r, asyncio.timeout(60):
        bodies = [chat(f"hello {index}", conversation=f"c{index}", max_tokens=32) for index in range(256)]
        for engine in r.decode:
            engine.gate.clear()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            crowd = replace(r, http=http)
            tasks = [asyncio.create_task(stream(crowd, body)) for body in bodies]
            # All are open at the same time before any may end.
            await until(lambda: sum(len(e.requests) for e in r.decode) == 256)
            for engine in r.decode:
                engine.gate.set()
            assert await asyncio.gather(*tasks) == [(200, True)] * 256
        assert sorted(len(e.requests) for e in r.decode) == [128, 128]
        await until(lambda: all(e.outstanding == 0 for e in r.router.pool.engines))


# Who is asked instead


async def test_a_prefill_engine_that_dies_is_replaced_by_another_then_by_decode() -> None:
    async with rig(prefill=2) as r:
        await r.say(long_text(200))
        await r.prefill[0].stop()
        for index in range(3):
            assert (await r.say("hello", f"a{index}")).status == 200
        assert len(r.prefill[1].requests) >= 3
        await r.prefill[1].stop()
        for index in range(3):
            assert (await r.say("hello", f"b{index}")).reason in ("prefill_failed", "no_prefill_engine")
        # A holder still serves its own directly.
        assert (await r.say("next")).path == "direct"


async def test_a_control_plane_that_goes_away_takes_no_stream_along() -> None:
    async with rig() as r:
        r.d.gate.clear()
        task = asyncio.create_task(stream(r, chat("hello")))
        await until(lambda: r.d.requests)
        r.plane.down = True
        r.d.gate.set()
        assert await task == (200, True)
        reply = await r.post(chat("hello", conversation="c2"))
        assert (reply.status, reply.path, reply.reason) == (200, "cold", "plane_unavailable")
