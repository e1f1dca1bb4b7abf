"""What an engine is asked besides turns: models, tokens, embeddings, stored responses."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import aiohttp
import pytest
from yarl import URL

from kvplane.client.model import EngineRole
from kvplane.router.admission import AdmissionLimits
from kvplane.router.response_id import new_response_id
from tests.fakes.core import EngineConfig
from tests.router.rig import LIMITS_S, Rig, chat, rig, until

A = EngineConfig(EngineRole.DECODE, model="a", adapters=("a-lora",))
B = EngineConfig(EngineRole.DECODE, model="b")
P_A = EngineConfig(EngineRole.PREFILL, model="a", adapters=("a-lora",))
P_B = EngineConfig(EngineRole.PREFILL, model="b")


async def test_models_are_the_union_over_engines() -> None:
    async with rig(prefill=[P_A], decode=[A, B]) as r:
        async with r.http.get(r.url + "/v1/models") as response:
            listed = await response.json()
        assert listed["object"] == "list"
        assert [(entry["id"], entry["root"]) for entry in listed["data"]] == [
            ("a", "a"),
            ("a-lora", "a"),
            ("b", "b"),
        ]
        await r.decode[1].stop()
        async with r.http.get(r.url + "/v1/models") as response:
            assert [entry["id"] for entry in (await response.json())["data"]] == ["a", "a-lora"]
        async with r.http.get(r.url + "/v1/models/a-lora") as response:
            assert (await response.json())["root"] == "a"
        async with r.http.get(r.url + "/v1/models/x/y") as response:
            assert response.status == 404
            assert (await response.json())["error"]["param"] == "model"


@pytest.mark.parametrize("model", ["a", "a-lora", "b"])
async def test_a_request_goes_to_engines_of_its_model(model: str) -> None:
    async with rig(prefill=[P_A, P_B], decode=[A, B]) as r:
        for index in range(3):
            assert (await r.post(chat("hello", model=model, conversation=f"c{index}"))).status == 200
        wanted = 1 if model == "b" else 0
        for engines in (r.prefill, r.decode):
            assert len(engines[wanted].requests) == 3
            assert not engines[1 - wanted].requests


async def test_a_model_that_nobody_serves_is_a_404_in_openais_shape() -> None:
    async with rig(prefill=[P_A], decode=[A, B]) as r:
        reply = await r.post(chat("hello", model="c"))
        assert reply.status == 404
        assert "`c` does not exist" in reply.body["error"]["message"]
        assert not r.p.requests


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"])
async def test_what_generates_nothing_is_passed_unchanged(path: str) -> None:
    async with rig(prefill=[P_A], decode=[A, B]) as r:
        raw = b'{ "model":"b", "input" : ["x", 1.0], "unknown":1e2}'
        async with r.http.post(f"{r.url}{path}?x=%20y", data=raw) as response:
            assert response.status == 200
            assert response.headers["x-engine"] == "yes"
            answer = await response.json()
        assert answer["engine"] == r.decode[1].engine_id
        assert r.decode[1].passed == [(f"{path}?x=%20y", raw)]


async def test_forms_are_passed_as_they_are() -> None:
    async with rig(prefill=[P_A], decode=[A, B]) as r:
        form = aiohttp.FormData()
        form.add_field("file", b"\x00\xff" * 100_000, filename="a.wav")
        form.add_field("model", "b")
        async with r.http.post(r.url + "/v1/audio/transcriptions", data=form) as response:
            assert (await response.json())["type"].startswith("multipart/form-data; boundary=")
        assert len(r.decode[1].passed) == 1
        assert b"\x00\xff" * 100_000 in r.decode[1].passed[0][1]


async def test_an_engines_error_is_passed_on_and_a_dead_one_passed_over() -> None:
    async with rig(prefill=0, decode=2) as r:
        body = {"model": "fake", "prompt": "x"}
        for engine in r.decode:
            engine.faults.append("422")
        async with r.http.post(r.url + "/tokenize", json=body) as response:
            assert response.status == 422
        for engine in r.decode:
            engine.faults.clear()
        await r.decode[0].stop()
        for _ in range(3):
            async with r.http.post(r.url + "/tokenize", json=body) as response:
                assert response.status == 200
        await r.decode[1].stop()
        async with r.http.post(r.url + "/tokenize", json=body) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
        async with r.http.get(r.url + "/v1/models") as response:
            assert response.status == 503
        assert all(engine.outstanding == 0 for engine in r.router.pool.engines)


async def test_params_are_dropped_there_too_case_33() -> None:
    async with rig() as r:
        body: dict[str, Any] = {"model": "fake", "prompt": "kv_transfer_params"}
        sent = body | {"kv_transfer_params": {"a": 1}}
        async with r.http.post(r.url + "/tokenize", json=sent) as response:
            assert response.status == 200
        raw = next(engine.passed[0][1] for engine in (r.p, r.d) if engine.passed)
        assert json.loads(raw) == body


async def test_params_are_dropped_however_their_name_is_written() -> None:
    async with rig() as r:
        sent = rb'[{"kv\u005ftransfer_params": {"a": 1}, "input": "x"}]', rb'{"ec\u005ftransfer_params": 1}'
        for raw in sent:
            await r.post(raw, to="/v1/embeddings")
        passed = [json.loads(raw) for engine in (r.p, r.d) for _, raw in engine.passed]
        assert sorted(passed, key=str) == [[{"input": "x"}], {}]


async def test_version_is_the_engines_and_the_routers() -> None:
    async with rig() as r, r.http.get(r.url + "/version") as response:
        answer = await response.json()
        assert answer["version"] == "0.32.0-fake"
        assert answer["kvplane"]


@pytest.mark.parametrize("path", ["/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/pause"])
async def test_what_changes_an_engine_is_not_reachable(path: str) -> None:
    async with rig() as r, r.http.post(r.url + path, json={}) as response:
        assert response.status == 404


async def test_nothing_is_kept_of_the_paths_that_clients_ask_for() -> None:
    async with rig() as r:
        kept = [dict(engine._urls) for engine in r.router.pool.engines]
        async with r.http.get(f"{r.url}/v1/responses/none?a=%20b") as response:
            assert response.status == 404
        async with r.http.post(f"{r.url}/tokenize?x=1", json={"prompt": "x"}) as response:
            assert response.status == 200
        assert [engine._urls for engine in r.router.pool.engines] == kept


async def test_a_stored_response_is_read_where_it_is() -> None:
    async with rig(prefill=0, decode=3) as r:
        holder = r.decode[1]
        ours, own = new_response_id(holder.url, ""), "resp_of_the_clients"
        stored = {"id": ours, "output": [], "kv_transfer_params": {"remote_host": "10.0.0.1"}}
        holder.stored = {ours: stored, own: {**stored, "id": own}}
        for response_id in (ours, own):
            async with r.http.get(f"{r.url}/v1/responses/{response_id}") as response:
                assert await response.json() == {"id": response_id, "output": []}
        async with r.http.get(f"{r.url}/v1/responses/{new_response_id('http://gone', '')}") as response:
            assert response.status == 404
            assert "not found" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("spelled", ["%2e%2e", ".%2E", "%2e", "..%2f..%2fversion", "a%2F..%2F..%2Fversion"])
async def test_an_id_leads_to_no_other_path(spelled: str) -> None:
    async with rig() as r:
        for method, path in (("GET", ""), ("POST", "/cancel")):
            url = URL(f"{r.url}/v1/responses/{spelled}{path}", encoded=True)
            async with r.http.request(method, url) as response:
                assert (response.status, response.content_type) == (404, "application/json")
                assert "not found" in (await response.json())["error"]["message"]


# Steering of transfers


async def test_params_in_vllm_xargs_are_dropped() -> None:
    async with rig() as r:
        sent = {"model": "fake", "vllm_xargs": {"a": 1, "kv_transfer_params": {}, "ec_transfer_params": {}}}
        await r.post(sent, to="/tokenize")
        raw = next(engine.passed[0][1] for engine in (r.p, r.d) if engine.passed)
        assert json.loads(raw) == {"model": "fake", "vllm_xargs": {"a": 1}}


@pytest.mark.parametrize(
    "name",
    [
        'name="kv_transfer_params"',
        "name=EC_transfer_params",
        "name*=utf-8''kv%5Ftransfer%5Fparams",
        'name*0="kv_transfer"; name*1="_params"',
        'filename="x"; name="vllm_xargs[kv_transfer_params]"',
    ],
)
async def test_a_form_that_steers_transfers_is_refused(name: str) -> None:
    async with rig() as r:
        head = f"Content-Type: text/plain\r\nContent-disposition: form-data; {name}"
        part = f"--B\r\n{head}\r\n\r\n{{}}\r\n--B--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        reply = await r.post(part.encode(), to="/v1/audio/transcriptions", headers=kind)
        assert reply.status == 400
        assert "The form must" in reply.body["error"]["message"]
        assert not r.p.passed + r.d.passed


async def test_a_form_may_speak_of_transfers_and_have_files_of_any_name() -> None:
    async with rig() as r:
        form = aiohttp.FormData(quote_fields=False)
        form.add_field("file", b"kv_transfer_params", filename="é.wav", content_type="audio/wav")
        form.add_field("prompt", "kv_transfer_params")
        async with r.http.post(r.url + "/v1/audio/transcriptions", data=form) as response:
            assert response.status == 200


async def test_a_form_of_very_many_fields_is_refused() -> None:
    async with rig() as r:
        part = b"--B\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        reply = await r.post(part * 1001 + b"--B--", to="/v1/audio/transcriptions", headers=kind)
        assert (reply.status, "1,000 fields" in reply.body["error"]["message"]) == (400, True)


# Limits


EMBED = "/v1/embeddings"
COUNT = "/v1/messages/count_tokens"


async def ask(r: Rig, to: str = EMBED, timeout_s: float | None = None) -> tuple[int, str, Any]:
    """Return status, Retry-After and the kind of error, in either API's shape."""
    headers = {} if timeout_s is None else {"x-request-timeout": str(timeout_s)}
    reply = await r.post({"model": "fake", "input": "x"}, to=to, headers=headers)
    return reply.status, reply.headers.get("retry-after", ""), reply.body.get("error", {}).get("type")


@pytest.mark.parametrize(("to", "kind"), [(EMBED, "InternalServerError"), (COUNT, "timeout_error")])
async def test_a_clients_deadline_ends_a_passed_request(to: str, kind: str) -> None:
    async with rig(prefill=0) as r:
        r.d.faults.append("hang")
        for limit_s in LIMITS_S:
            assert await ask(r, to, limit_s) == (504, "", kind)
            if not r.d.faults:
                break
        await until(lambda: r.d.aborted == 1)
        assert all(engine.outstanding == 0 for engine in r.router.pool.engines)


async def test_the_routers_deadline_ends_a_passed_request() -> None:
    async with rig(prefill=0, request_timeout_s=0.2) as r:
        r.d.faults.append("hang")
        assert (await ask(r))[0] == 504


@pytest.mark.parametrize(("to", "kind"), [(EMBED, "RateLimitError"), (COUNT, "rate_limit_error")])
async def test_passed_requests_count_among_those_under_way(to: str, kind: str) -> None:
    async with rig(prefill=0, admission=AdmissionLimits(max_requests=1)) as r:
        r.d.faults.append("hang")
        first = asyncio.create_task(ask(r, to))
        await until(lambda: r.d.passed)
        assert await ask(r, to) == (429, "1", kind)
        assert (await r.post(chat("hello"))).status == 429
        first.cancel()
        await until(lambda: not r.router._admission.requests)
        assert (await ask(r, to))[0] == 200
        assert (await r.metric("kvplane_router_overloaded_total"))['{status="429"}'] == 2


async def test_passed_requests_wait_for_a_place_on_an_engine() -> None:
    limits = AdmissionLimits(max_engine_requests=1, max_queued=1)
    async with rig(prefill=0, admission=limits) as r:
        r.d.faults.append("hang")
        first = asyncio.create_task(ask(r))
        await until(lambda: r.d.passed)
        second = asyncio.create_task(ask(r))
        await until(lambda: r.router._admission.queued == 1)
        assert (await ask(r))[0] == 429
        first.cancel()
        assert (await second)[0] == 200
        assert len(r.d.passed) == 2


async def test_passed_requests_do_not_wait_for_ever() -> None:
    limits = AdmissionLimits(max_engine_requests=1, queue_timeout_s=0.1)
    async with rig(prefill=0, admission=limits) as r:
        r.d.faults.append("hang")
        first = asyncio.create_task(ask(r))
        await until(lambda: r.d.passed)
        assert (await ask(r))[:2] == (503, "1")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def share_faults(r: Rig, *faults: str) -> None:
    """Have these faults used up by whichever engine is asked."""
    shared: deque[str | None] = deque(faults)
    for engine in r.decode:
        engine.faults = shared


async def test_a_passed_request_on_an_engine_that_goes_silent_is_served_by_another() -> None:
    async with rig(prefill=0, decode=2) as r:
        share_faults(r, "hang")
        asked = asyncio.create_task(ask(r))
        await until(lambda: any(engine.passed for engine in r.decode))
        silent = next(engine for engine in r.router.pool.engines if engine.waits)
        silent.up = False
        r.router.pool._went_down(silent)
        assert (await asked)[0] == 200
        assert all(not engine.outstanding and not engine.waits for engine in r.router.pool.engines)


@pytest.mark.parametrize(("faults", "status"), [(1, 200), (2, 502)])
async def test_a_passed_request_is_tried_again_once_where_an_engine_breaks_off(
    faults: int, status: int
) -> None:
    async with rig(prefill=0, decode=3) as r:
        share_faults(r, *["disconnect"] * faults)
        assert (await ask(r))[0] == status
        assert sum(len(engine.passed) for engine in r.decode) == 2
        assert all(not engine.outstanding for engine in r.router.pool.engines)
