"""Every generation API in front of fake engines: legs, replies, streams, errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from kvplane.client.model import EngineRole
from tests.fakes.core import EngineConfig
from tests.router.rig import Rig, expected_reply, long_text, rig

Body = dict[str, Any]


@dataclass(frozen=True)
class Wire:
    """How a test speaks one API."""

    path: str
    limit: str

    def ask(self, *turns: str, **more: Any) -> Body:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
        name = "input" if self.path == "/v1/responses" else "messages"
        return {"model": "fake", name: messages, self.limit: 6, "conversation_id": "c", **more}

    def text(self, answer: Body) -> str:
        if self.path == "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        parts = answer["output"] if self.path == "/v1/responses" else [answer]
        said = [part for item in parts if "content" in item for part in item["content"]]
        return "".join(part["text"] for part in said if part["type"] in ("text", "output_text"))

    def cached(self, answer: Body) -> int:
        usage = answer["usage"]
        for name in ("prompt_tokens_details", "input_tokens_details"):
            if name in usage:
                return int(usage[name]["cached_tokens"])
        return int(usage["cache_read_input_tokens"])

    def said(self, events: list[Body]) -> str:
        words = []
        for event in events:
            if self.path == "/v1/chat/completions":
                words += [c["delta"].get("content") or "" for c in event.get("choices", [])]
            elif isinstance(event.get("delta"), str):
                words.append(event["delta"])
            elif isinstance(event.get("delta"), dict):
                words.append(event["delta"].get("text") or "")
        return "".join(words)

    def last_usage(self, events: list[Body]) -> Body:
        answers = [event.get("response") or event for event in events]
        return next(answer for answer in reversed(answers) if answer.get("usage"))

    async def stream(self, r: Rig, body: Body, path: str) -> tuple[list[Body], Any]:
        sent = {**body, "stream": True}
        if self.path == "/v1/chat/completions":
            sent["stream_options"] = {"include_usage": True}
        headers = {"x-kvplane-path": path}
        async with r.http.post(r.url + self.path, json=sent, headers=headers) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n")
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")], response.headers


CHAT = Wire("/v1/chat/completions", "max_completion_tokens")
RESPONSES = Wire("/v1/responses", "max_output_tokens")
MESSAGES = Wire("/v1/messages", "max_tokens")
EVERY = pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])


def reply_to(*turns: str) -> str:
    return expected_reply(CHAT.ask(*turns))


@EVERY
@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
async def test_every_api_reuses_cases_11_22_23(api: Wire, path: str) -> None:
    async with rig() as r:
        first = long_text(200)
        one = await r.post(api.ask(first), path=path, to=api.path)
        assert (one.status, one.path, api.text(one.body)) == (200, "cold", reply_to(first))
        said = (first, api.text(one.body), "next")
        two = await r.post(api.ask(*said), path=path, to=api.path)
        assert (two.path, api.text(two.body)) == (path, reply_to(*said))
        cached = api.cached(two.body)
        assert cached == (0 if path == "cold" else int(two.reused or 0)) or path == "pull"
        assert (cached > 190) == (path != "cold")
        pulled = int(two.reused or 0) if path == "pull" else 0
        assert (pulled > 190) == (path == "pull")
        assert "transfer_params" not in json.dumps(two.body)


@EVERY
@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
async def test_every_api_streams_with_reuse_cases_8_13_23(api: Wire, path: str) -> None:
    async with rig() as r:
        said = [long_text(200)]
        for wanted in ("cold", path):
            events, headers = await api.stream(r, api.ask(*said), path)
            assert headers["x-kvplane-path"] == wanted
            assert api.said(events) == reply_to(*said)
            said += [api.said(events), "next"]
        cached = api.cached(api.last_usage(events))
        assert (cached > 190) == (path != "cold")
        # Without this, a decode engine counts all that it pulled from the prefill engine.
        assert path == "direct" or cached < 206 or api.cached(api.last_usage(events)) == cached
        for leg in r.p.requests:
            assert leg["stream"] is False
            assert "stream_options" not in leg
            assert leg[api.limit] == 1
        assert {leg[api.limit] for leg in r.d.requests} == {6}


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_params_go_neither_in_nor_out_case_33(api: Wire, stream: bool) -> None:
    decode = [EngineConfig(EngineRole.DECODE, tells_params=True)]
    smuggled = {"do_remote_prefill": True, "remote_host": "10.9.9.9"}
    async with rig(decode=decode) as r:
        body = api.ask("hello", kv_transfer_params=smuggled, ec_transfer_params=smuggled, stream=stream)
        body["vllm_xargs"] = {"kv_transfer_params": "x", "kept": 1}
        async with r.http.post(r.url + api.path, json=body) as response:
            assert response.status == 200
            answer = await response.text()
        assert "transfer_params" not in answer
        assert "10.0.0.1" not in answer
        for leg in (*r.p.requests, *r.d.requests):
            assert "10.9.9.9" not in json.dumps(leg)
            assert leg["vllm_xargs"] == {"kept": 1}


@EVERY
async def test_unknown_fields_and_parts_pass_through_case_22(api: Wire) -> None:
    async with rig() as r:
        parts = [
            {"type": "text", "text": "what is this"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]
        more = {
            "unknown": {"deep": [1, 2.5, None]},
            "tools": [{"type": "function", "name": "f"}],
            "response_format": {"type": "json_schema"},
            "top_logprobs": 3,
        }
        body = api.ask("x", **more)
        messages = body["input" if api is RESPONSES else "messages"]
        messages[0]["content"] = parts
        reply = await r.post(body, to=api.path)
        assert reply.status == 200, reply.body
        for leg in (r.p.requests[0], r.d.requests[0]):
            assert {name: leg[name] for name in more} == more
            assert leg["input" if api is RESPONSES else "messages"][0]["content"] == parts
            assert "conversation_id" not in leg


@EVERY
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_and_reasoning_come_through_whole_case_22(api: Wire, stream: bool) -> None:
    async with rig() as r:
        choice: Any = {"type": "any"} if api is MESSAGES else "required"
        body = api.ask("weather", tool_choice=choice, stream=stream, reasoning={"effort": "low"})
        async with r.http.post(r.url + api.path, json=body) as response:
            answer = await response.text()
        assert "weather" in answer
        assert "Oslo" in answer
        if not stream:
            assert "let me think" in answer
        # The conversation is kept until the tools have run.
        assert [turn[1] for turn in r.plane.touched] == [300.0]


def message_of(api: Wire, body: Body) -> str:
    """Check that an error has its API's shape; returns its text."""
    if api is MESSAGES:
        assert body["type"] == "error"
        assert isinstance(body["error"]["type"], str)
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


@EVERY
async def test_errors_have_their_apis_shape_and_status(api: Wire) -> None:
    async with rig(max_body_bytes=10_000) as r:
        broken = await r.post(b"{", to=api.path)
        assert (broken.status, "not valid JSON" in message_of(api, broken.body)) == (400, True)
        identity = await r.post(api.ask("x") | {"conversation_id": 5}, to=api.path)
        assert (identity.status, "conversation_id must be" in message_of(api, identity.body)) == (400, True)
        large = await r.post(api.ask("x" * 20_000), to=api.path)
        assert (large.status, "larger than" in message_of(api, large.body)) == (413, True)
        unknown = await r.post(api.ask("x", model="other"), to=api.path)
        assert (unknown.status, "does not exist" in message_of(api, unknown.body)) == (404, True)
        r.p.faults.append("429")
        busy = await r.post(api.ask("x"), to=api.path)
        assert (busy.status, busy.headers["retry-after"]) == (429, "7")
        assert message_of(api, busy.body) == "fault 429"
        r.d.faults += ["500", "500"]
        failed = await r.post(api.ask("x"), to=api.path)
        assert (failed.status, "decode engine failed" in message_of(api, failed.body)) == (502, True)


@EVERY
@pytest.mark.parametrize("fault", ["500", "garbage", "disconnect"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_that_fails_first_is_tried_again(api: Wire, fault: str, stream: bool) -> None:
    async with rig() as r:
        r.d.faults.append(fault)
        body = api.ask("hello", stream=stream)
        async with r.http.post(r.url + api.path, json=body) as response:
            assert response.status == 200
            assert reply_to("hello").split()[-1] in await response.text()


@EVERY
async def test_a_stream_that_begins_with_an_error_is_no_answer(api: Wire) -> None:
    async with rig() as r:
        r.d.faults.append("error_stream")
        events, headers = await api.stream(r, api.ask("hello"), "cold")
        assert headers["x-kvplane-reason"] == "decode_failed"
        assert api.said(events) == reply_to("hello")
        r.d.faults += ["error_stream", "error_stream"]
        reply = await r.post(api.ask("hello", stream=True), to=api.path)
        assert (reply.status, "decode engine failed" in message_of(api, reply.body)) == (502, True)
