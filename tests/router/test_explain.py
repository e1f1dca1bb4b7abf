"""Every decision can be looked at afterwards: what was known, what was chosen, what came of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from typer.testing import CliRunner

from kvplane.cli.entry import app
from kvplane.cli.explain import as_text
from kvplane.router.explain import Explanations, _from_here
from tests.router.rig import CHAT, Reply, Rig, chat, long_text, rig, until


async def told(r: Rig, request_id: str) -> dict[str, Any]:
    async with r.http.get(f"{r.url}/debug/turns/{request_id}") as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def id_of(reply: Reply) -> str:
    return reply.headers["x-request-id"]


async def test_a_direct_turn_is_explained() -> None:
    async with rig(decode=2) as r:
        await r.say(long_text(200), "secret-4711")
        reply = await r.say("next", "secret-4711")
        answer = await told(r, id_of(reply))
        assert (answer["path"], answer["reason"], answer["status"]) == ("direct", "new_text_short", 200)
        assert answer["state"] == "answered"
        assert answer["identity"] == "conversation_id"
        assert answer["tokens"]["held"] > 200
        assert str(answer["tokens"]["reuse_expected"]) == reply.headers["x-kvplane-expected-tokens"]
        assert str(answer["tokens"]["new_expected"]) == reply.headers["x-kvplane-new-tokens"]
        assert str(answer["tokens"]["reused"]) == reply.reused
        assert str(answer["turn"]) == reply.headers["x-kvplane-turn"]
        assert [engine["role"] for engine in answer["candidates"]] == ["prefill", "decode", "decode"]
        assert [engine["holder"] for engine in answer["candidates"]].count(True) == 1
        (leg,) = answer["attempts"]
        assert (leg["leg"], leg["outcome"]) == ("decode", "ok")
        assert 0 <= leg["began_ms"] <= leg["began_ms"] + leg["first_byte_ms"] <= answer["timings_ms"]["total"]
        assert "secret" not in json.dumps(answer)


async def test_failover_is_explained_leg_by_leg() -> None:
    async with rig(decode=2) as r:
        await r.say(long_text(200))
        holder = next(e for e in r.decode if e.requests)
        holder.faults.append("500")
        answer = await told(r, id_of(await r.say("next")))
        assert (answer["decision"]["path"], answer["path"], answer["reason"]) == (
            "direct",
            "cold",
            "decode_failed",
        )
        legs = [(leg["leg"], leg["outcome"]) for leg in answer["attempts"]]
        assert legs == [("decode", "failed"), ("prefill", "ok"), ("decode", "ok")]
        assert "500" in answer["attempts"][0]["problem"]


@pytest.mark.parametrize(
    ("fault", "outcome", "status"), [("400", "refused", 400), ("break_stream", "cut", 200)]
)
async def test_what_went_wrong_is_explained(fault: str, outcome: str, status: int) -> None:
    async with rig() as r:
        r.d.faults.append(fault)
        async with r.http.post(r.url + CHAT, json=chat("hello", stream=True)) as response:
            request_id = response.headers["x-request-id"]
            await asyncio.gather(response.read(), return_exceptions=True)
        await until(lambda: (trail := r.router._explanations.find(request_id)) and trail.ended_at)
        answer = await told(r, request_id)
        assert (answer["attempts"][-1]["outcome"], answer["status"]) == (outcome, status)


async def test_a_running_request_and_a_client_that_left() -> None:
    async with rig() as r:
        r.d.gate.clear()
        headers = {"x-request-id": "mine"}
        task = asyncio.create_task(r.post(chat("hello"), headers=headers))
        await until(lambda: r.d.requests)
        answer = await told(r, "mine")
        assert (answer["state"], answer["attempts"][-1]["outcome"]) == ("running", "running")
        assert "running" in as_text(answer)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: (trail := r.router._explanations.find("mine")) and trail.ended_at)
        answer = await told(r, "mine")
        assert (answer["status"], answer["attempts"][-1]["outcome"]) == (499, "cancelled")


async def test_requests_that_reach_no_engine_are_explained_too() -> None:
    async with rig() as r:
        reply = await r.post(b"{", headers={"x-request-id": "bad"})
        assert reply.status == 400
        answer = await told(r, "bad")
        assert (answer["status"], answer["decision"], answer["attempts"]) == (400, None, [])
        assert "none" in as_text(answer)


async def test_the_record_is_bounded_and_says_so() -> None:
    async with rig(explained_turns=2) as r:
        replies = [await r.say("hello", f"c{index}") for index in range(3)]
        async with r.http.get(f"{r.url}/debug/turns/{id_of(replies[0])}") as response:
            assert response.status == 404
            assert "more than 2 since" in (await response.json())["error"]["message"]
        await told(r, id_of(replies[1]))
        async with r.http.post(f"{r.url}/debug/turns/x") as response:
            assert response.status == 405
        for path in ("/debug/turns/", "/debug/turns/x/y"):
            async with r.http.get(r.url + path) as response:
                assert response.status == 404


async def test_no_more_of_a_models_name_is_kept_than_shows_what_it_was() -> None:
    async with rig() as r:
        body = chat("hello") | {"model": "m" * 1000}
        await r.post(body, headers={"x-request-id": "long"})
        assert (await told(r, "long"))["model"] == "m" * 256


async def test_only_loopback_may_look() -> None:
    async with rig() as r:
        reply = await r.say("hello")
        for headers in ({"X-Forwarded-For": "10.0.0.1"}, {"Forwarded": "for=10.0.0.1"}):
            async with r.http.get(f"{r.url}/debug/turns/{id_of(reply)}", headers=headers) as response:
                assert response.status == 403
                assert "loopback" in (await response.json())["error"]["message"]
    async with rig(debug_remote=True) as r:
        reply = await r.say("hello")
        headers = {"X-Forwarded-For": "10.0.0.1"}
        async with r.http.get(f"{r.url}/debug/turns/{id_of(reply)}", headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False),
        ("", False),
    ],
)
def test_where_a_client_is(address: str, here: bool) -> None:
    request = make_mocked_request("GET", "/debug/turns/x").clone(remote=address)
    assert _from_here(request) is here


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LocalHost.:8000", True),
        ("kv.localhost:8000", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("10.0.0.7", True),
        ("rebound.example:8000", False),
        ("127.0.0.1.rebound.example", False),
        ("localhost.rebound.example", False),
        ("notlocalhost", False),
        ("[rebound.example]", False),
        ("rebound.example:8000:1", False),
    ],
)
async def test_a_name_that_leads_a_browser_here_shows_it_nothing(host: str, here: bool) -> None:
    async with rig() as r:
        request_id = id_of(await r.say("hello"))
        for path in ("/ui/data", "/ui", f"/debug/turns/{request_id}"):
            async with r.http.get(r.url + path, headers={"Host": host}) as answer:
                assert answer.status == (200 if here else 403), path


def test_nothing_is_kept_where_nothing_is_to_be_kept() -> None:
    explanations = Explanations(0, lambda: 0.0)
    explanations.begin("r", "/")
    assert explanations.find("r") is None


# The command


async def run(*arguments: str) -> tuple[int, str, str]:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["explain", *arguments])
    return result.exit_code, result.stdout, str(result.exception or "")


async def test_the_command_prints_text_and_json() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        request_id = id_of(await r.say("next"))
        code, text, _ = await run(request_id, "--router", r.url)
        assert code == 0
        assert "path direct: new_text_short" in text
        assert r.d.url in text
        code, text, _ = await run(request_id, "--router", r.url, "--output", "json")
        assert json.loads(text)["request_id"] == request_id


async def test_the_command_says_what_is_wrong_in_one_line() -> None:
    async with rig() as r:
        code, _, problem = await run("unknown", "--router", r.url)
        assert code == 1
        assert "not on record" in problem
        _, _, problem = await run("x", "--router", r.d.url)
        assert "answered 404" in problem
    _, _, problem = await run("x", "--router", r.url)
    assert "no router of kvplane's answers" in problem
    _, _, problem = await run("x", "--router", "nonsense")
    assert "--router nonsense" in problem
