"""Engines and a control plane that fail: who is asked next, and what the client hears."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvplane.client.errors import ControlPlaneUnavailableError
from kvplane.client.model import EngineRole
from kvplane.router.app import RouterServer, RouterStartError
from kvplane.router.settings import RouterSettings
from tests.fakes.core import EngineConfig
from tests.fakes.plane import FakePlane
from tests.router.rig import CHAT, LIMITS_S, Rig, chat, expected_reply, long_text, rig, until


@pytest.mark.parametrize("fault", ["500", "garbage", "disconnect", "503"])
async def test_a_failing_prefill_is_tried_again_without_the_handle_case_15(fault: str) -> None:
    async with rig() as r:
        await r.say(long_text(200))
        r.p.faults.append(fault)
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason, reply.reused) == ("cold", "prefill_failed", "0")
        handles = [bool(b["kv_transfer_params"]["remote_block_ids"]) for b in r.p.requests]
        # A broken connection takes the engine out until it has been probed.
        assert handles in ([False, True, False], [False, True])
        # It may have read: only time ends the claim. The conversation keeps its id.
        assert not r.plane.finished
        assert r.d.requests[-1]["kv_transfer_params"]["kvplane"]["conversation_id"] == "c1"
        assert (await r.say("more")).path == "direct"


@pytest.mark.parametrize("fault", ["500", "garbage"])
async def test_a_prefill_that_fails_twice_leaves_decode_alone(fault: str) -> None:
    async with rig() as r:
        r.p.faults += [fault, fault]
        reply = await r.say("hello")
        assert (reply.path, reply.reason) == ("cold", "prefill_failed")
        assert "remote_block_ids" not in r.d.requests[0]["kv_transfer_params"]


async def test_another_prefill_is_preferred_for_the_second_try() -> None:
    async with rig(prefill=2) as r:
        for engine in r.prefill:
            engine.faults += [None, "500", "500", "500"]
        for index in range(2):
            await r.say("hello", f"c{index}")
        await r.say("hello", "c2")
        assert sorted(len(e.requests) for e in r.prefill) == [2, 2]


async def test_a_dead_prefill_costs_no_answer_and_frees_the_claim() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        await r.p.stop()
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason) == ("cold", "prefill_failed")
        # It never got the request, so nobody can have read.
        await until(lambda: r.plane.finished)
        assert (await r.say("again")).path == "direct"
        assert (await r.say("new", "c2")).reason == "no_prefill_engine"
        await r.p.start()
        await until(lambda: all(e.up for e in r.router.pool.engines))
        assert (await r.say("new", "c3")).reason == "unknown_conversation"


@pytest.mark.parametrize("fault", ["500", "garbage", "disconnect"])
async def test_a_failing_decode_is_tried_again_cold(fault: str) -> None:
    async with rig(decode=2) as r:
        await r.say(long_text(200))
        holder, other = sorted(r.decode, key=lambda e: -len(e.requests))
        holder.faults.append(fault)
        reply = await r.say("next")
        assert (reply.path, reply.reason) == ("cold", "decode_failed")
        assert (len(holder.requests), len(other.requests)) == (2, 1)


async def test_params_that_an_engine_may_have_used_are_not_sent_again() -> None:
    async with rig(decode=2) as r:
        for engine in r.decode:
            engine.faults.append("disconnect" if engine is r.d else None)
        for index in range(2):
            await r.say(long_text(100), f"c{index}")
        sent = [b["kv_transfer_params"]["remote_request_id"] for e in r.decode for b in e.requests]
        assert len(sent) == len(set(sent)) == 3
        assert len(r.p.requests) == 3


async def test_the_only_decode_engine_gets_a_second_chance() -> None:
    async with rig() as r:
        r.d.faults.append("500")
        assert (await r.say("hello")).reason == "decode_failed"


@pytest.mark.parametrize("fault", ["500", "garbage"])
async def test_decode_that_fails_twice_is_one_clear_line(fault: str) -> None:
    async with rig() as r:
        r.d.faults += [fault, fault]
        reply = await r.post(chat("hello"))
        assert reply.status == 502
        error = reply.body["error"]
        assert error["code"] == 502
        assert "\n" not in error["message"]
        assert "decode engine failed" in error["message"]
        assert r.d.url not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_dead_decode_engines_are_left_out_at_once_case_41(stream: bool) -> None:
    async with rig(decode=3) as r:
        await r.decode[0].stop()
        await r.decode[1].stop()

        async def ask(index: int) -> int:
            body = chat("hello", conversation=f"c{index}", stream=stream)
            async with r.http.post(r.url + CHAT, json=body) as response:
                await response.read()
                return response.status

        assert {await ask(index) for index in range(6)} == {200}
        # What the prefill engine held was not lost on engines that never saw it.
        assert len(r.p.requests) == 6


async def test_no_decode_engine_is_a_503_that_says_when_to_come_back() -> None:
    async with rig() as r:
        await r.d.stop()
        reply = await r.post(chat("hello"))
        assert (reply.status, reply.reason) == (503, "decode_unreachable")
        assert reply.headers["retry-after"] == "1"
        assert "decode engine" in reply.body["error"]["message"]


async def test_a_holder_that_died_is_not_asked_again() -> None:
    async with rig(decode=2) as r:
        await r.say(long_text(200))
        holder = next(e for e in r.decode if e.requests)
        await holder.stop()
        reply = await r.say("next", path="direct")
        assert (reply.path, reply.reason) in (("cold", "decode_unreachable"), ("cold", "holder_unusable"))
        # The new turn is where it can be found.
        assert (await r.say("more")).path == "direct"


async def test_a_hanging_decode_engine_is_a_504() -> None:
    for limit_s in LIMITS_S:
        async with rig(first_byte_timeout_s=limit_s) as r:
            r.d.faults.append("hang")
            assert (await r.post(chat("hello"))).status == 504
            if not r.d.faults:
                await until(lambda: r.d.aborted)
                return
    raise AssertionError("it was never asked")


async def test_a_hanging_prefill_engine_is_a_504() -> None:
    async with rig(prefill_timeout_s=0.05) as r:
        r.p.faults.append("hang")
        assert (await r.post(chat("hello"))).status == 504


async def test_requests_on_an_engine_that_goes_silent_are_served_by_another() -> None:
    """Stopped, not dead: its connections stay open, and only its health tells."""
    async with rig(decode=2) as r:
        for engine in r.decode:
            engine.faults.append("hang")
        waiting = asyncio.create_task(r.post(chat("hello")))
        await until(lambda: any(e.waits and e.decode for e in r.router.pool.engines))
        await until(lambda: not all(engine.faults for engine in r.decode))
        silent = next(e for e in r.router.pool.engines if e.waits)
        for engine in r.decode:
            engine.faults.clear()
        silent.up = False
        r.router.pool._went_down(silent)
        reply = await waiting
        assert reply.status == 200
        assert reply.text == expected_reply(chat("hello"))


async def test_a_refused_pull_finishes_its_claim() -> None:
    async with rig() as r:
        await r.say(long_text(300))
        r.p.faults.append("400")
        said = [*r.said["c1"], "more"]
        assert (await r.post(chat(*said), path="pull")).status == 400
        await until(lambda: not r.plane.claims)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 422, 429])
async def test_refusals_are_passed_on_as_they_are(leg: str, status: int) -> None:
    async with rig() as r:
        (r.p if leg == "prefill" else r.d).faults.append(str(status))
        reply = await r.post(chat("hello"))
        assert reply.status == status
        assert reply.body["error"]["message"] == f"fault {status}"
        assert (reply.headers.get("retry-after") == "7") == (status == 429)


async def test_a_503_that_persists_is_passed_on_with_its_retry_after() -> None:
    async with rig() as r:
        r.d.faults += ["503", "503"]
        reply = await r.post(chat("hello"))
        assert reply.status == 503
        assert reply.headers["retry-after"] == "7"


async def test_the_engine_says_what_is_missing() -> None:
    async with rig() as r:
        reply = await r.post({"model": "fake", "conversation_id": "c"})
        assert reply.status == 400
        assert reply.body["error"]["message"] == "messages: Field required"


async def test_different_models_are_told_before_and_at_the_request() -> None:
    prefill = EngineConfig(EngineRole.PREFILL, model="one")
    decode = EngineConfig(EngineRole.DECODE, model="two")
    async with rig(prefill=[prefill], decode=[decode]) as r:
        async with r.http.get(r.url + "/ready") as response:
            problems = (await response.json())["problems"]
        assert any("prefill engines serve one, decode engines serve two" in p for p in problems)
        assert (await r.post(chat("hi", model="two"))).reason == "no_prefill_engine"
        reply = await r.post(chat("hi", model="three"))
        assert reply.status == 404
        assert "`three` does not exist" in reply.body["error"]["message"]


async def test_a_decode_engine_that_comes_back_has_forgotten_case_39() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        await r.d.stop()
        await r.d.start()
        reply = await r.say("next")
        assert (reply.path, reply.reason) == ("cold", "unknown_conversation")
        assert (await r.say("more")).path == "direct"


async def test_a_decode_engine_that_comes_back_unnoticed_computes_again_case_39() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        locations = r.plane.locations
        await r.d.stop()
        await r.d.start()
        r.plane.locations = locations
        # Its blocks are gone: neither path may make anything of what is no longer there.
        assert (await r.say("next", path="direct")).path == "direct"


# Control plane


async def test_without_a_control_plane_everything_is_cold() -> None:
    async with rig(with_plane=False) as r:
        for _ in range(2):
            assert (await r.say("hello")).reason == "no_control_plane"
        assert "kvplane" not in r.d.requests[0]["kv_transfer_params"]


async def test_a_dead_plane_costs_nothing_and_reuse_comes_back_by_itself() -> None:
    async with rig(poll_interval_s=0.05) as r:
        await r.say(long_text(200))
        r.plane.down = True
        for _ in range(4):
            reply = await r.say("next")
            assert (reply.path, reply.reason) == ("cold", "plane_unavailable")
        calls = r.plane.calls["begin_turn"]
        for _ in range(5):
            await r.say("next")
        assert r.plane.calls["begin_turn"] == calls
        assert (await r.metric("kvplane_router_plane_up"))[""] == 0
        # No turn number, nothing kept: the decode engine is told nothing.
        assert "kvplane" not in r.d.requests[-1]["kv_transfer_params"]
        r.plane.down = False
        for _ in range(2000):
            reply = await r.say("back")
            if reply.path == "direct":
                break
            await asyncio.sleep(0.01)
        assert reply.path == "direct"


async def test_a_plane_that_does_not_answer_delays_few_requests() -> None:
    async with rig(plane_timeout_s=0.02, turn_wait_s=0.0, poll_interval_s=60) as r:
        r.plane.answers.clear()
        for _ in range(10):
            assert (await r.say("next")).reason == "plane_unavailable"
        assert r.plane.calls["begin_turn"] == 2


async def test_a_plane_that_is_away_at_start_is_no_obstacle() -> None:
    plane = FakePlane()
    plane.down = True
    async with rig(plane=plane) as r:
        assert (await r.say("hello")).reason == "plane_unavailable"
        assert not plane.calls["begin_turn"]


async def test_a_claim_without_an_answer_is_given_back() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        original = r.plane.claim_location

        async def lost(*args: object, **more: object) -> object:
            await original(*args, **more)  # type: ignore[arg-type]
            raise ControlPlaneUnavailableError("the answer was lost")

        r.plane.claim_location = lost  # type: ignore[method-assign, assignment]
        assert (await r.say("next", path="pull")).reason == "plane_unavailable"
        await until(lambda: r.plane.finished)
        assert not r.plane.claims


async def test_a_client_bug_never_reaches_a_request() -> None:
    async with rig() as r:

        async def broken(*_: object, **__: object) -> object:
            raise KeyError("oops")

        r.plane.begin_turn = broken  # type: ignore[method-assign, assignment]
        assert (await r.say("hello")).reason == "plane_unavailable"


# Start


async def test_a_taken_port_is_one_line() -> None:
    async with rig() as r:
        settings = RouterSettings(decode_urls=(r.d.url,), port=r.router.port)
        with pytest.raises(RouterStartError, match=r"port \d+ on 127.0.0.1 is taken: .* --port"):
            await RouterServer(settings).__aenter__()


# Bodies


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
async def test_unusable_bodies_are_400(body: bytes, says: str) -> None:
    async with rig() as r:
        reply = await r.post(body)
        assert reply.status == 400
        assert says in reply.body["error"]["message"]
        assert reply.body["error"]["code"] == 400
        assert reply.headers["x-request-id"]


async def test_a_body_that_cannot_be_decoded_is_a_400() -> None:
    async with rig() as r:
        reply = await r.post(b"not gzip at all", headers={"Content-Encoding": "gzip"})
        assert reply.status == 400
        assert reply.body["error"]["code"] == 400


async def test_a_bug_of_the_router_is_an_error_in_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        monkeypatch.setattr("kvplane.router.turn.decide", None)
        reply = await r.post(chat("hello"), headers={"X-Request-Id": "abc"})
        assert reply.status == 500
        assert reply.body["error"]["message"] == "The router failed; its log has request abc."


async def test_too_large_is_413() -> None:
    async with rig(max_body_bytes=1000) as r:
        reply = await r.post(chat(long_text(1000)))
        assert reply.status == 413
        assert "1000 bytes" in reply.body["error"]["message"]


@pytest.mark.parametrize(
    "conversation", ["", "x" * 257, "é" * 129, 7, 1.5, True, [], ["a"], {"id": "x"}, "\ud800"]
)
async def test_bad_ids_are_400_naming_the_field_case_35(conversation: object) -> None:
    async with rig() as r:
        reply = await r.post(chat("hello", conversation=conversation))
        assert reply.status == 400
        assert reply.body["error"]["param"] == "conversation_id"
        assert not r.p.requests


@pytest.mark.parametrize("conversation", ["\0", "😀" * 64, "a/b c\n", "x" * 256])
async def test_odd_ids_work_case_35(conversation: str) -> None:
    async with rig() as r:
        await r.say(long_text(100), conversation)
        assert (await r.say("next", conversation)).path == "direct"


async def test_odd_models_are_no_500() -> None:
    async with rig() as r:
        for model in ("\ud800", "x" * 300, 7, None, ["a"]):
            assert (await r.post(chat("hello", model=model))).status in (400, 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/response", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/", 404),
    ],
)
async def test_unknown_routes_are_errors_in_openais_shape(method: str, path: str, status: int) -> None:
    async with rig() as r, r.http.request(method, r.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == status


async def _get(r: Rig, path: str) -> tuple[int, object]:
    async with r.http.get(r.url + path) as response:
        return response.status, await response.json()


async def test_health_ready_and_models() -> None:
    async with rig() as r:
        assert await _get(r, "/health") == (200, {"status": "ok"})
        status, detail = await _get(r, "/ready")
        assert status == 200
        assert detail == {
            "ready": True,
            "draining": False,
            "prefill": {r.p.url: "up"},
            "decode": {r.d.url: "up"},
            "control_plane": "up",
            "problems": [],
        }
        status, models = await _get(r, "/v1/models")
        assert (status, models["data"][0]["id"]) == (200, "fake")  # type: ignore[index]
        await r.p.stop()
        await r.say("hello")
        assert (await _get(r, "/ready"))[0] == 200
        await r.d.stop()
        await r.post(chat("hello"))
        assert (await _get(r, "/ready"))[0] == 503


async def test_an_unhealthy_engine_is_left_out_until_it_is_well() -> None:
    async with rig(decode=2, probe_interval_s=0.02) as r:
        r.d.healthy = False
        sick = next(e for e in r.router.pool.engines if e.url == r.d.url)
        await until(lambda: not sick.up)
        for index in range(4):
            await r.say("hello", f"c{index}")
        assert not r.d.requests
        r.d.healthy = True
        await until(lambda: sick.up)


async def test_disconnecting_clients_leave_nothing_behind_case_28() -> None:
    async with rig(plane_timeout_s=5.0) as r:
        await r.say(long_text(100))
        r.d.gate.clear()
        async with aiohttp.ClientSession() as http:

            async def ask(stream: bool) -> None:
                async with http.post(r.url + CHAT, json=chat("hi", stream=stream)) as response:
                    await response.read()

            tasks = [asyncio.create_task(ask(index % 2 == 0)) for index in range(40)]
            for task in tasks:
                await asyncio.sleep(0.001)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: all(e.outstanding == 0 for e in r.router.pool.engines))
        r.d.gate.set()
        body = chat("after")
        assert (await r.post(body)).text == expected_reply(body)
