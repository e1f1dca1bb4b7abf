"""What each leg is sent, and what comes back of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.rig import chat, expected_reply, long_text, rig

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("fields", "capped"),
    [
        ({"max_tokens": 50}, {"max_tokens": 1}),
        ({"max_completion_tokens": 500}, {"max_completion_tokens": 1}),
        ({"max_tokens": 7, "max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_completion_tokens": None}, {"max_completion_tokens": 1}),
        ({"max_tokens": 9, "min_tokens": 5}, {"max_tokens": 1}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_makes_one_token_and_decode_sees_the_clients_values_cases_16_17_18(
    fields: dict[str, Any], capped: dict[str, Any], stream: bool
) -> None:
    async with rig() as r:
        body = chat("hello")
        del body["max_tokens"]
        body |= fields
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with r.http.post(f"{r.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            await response.read()
        leg, decode = r.p.requests[0], r.d.requests[0]
        limits = ("max_tokens", "max_completion_tokens")
        assert {name: leg[name] for name in limits if name in leg} == capped
        assert leg["stream"] is False
        assert "stream_options" not in leg
        assert "min_tokens" not in leg
        assert {n: v for n, v in decode.items() if n != "kv_transfer_params"} == {
            n: v for n, v in body.items() if n != "conversation_id"
        }


async def test_cached_tokens_are_the_prefill_engines_case_23() -> None:
    async with rig() as r:
        first = await r.say(long_text(200), path="pull")
        assert first.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        second = await r.say("next", path="pull")
        assert 192 <= second.body["usage"]["prompt_tokens_details"]["cached_tokens"] < 230
        third = await r.say("next", path="direct")
        assert third.body["usage"]["prompt_tokens_details"]["cached_tokens"] == int(third.reused or 0) > 0


async def test_the_rest_of_a_reply_is_passed_through_whole_case_22() -> None:
    async with rig() as r:
        reply = await r.post(chat("hello"), headers={"X-Request-Id": "abc"})
        choice = reply.body["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None
        assert reply.body["system_fingerprint"] == "fake"
        assert reply.body["id"] == "chatcmpl-abc"
        assert reply.headers["x-request-id"] == "abc"
        assert reply.body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 3}, "several_choices"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_split_runs_on_the_decode_engine_alone_case_21(
    fields: dict[str, Any], reason: str
) -> None:
    async with rig() as r:
        body = chat("hello", **fields)
        reply = await r.post(body)
        assert (reply.path, reply.reason) == ("cold", reason)
        assert len(reply.body["choices"]) == fields.get("n", 1)
        assert not r.p.requests
        assert "kv_transfer_params" not in r.d.requests[0]
        assert r.d.pool.used == 0


async def test_several_choices_go_to_the_engine_that_holds_the_conversation() -> None:
    async with rig(decode=2) as r:
        await r.say(long_text(200))
        holder = next(e for e in r.decode if e.requests)
        reply = await r.post(chat(*r.said["c1"], "next", n=2))
        assert (reply.path, reply.reason) == ("direct", "several_choices")
        assert len(holder.requests) == 2
        # The location is still there for the next turn.
        assert (await r.say("next")).path == "direct"


async def test_headers_go_on_but_not_ours() -> None:
    async with rig() as r:
        sent = {
            "Authorization": "Bearer x",
            "traceparent": TRACEPARENT,
            "X-Conversation-ID": "c",
            "x-kvplane-path": "cold",
            "Cookie": "a=b",
        }
        await r.post(chat("hello"), headers=sent)
        for headers in (r.p.headers[0], r.d.headers[0]):
            lower = {name.lower(): value for name, value in headers.items()}
            assert lower["authorization"] == "Bearer x"
            assert lower["traceparent"] == TRACEPARENT
            assert not {"x-conversation-id", "x-kvplane-path", "cookie"} & set(lower)


async def test_a_large_body_reaches_both_engines() -> None:
    async with rig() as r:
        body = chat(long_text(100, "long" * 10_000))
        reply = await r.post(body)
        assert reply.status == 200
        assert reply.text == expected_reply(body)


@pytest.mark.parametrize("smuggled", [{"do_remote_prefill": True, "remote_host": "10.0.0.1"}, "x", None])
@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["split", "decode only"])
async def test_no_way_around_lets_a_client_steer_transfers_case_33(
    smuggled: Any, more: dict[str, Any]
) -> None:
    """vLLM would take them from vllm_xargs as well."""
    names = ("kv_transfer_params", "ec_transfer_params")
    async with rig() as r:
        body = chat("hello") | more | dict.fromkeys(names, smuggled)
        body["vllm_xargs"] = {**dict.fromkeys(names, smuggled), "kept": 1}
        async with r.http.post(f"{r.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
        for leg in [*r.p.requests, *r.d.requests]:
            assert leg["vllm_xargs"] == {"kept": 1}
            assert "ec_transfer_params" not in leg
            assert leg.get("kv_transfer_params") != smuggled or smuggled is None
            assert "10.0.0.1" not in str(leg)


@pytest.mark.parametrize("count", [3, 3.0, "3"])
async def test_a_count_is_read_as_engines_read_it(count: Any) -> None:
    async with rig() as r:
        async with r.http.post(f"{r.url}/v1/chat/completions", json=chat("hello") | {"n": count}) as response:
            assert response.headers["x-kvplane-reason"] == "several_choices"
        assert not r.p.requests
