"""Bounded queues and deadlines: what is not taken on is told when to come back."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.admission import Admission, AdmissionLimits, OverloadedError
from kvplane.router.deadline import deadline
from kvplane.router.engine import Engine as PoolEngine
from tests.router.rig import CHAT, LIMITS_S, chat, long_text, rig, until


@dataclass(eq=False)
class Engine:
    outstanding: int = 0


async def test_places_are_given_first_come_first_served() -> None:
    engine, order = Engine(), list[int]()
    admission = Admission(AdmissionLimits(max_engine_requests=1), lambda: 0.0)

    async def work(number: int) -> None:
        taken = await admission.place("d", lambda: engine)
        assert taken is engine
        engine.outstanding += 1
        assert engine.outstanding == 1
        order.append(number)
        await asyncio.sleep(0)
        engine.outstanding -= 1
        admission.freed()

    await asyncio.gather(*(work(number) for number in range(20)))
    assert order == list(range(20))
    assert admission.queued == 0


async def test_one_that_gives_up_does_not_stop_the_line() -> None:
    engine = Engine(1)
    admission = Admission(AdmissionLimits(max_engine_requests=1), lambda: 0.0)
    tasks = [asyncio.create_task(admission.place("d", lambda: engine)) for _ in range(3)]
    await until(lambda: admission.queued == 3)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    engine.outstanding = 0
    admission.freed()
    assert await tasks[1] is engine
    assert await tasks[2] is engine


async def test_lines_of_different_kinds_do_not_wait_for_each_other() -> None:
    full, free = Engine(1), Engine()
    admission = Admission(AdmissionLimits(max_engine_requests=1), lambda: 0.0)
    waiting = asyncio.create_task(admission.place("prefill", lambda: full))
    await until(lambda: admission.queued == 1)
    assert await admission.place("decode", lambda: free) is free
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_the_queue_is_bounded_in_length_and_time() -> None:
    engine = Engine(1)
    limits = AdmissionLimits(max_engine_requests=1, max_queued=1)
    admission = Admission(limits, lambda: 0.0)
    first = asyncio.create_task(admission.place("d", lambda: engine))
    await until(lambda: admission.queued == 1)
    with pytest.raises(OverloadedError) as full:
        await admission.place("d", lambda: engine)
    assert full.value.status == 429
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    admission = Admission(replace(limits, queue_timeout_s=0.05), lambda: 0.0)
    with pytest.raises(OverloadedError) as late:
        await admission.place("d", lambda: engine)
    assert late.value.status == 503
    assert admission.queued == 0


@given(gaps=st.lists(st.floats(0, 1000), max_size=20))
async def test_retry_after_is_whole_seconds_from_1_to_60(gaps: list[float]) -> None:
    now = 0.0
    admission = Admission(AdmissionLimits(), lambda: now)
    for gap in gaps:
        now += gap
        async with admission:
            pass
    assert 1 <= admission.retry_after_s() <= 60


@pytest.mark.parametrize("wrong", [{"max_requests": -1}, {"queue_timeout_s": 0.0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdmissionLimits(**wrong)  # type: ignore[arg-type]  # the test varies the field


@pytest.mark.parametrize(
    ("headers", "limit", "begin", "whole"),
    [
        ({}, 0, None, None),
        ({}, 30, 30, 30),
        ({"x-request-timeout": "2.5"}, 30, 2.5, 2.5),
        ({"x-request-timeout": "90"}, 30, 30, 30),
        ({"x-envoy-expected-rq-timeout-ms": "1500"}, 0, 1.5, 1.5),
        ({"x-stainless-read-timeout": "600"}, 0, 600, None),
        ({"x-stainless-timeout": "5", "x-request-timeout": "9"}, 0, 5, 9),
        ({"x-request-timeout": "none", "x-stainless-read-timeout": "nan"}, 0, None, None),
        ({"x-request-timeout": "-1"}, 0, None, None),
        ({"x-request-timeout": "inf"}, 0, None, None),
    ],
)
def test_deadlines(headers: dict[str, str], limit: float, begin: float | None, whole: float | None) -> None:
    found = deadline(headers, limit)
    assert (found.begin_s, found.whole_s) == (begin, whole)
    assert not math.isnan(found.begin_s or 0)


# With engines


async def test_more_than_max_requests_are_429_and_get_in_again_later() -> None:
    async with rig(admission=AdmissionLimits(max_requests=2)) as r:
        r.d.gate.clear()
        tasks = [asyncio.create_task(r.post(chat("hello", conversation=f"c{i}"))) for i in range(2)]
        await until(lambda: len(r.d.requests) == 2)
        refused = await r.post(chat("hello"))
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.reason == "overloaded"
        assert refused.body["error"]["code"] == 429
        r.d.gate.set()
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200, 200]
        assert (await r.post(chat("hello"))).status == 200
        assert (await r.metric("kvplane_router_overloaded_total"))['{status="429"}'] == 1


async def test_requests_wait_for_a_place_on_an_engine() -> None:
    async with rig(admission=AdmissionLimits(max_engine_requests=1)) as r:
        r.d.gate.clear()
        tasks = [asyncio.create_task(r.post(chat("hello", conversation=f"c{i}"))) for i in range(4)]
        prefill = next(e for e in r.router.pool.engines if e.prefill)
        await until(lambda: len(r.p.requests) == 4 and not prefill.outstanding)
        await until(lambda: r.d.requests and r.router._admission.queued == 3)
        assert len(r.d.requests) == 1
        assert (await r.metric("kvplane_router_queued"))[""] == 3
        r.d.gate.set()
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 4


@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
async def test_one_place_that_is_free_is_for_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(decode=3, admission=AdmissionLimits(max_engine_requests=1)) as r:
        names = [f"c{number}" for number in range(5)]
        for name in names:
            await r.say(long_text(200, name), name)
        await until(lambda: len(r.plane.locations) == len(names))
        pool, most, claim = r.router.pool, dict[str, int](), r.plane.claim_location
        begin = pool.begin

        def counted(engine: PoolEngine) -> None:
            begin(engine)
            most[engine.url] = max(most.get(engine.url, 0), engine.outstanding)

        async def slow_claim(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.01)
            return await claim(*args, **options)

        monkeypatch.setattr(pool, "begin", counted)
        monkeypatch.setattr(r.plane, "claim_location", slow_claim)
        replies = await asyncio.gather(*(r.say(long_text(30, "x"), name, path=path) for name in names))
        assert [reply.path for reply in replies] == [path] * len(names)
        assert set(most.values()) == {1}
        assert [engine.outstanding for engine in pool.engines] == [0] * 4
        if path == "pull":
            assert len(r.plane.claim_requests) == len(names)


async def test_a_turn_that_goes_away_while_it_claims_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(admission=AdmissionLimits(max_engine_requests=1)) as r:
        await r.say(long_text(200))
        await until(lambda: r.plane.locations)
        prefill = next(engine for engine in r.router.pool.engines if engine.prefill)
        monkeypatch.setattr(r.plane, "claim_location", lambda *args, **options: asyncio.Event().wait())
        leaving = asyncio.create_task(r.say(long_text(30, "x"), path="pull"))
        await until(lambda: prefill.outstanding == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: prefill.outstanding == 0)
        assert (await r.post(chat("hello", conversation="c2"))).status == 200


async def test_a_place_that_does_not_come_is_a_503() -> None:
    limits = AdmissionLimits(max_engine_requests=1, queue_timeout_s=0.1)
    async with rig(admission=limits) as r:
        r.d.gate.clear()
        first = asyncio.create_task(r.post(chat("hello")))
        await until(lambda: r.d.requests)
        late = await r.post(chat("hello", conversation="c2"))
        assert (late.status, late.reason) == (503, "overloaded")
        assert int(late.headers["retry-after"]) >= 1
        r.d.gate.set()
        assert (await first).status == 200


@pytest.mark.parametrize("header", ["x-request-timeout", "x-stainless-read-timeout"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_clients_deadline_ends_its_request_on_the_engines(header: str, leg: str) -> None:
    async with rig() as r:
        engine = r.p if leg == "prefill" else r.d
        engine.faults.append("hang")
        for limit_s in LIMITS_S:
            reply = await r.post(chat("hello"), headers={header: str(limit_s)})
            assert (reply.status, reply.reason) == (504, "deadline")
            if not engine.faults:
                break
        await until(lambda: engine.aborted == 1)


@pytest.mark.parametrize("to", [CHAT, "/tokenize"])
async def test_a_limit_that_is_no_number_is_refused(to: str) -> None:
    async with rig() as r:
        reply = await r.post(chat("hello"), to=to, headers={"x-request-timeout": "30s"})
        assert reply.status == 400
        assert "x-request-timeout must be a number of seconds" in json.dumps(reply.body)
        for harmless in ("none", "", "1e3"):
            assert (await r.post(chat("hello"), headers={"x-request-timeout": harmless})).status == 200


async def test_the_routers_own_deadline_cuts_a_stream_so_that_it_shows() -> None:
    for limit_s in LIMITS_S:
        async with rig(request_timeout_s=limit_s) as r:
            r.d.gate.clear()
            async with r.http.post(r.url + CHAT, json=chat("hello", stream=True)) as response:
                if response.status == 504:  # before the stream began
                    continue
                assert response.status == 200
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            await until(lambda: r.d.aborted == 1)
            return
    raise AssertionError("no stream began")


async def test_an_sdks_timeout_is_for_the_beginning_of_a_stream_only() -> None:
    async with rig() as r:
        r.d.gate.clear()
        body = chat("hello", stream=True)
        for limit_s in LIMITS_S:
            headers = {"x-stainless-read-timeout": str(limit_s)}
            async with r.http.post(r.url + CHAT, json=body, headers=headers) as response:
                if response.status == 504:  # before the stream began
                    continue
                await response.content.readany()
                await asyncio.sleep(2 * limit_s)
                r.d.gate.set()
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
                return
    raise AssertionError("no stream began")
