"""Conversations that clients end or keep, replies that call tools, what engines are told of turns before."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from yarl import URL

from kvplane.client.model import ConversationKey, EngineRole
from kvplane.router.app import APIS
from kvplane.router.replies import ToolCallScan
from tests.fakes.core import EngineConfig
from tests.router.rig import Rig, chat, long_text, rig, until

KEY = ConversationKey("default", "fake", "c1")


async def delete(rig: Rig, conversation: str, query: str = "") -> tuple[int, dict[str, Any]]:
    url = URL(f"{rig.url}/v1/conversations/{conversation}{query}", encoded=True)
    async with rig.http.delete(url) as response:
        return response.status, await response.json()


async def touch(rig: Rig, body: bytes = b"", query: str = "") -> tuple[int, dict[str, Any]]:
    url = f"{rig.url}/v1/conversations/c1/touch{query}"
    async with rig.http.post(url, data=body) as response:
        return response.status, await response.json()


async def test_what_a_client_deletes_is_released() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        await until(lambda: KEY in r.plane.locations)
        answer = {"id": "c1", "object": "conversation.deleted", "deleted": True}
        assert await delete(r, "c1") == (200, answer)
        assert KEY not in r.plane.locations
        assert await delete(r, "c1") == (200, answer)
        assert (await delete(r, "nobodys"))[1] == {**answer, "id": "nobodys"}


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("a%2Fb", "a/b"),
        ("a%2ftouch", "a/touch"),
        ("%2F", "/"),
        ("a%252Fb", "a%2Fb"),
        ("%C3%A9", "é"),
        ("auto%2F1", "auto/1"),
        ("%7Bx%7D", "{x}"),
        ("a{b", "a{b"),
        ("a%0Ab", "a\nb"),
    ],
)
async def test_any_id_can_be_named_in_a_path(spelled: str, meant: str) -> None:
    async with rig() as r:
        assert (await delete(r, spelled, "?model=other&adapter=lora"))[1]["id"] == meant
        assert r.plane.ended == [ConversationKey("default", "other", meant, "lora")]
        url = URL(f"{r.url}/v1/conversations/{spelled}/touch", encoded=True)
        async with r.http.post(url) as response:
            assert (response.status, (await response.json())["id"]) == (200, meant)
        async with r.http.put(URL(f"{r.url}/v1/conversations/{spelled}", encoded=True)) as response:
            assert response.status == 405


@pytest.mark.parametrize(
    ("conversation", "query", "param"),
    [
        ("x" * 257, "", "conversation_id"),
        ("c", f"?model={'x' * 257}", "model"),
        ("c", f"?adapter={'x' * 257}", "adapter"),
    ],
)
async def test_a_bad_name_is_refused_as_openai_does(conversation: str, query: str, param: str) -> None:
    async with rig() as r:
        status, body = await delete(r, conversation, query)
        assert (status, body["error"]["param"]) == (400, param)
        assert r.plane.ended == []


async def test_where_several_models_are_served_one_is_named() -> None:
    engines = [EngineConfig(EngineRole.DECODE, model=model) for model in ("one", "two")]
    async with rig(decode=engines) as r:
        status, body = await delete(r, "c1")
        assert (status, body["error"]["param"]) == (400, "model")
        assert (await delete(r, "c1", "?model=two"))[0] == 200
        assert r.plane.ended == [ConversationKey("default", "two", "c1")]


async def test_while_no_engine_has_said_what_it_serves_a_model_is_to_be_named() -> None:
    async with rig(decode_urls=("http://127.0.0.1:1",)) as r:
        status, body = await delete(r, "c1")
        assert status == 503
        assert "?model=NAME" in body["error"]["message"]
        assert (await touch(r))[0] == 503
        assert (await delete(r, "c1", "?model=two"))[0] == 200
        assert r.plane.ended == [ConversationKey("default", "two", "c1")]


async def test_without_an_answer_of_the_control_plane_nothing_is_claimed_to_be_over() -> None:
    async with rig() as r:
        r.plane.down = True
        assert (await delete(r, "c1"))[0] == 503
        assert (await touch(r))[0] == 503
    async with rig(with_plane=False) as r:
        assert (await delete(r, "c1"))[0] == 200
        assert (await touch(r))[1]["touched"] is False


async def test_a_touch_is_bounded_as_other_requests_are() -> None:
    async with rig(body_timeout_s=0.5, max_body_bytes=1000) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
        head = b"POST /v1/conversations/c1/touch HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{"
        writer.write(head)
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        status, answer = await touch(r, b" " * 70_000)
        assert (status, "larger than 1000 bytes" in answer["error"]["message"]) == (413, True)
        assert r.router._bodies.held_bytes == 0
    async with rig(body_budget_bytes=1) as r:
        assert (await touch(r, b" " * 70_000))[0] == 503


async def test_other_methods_are_not_allowed() -> None:
    async with rig() as r, r.http.get(f"{r.url}/v1/conversations/c1") as response:
        assert response.status == 405


async def test_a_conversation_is_kept_for_as_long_as_its_client_says() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        await until(lambda: KEY in r.plane.locations)
        answer = {"id": "c1", "object": "conversation.touched", "touched": True, "ttl_s": 12.5}
        left_s = r.plane.locations[KEY].remaining_s
        assert await touch(r, b'{"ttl_s": 12.5}') == (200, {**answer, "remaining_s": left_s})
        assert (await touch(r))[1]["ttl_s"] == 300
        assert (await touch(r, b"{}"))[0] == 200
        assert r.plane.touched == [(KEY, 12.5, 0), (KEY, 300.0, 0), (KEY, 300.0, 0)]
        nothing = (await touch(r, query="?model=other"))[1]
        assert (nothing["touched"], nothing["remaining_s"]) == (False, None)


async def test_a_touch_of_a_turn_that_is_under_way_says_that_nothing_is_retained() -> None:
    async with rig() as r:
        r.d.faults += ["503"] * 4
        await r.post(chat("hello"))
        answer = (await touch(r, b'{"ttl_s": 1}'))[1]
        assert (answer["touched"], answer["ttl_s"], answer["remaining_s"]) == (True, 1.0, None)


@pytest.mark.parametrize("ttl", ["0", "-1", "true", '"5"', "[]", "1e99", "1" + "0" * 400, "NaN", "Infinity"])
async def test_a_life_that_is_no_life_is_refused(ttl: str) -> None:
    async with rig() as r:
        status, body = await touch(r, b'{"ttl_s": %s}' % ttl.encode())
        assert (status, body["error"]["param"]) == (400, "ttl_s")
        assert (await touch(r, b"[]"))[0] == 400
        status, body = await touch(r, b'{"ttl": 120, "ttl_s": 5}')
        assert (status, body["error"]["param"]) == (400, "ttl")
        assert "ttl_s" in body["error"]["message"]
        assert r.plane.touched == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_touch_that_cannot_be_decoded_is_refused(encoding: str) -> None:
    async with rig() as r:
        url, headers = f"{r.url}/v1/conversations/c1/touch", {"Content-Encoding": encoding}
        async with r.http.post(url, data=io.BytesIO(b"\xff\0no"), headers=headers) as response:
            assert response.status == 400
            assert "decoded" in (await response.json())["error"]["message"]
        assert r.plane.touched == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_calls_tools_keeps_its_conversation(stream: bool) -> None:
    async with rig(tool_ttl_s=77.0) as r:
        body = chat(long_text(200), stream=stream, tool_choice="required")
        async with r.http.post(r.url + "/v1/chat/completions", json=body) as response:
            assert b"tool_calls" in await response.read()
        await until(lambda: r.plane.touched)
        turn = r.d.requests[-1]["kv_transfer_params"]["kvplane"]["turn"]
        assert r.plane.touched == [(KEY, 77.0, turn)]
        plain = chat(long_text(200), stream=stream, conversation="c2")
        async with r.http.post(r.url + "/v1/chat/completions", json=plain) as response:
            await response.read()
        await until(lambda: ConversationKey("default", "fake", "c2") in r.plane.locations)
        assert len(r.plane.touched) == 1


async def test_a_touch_that_nobody_answers_holds_up_no_reply() -> None:
    async with rig(plane_timeout_s=5.0) as r:
        await r.say("hello")
        r.d.gate.clear()
        body = chat("hello", "there", tool_choice="required", stream=True)
        async with r.http.post(r.url + "/v1/chat/completions", json=body) as response:
            r.plane.answers.clear()
            r.d.gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await until(lambda: r.plane.calls["touch_conversation"])
        assert r.plane.touched == []
        r.plane.answers.set()


async def test_the_decode_engine_is_told_of_the_turns_before() -> None:
    async with rig() as r:
        await r.say("hello")
        assert not {"idle_s", "lease_class"} & set(r.d.requests[-1]["kv_transfer_params"]["kvplane"])
        r.plane.begun = {"turn_index": 2, "idle_s": 0.0, "lease_class": 0}
        await r.say("and then")
        told = r.d.requests[-1]["kv_transfer_params"]["kvplane"]
        assert (told["turn_index"], told["idle_s"], told["lease_class"]) == (2, 0.0, 0)


async def test_a_prefill_engine_is_told_that_a_router_has_asked_already() -> None:
    async with rig() as r:
        await r.say(long_text(200), path="cold")
        await until(lambda: KEY in r.plane.locations)
        reply = await r.say(long_text(100, "v"), path="pull")
        assert reply.reason == "pulled"
        nameless = chat("hello", conversation=None)
        assert (await r.post(nameless)).status == 200
        told = [request["kv_transfer_params"]["kvplane"] for request in r.p.requests]
        assert [member["router"] for member in told] == [True, True, True]
        assert ["fingerprint" in member for member in told] == [False, True, False]


EVENTS = [
    ('data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}', True),
    ('data: {"choices": [{"delta": {}, "finish_reason" : "tool_calls"}]}', True),
    ('data: {"type":"message_delta","delta":{"stop_reason":"tool_use"}}', True),
    ('data: {"type":"response.output_item.done","item":{"type":"function_call","name":"f"}}', True),
    ('data: {"choices":[{"delta":{},"finish_reason":"stop"}]}', False),
    ('data: {"choices":[{"delta":{"tool_calls":[{"type":"function"}]},"finish_reason":null}]}', False),
    ("data: " + json.dumps({"delta": {"content": '"finish_reason":"tool_calls"'}}), False),
]


@pytest.mark.parametrize(("event", "found"), EVENTS)
def test_calls_of_tools_are_seen_wherever_a_stream_is_cut(event: str, found: bool) -> None:
    raw = ("data: {}\n\n" * 20 + event + "\n\ndata: [DONE]\n\n").encode()
    for size in (1, 7, 64, len(raw)):
        scan = ToolCallScan()
        for start in range(0, len(raw), size):
            scan.see(raw[start : start + size])
        assert scan.found == found


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ({"choices": [{"finish_reason": "stop"}, {"finish_reason": "tool_calls"}]}, True),
        ({"choices": [{"finish_reason": "function_call"}]}, True),
        ({"stop_reason": "tool_use"}, True),
        ({"output": [{"type": "message"}, {"type": "function_call"}]}, True),
        ({"output": [{"type": "message"}]}, False),
        ({"choices": [{"finish_reason": "stop", "message": {"tool_calls": []}}]}, False),
        ({"choices": None, "output": 7, "stop_reason": []}, False),
        ({"choices": [7, {"finish_reason": {}}]}, False),
    ],
)
def test_calls_of_tools_in_a_whole_reply(answer: dict[str, Any], calls: bool) -> None:
    assert any(api.calls_tools(answer) for api in APIS.values()) is calls
