"""Refusals that are one engine's only: another is asked, and the client hears of it where none is left."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.client.model import EngineRole
from kvplane.router.health import HealthLimits
from kvplane.router.places import MOST_ASKED
from tests.fakes.core import EngineConfig
from tests.router.rig import CHAT, chat, expected_reply, long_text, rig, until
from tests.router.stub import WELL, Answer, Stub, front

BUSY = Answer({"error": {"message": "busy"}}, 429, [("Retry-After", "7")])
NEVER = HealthLimits(consecutive_failures=0, min_requests=1000)


def serves(engine: Stub, *models: str) -> Stub:
    """Have an engine refuse what it does not serve, as vLLM does: all but `models`, or what it says."""

    def answer(body: Any) -> Answer:
        model = body["model"]
        if model in (models or engine.models):
            return Answer()
        message = f"The model `{model}` does not exist."
        return Answer({"error": {"message": message, "param": "model", "code": 404}}, 404)

    engine.answer = answer
    return engine


@pytest.mark.parametrize("stream", [False, True])
async def test_where_one_is_busy_another_serves(stream: bool) -> None:
    well = Answer(b'data: {"choices": []}\n\n', events=True) if stream else Answer()
    busy, idle = (Stub(BUSY), Stub(BUSY)), Stub(well)
    async with front(*busy, idle, health=NEVER) as f:
        assert [(await f.raw(stream=stream))[0] for _ in range(6)] == [200] * 6
        assert (idle.asked, all(engine.asked for engine in busy)) == (6, True)


async def test_where_all_are_busy_they_say_so_once_each() -> None:
    engines = [Stub(BUSY), Stub(BUSY)]
    async with front(*engines, health=NEVER) as f:
        reply = await f.post()
        assert (reply.status, reply.headers["retry-after"]) == (429, "7")
        assert [engine.asked for engine in engines] == [1, 1]


@pytest.mark.parametrize("to", [CHAT, "/v1/embeddings"])
async def test_where_very_many_are_busy_a_few_of_them_say_so(to: str) -> None:
    engines = [Stub(BUSY) for _ in range(12)]
    async with front(*engines, health=NEVER) as f:
        status, headers, _ = await f.raw(to)
        assert (status, dict(headers)["retry-after"]) == (429, "7")
        assert sum(engine.asked for engine in engines) == MOST_ASKED


async def test_where_very_many_prefill_engines_are_busy_a_few_of_them_say_so() -> None:
    engines = [Stub(BUSY) for _ in range(12)]
    async with front(decode := Stub(Answer()), prefill=tuple(engines), health=NEVER) as f:
        assert (await f.raw())[0] == 429
        assert (sum(engine.asked for engine in engines), decode.asked) == (MOST_ASKED, 0)


async def test_where_one_prefill_engine_is_busy_another_computes() -> None:
    engines = [Stub(BUSY), Stub(BUSY), Stub(Answer({**WELL, "kv_transfer_params": None}))]
    async with front(Stub(Answer()), prefill=tuple(engines), health=NEVER) as f:
        assert [(await f.post()).status for _ in range(6)] == [200] * 6
        assert engines[2].asked == 6
        engines[2].answer = BUSY
        reply = await f.post()
        assert (reply.status, reply.headers["retry-after"]) == (429, "7")


async def test_a_holder_that_is_busy_is_left_and_read_from() -> None:
    async with rig(decode=2) as r:
        await r.say(long_text(200))
        holder = next(e for e in r.decode if e.requests)
        holder.faults.append("429")
        reply = await r.say("next", path="auto")
        assert (reply.path, len(holder.requests)) == ("pull", 2)
        assert not r.plane.claims


async def test_a_busy_prefill_engine_frees_the_claim() -> None:
    prefill = [EngineConfig(EngineRole.PREFILL, prefix_caching=False) for _ in range(2)]
    async with rig(prefill=prefill) as r:
        await r.say(long_text(300))
        for engine in r.prefill:
            engine.faults.append("429")
        body = chat(*r.said["c1"], "more")
        reply = await r.post(body, path="pull")
        assert reply.status == 429
        await until(lambda: not r.plane.claims)
        assert (await r.post(body)).text == expected_reply(body)


async def test_a_model_that_an_engine_no_longer_serves_is_served_by_another() -> None:
    engines = [serves(Stub(BUSY, "a")), serves(Stub(BUSY, "a"))]
    async with front(*engines, probe_interval_s=60) as f:
        engines[1].models = ("b",)
        for _ in range(4):
            assert (await f.post(model="a")).status == 200
        # It was asked anew what it serves.
        await until(lambda: {"b"} in [e.models for e in f.router.pool.engines])
        assert engines[1].asked == 1
        assert (await f.post(model="b")).status == 200


async def test_a_model_that_a_prefill_engine_no_longer_serves_is_computed_without_it() -> None:
    prefill, decode = serves(Stub(BUSY, "a")), serves(Stub(BUSY, "a"))
    async with front(decode, prefill=(prefill,), probe_interval_s=60) as f:
        prefill.models = ("b",)
        assert (await f.post(model="a")).status == 200
        await until(lambda: {"b"} in [e.models for e in f.router.pool.engines])
        assert (await f.post(model="a")).status == 200
        assert prefill.asked == 1


async def test_a_model_that_nobody_serves_is_one_404_and_nobody_is_asked_what_he_serves() -> None:
    engines = [serves(Stub(BUSY, "a")), serves(Stub(BUSY, "a"))]
    async with front(*engines, probe_interval_s=60) as f:
        reply = await f.post(model="c")
        assert (reply.status, reply.reason) == (404, "model_not_served")
        assert sum(engine.asked for engine in engines) == 1
        assert [engine.listed for engine in engines] == [1, 1]
        for engine in engines:
            engine.models = ("b",)
        reply = await f.post(model="a")
        assert (reply.status, reply.body["error"]["param"]) == (404, "model")


def unsaid(model: str) -> Stub:
    """Return an engine that serves a model and does not say so."""
    engine = serves(Stub(BUSY), model)
    engine.models = ()
    return engine


@pytest.mark.parametrize("to", [CHAT, "/v1/embeddings"])
async def test_of_very_many_that_do_not_say_what_they_serve_a_few_are_asked_for_what_nobody_serves(
    to: str,
) -> None:
    engines = [unsaid("a") for _ in range(2 * MOST_ASKED + 2)]
    async with front(*engines, health=NEVER, probe_interval_s=60) as f:
        asked = []
        for _ in range(5):
            before = sum(engine.asked for engine in engines)
            assert (await f.raw(to, model="c"))[0] == 404
            asked.append(sum(engine.asked for engine in engines) - before)
        # What they said is remembered: each is asked once, and then one for each request.
        assert asked == [MOST_ASKED, MOST_ASKED, 2, 1, 1]


async def test_who_serves_it_is_found_among_very_many_that_do_not_say_so() -> None:
    prefill = tuple(unsaid("a") for _ in range(MOST_ASKED - 1))
    engines = [*(unsaid("a") for _ in range(MOST_ASKED + 1)), unsaid("b")]
    async with front(*engines, prefill=prefill, health=NEVER, probe_interval_s=60) as f:
        found = [(await f.raw(model="b"))[0] for _ in range(4)]
        assert (found[0] in (200, 404), found[1:]) == (True, [200, 200, 200])
        # No prompt is computed by who lacks the model, nor is it sent there again.
        assert [engine.asked for engine in prefill] == [1] * len(prefill)
        assert all(engine.asked <= 1 for engine in engines[:-1])


async def test_passed_requests_too_go_where_one_is_not_busy() -> None:
    engines = [Stub(BUSY), Stub(BUSY), Stub(Answer({"tokens": [1]}))]
    async with front(*engines, health=NEVER) as f:
        assert [(await f.post("/tokenize")).status for _ in range(6)] == [200] * 6
        assert engines[2].asked == 6
        engines[2].answer = BUSY
        reply = await f.post("/tokenize")
        assert (reply.status, reply.headers["retry-after"], reply.body) == (429, "7", BUSY.body)
        assert all(engine.outstanding == 0 for engine in f.router.pool.engines)


async def test_passed_requests_too_go_where_the_model_is_still_served() -> None:
    engines = [serves(Stub(BUSY, "a")), serves(Stub(BUSY, "a"))]
    async with front(*engines, probe_interval_s=60) as f:
        engines[1].models = ("b",)
        assert [(await f.post("/tokenize", model="a")).status for _ in range(4)] == [200] * 4
        await until(lambda: {"b"} in [e.models for e in f.router.pool.engines])
        engines[0].models = ("b",)
        reply = await f.post("/tokenize", model="a")
        assert (reply.status, reply.body["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_mistake_told_in_a_stream_is_the_clients_with_its_status(status: int) -> None:
    error = {"message": "too long", "type": "BadRequestError", "param": None, "code": status}
    engine = Stub(Answer(f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode(), events=True))
    async with front(engine) as f:
        reply = await f.post(stream=True)
        assert (reply.status, reply.body["error"]) == (status, error)
        assert reply.headers["content-type"] == "application/json"
        assert engine.asked == 1


@pytest.mark.parametrize("code", [None, 200, 500, "400", True, 399])
async def test_any_other_error_in_a_stream_is_the_engines(code: object) -> None:
    error = {"error": {"message": "broken", "code": code}}
    engine = Stub(Answer(f"data: {json.dumps(error)}\n\n".encode(), events=True))
    async with front(engine) as f:
        assert (await f.post(stream=True)).status == 502
        assert engine.asked == 2


async def test_an_engine_that_is_busy_in_a_stream_is_left_for_another() -> None:
    busy = Answer(b'data: {"error": {"message": "busy", "code": 429}}\n\n', events=True)
    engines = [Stub(busy), Stub(Answer(b'data: {"choices": []}\n\n', events=True))]
    async with front(*engines, health=NEVER) as f:
        assert [(await f.raw(stream=True))[0] for _ in range(4)] == [200] * 4
        assert engines[1].asked == 4


async def test_what_a_busy_engine_may_have_is_not_said_to_be_nowhere() -> None:
    unknown = Answer({"error": {"message": "Response with id 'mine' not found.", "code": 404}}, 404)
    engines = [Stub(BUSY), Stub(unknown)]
    async with front(*engines, health=NEVER) as f:
        asked = [await f.raw("/v1/responses/mine/cancel") for _ in range(4)]
        assert [status for status, _, _ in asked] == [429] * 4
        engines[0].answer = unknown
        assert (await f.raw("/v1/responses/mine/cancel"))[0] == 404


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_passed_requests_too_go_where_an_engine_is_there(status: int) -> None:
    away = Answer({"error": {"message": "away"}}, status)
    engines = [Stub(away), Stub(Answer({"tokens": [1]}))]
    async with front(*engines, health=NEVER) as f:
        assert [(await f.post("/tokenize")).status for _ in range(4)] == [200] * 4
        engines[1].answer = away
        asked = sum(engine.asked for engine in engines)
        reply = await f.post("/tokenize")
        assert (reply.status, reply.body) == (status, away.body)
        assert sum(engine.asked for engine in engines) == asked + 2


async def test_passed_refusals_say_when_to_try_again() -> None:
    async with front(Stub(Answer({"error": {"message": "busy"}}, 429)), health=NEVER) as f:
        assert (await f.post("/tokenize")).headers["retry-after"] == "1"


async def test_the_mistakes_of_a_request_go_to_one_engine() -> None:
    engines = [Stub(Answer({"error": {"message": "no"}}, status)) for status in (500, 500)]
    async with front(*engines, health=NEVER) as f:
        assert (await f.post("/tokenize")).status == 500
        assert sum(engine.asked for engine in engines) == 1
