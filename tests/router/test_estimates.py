"""How long a prompt is thought to be: learned from whatever tells it, and never less than what is held."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.client.model import ConversationKey
from kvplane.router.app import APIS, RouterServer
from kvplane.router.learned import Memory
from kvplane.router.openai import PromptText
from kvplane.router.replies import StreamGuard
from kvplane.router.settings import RouterSettings
from tests.fakes import kv
from tests.router.rig import CHAT, Reply, Rig, chat, rig, until

KEY = ConversationKey("t", "m", "c")
OTHER = ConversationKey("t", "m", "other")
COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"


def short(words: int) -> str:
    """Return a text of which a token has two characters, half of what is taken for granted."""
    return " ".join("abcdefghij"[index % 10] for index in range(words))


def text(*turns: str, to: str = CHAT) -> PromptText:
    return APIS[to].prompt_text(chat(*turns))


# What the new text is


@pytest.mark.parametrize(
    ("to", "body", "since"),
    [
        (CHAT, chat("q", "a", "new"), 3 + 16),
        (CHAT, chat("q", "a"), 0),
        (CHAT, chat("q"), None),
        (MESSAGES, chat("q", "a", "new"), 3 + 16),
        (RESPONSES, {"input": chat("q", "a", "new")["messages"]}, 3 + 16),
        (RESPONSES, {"input": [{"type": "function_call"}, {"role": "user", "content": "new"}]}, 3 + 16),
        (RESPONSES, {"input": "new"}, None),
        (RESPONSES, {"input": "new", "previous_response_id": "resp_1"}, 3 + 16),
        (COMPLETIONS, {"prompt": "all of it"}, None),
        (CHAT, {"messages": [7, None, {"role": "assistant"}, 7]}, 0),
    ],
)
def test_what_follows_the_last_reply(to: str, body: dict[str, Any], since: int | None) -> None:
    assert APIS[to].prompt_text(body).since == since


def test_who_goes_on_has_what_is_held_and_the_new_text() -> None:
    memory = Memory()
    prompt = text("x" * 400, "y" * 40, "z" * 384)
    assert memory.estimate(KEY, prompt, 784) == 784 + 100
    # A router that has seen the turn before says the same.
    memory.remember(KEY, text("x" * 400), None)
    assert memory.estimate(KEY, prompt, 784) == 784 + 100
    # The same turn again is no longer than it was, and what has changed does not go on.
    memory.remember(KEY, prompt, None)
    assert memory.estimate(KEY, prompt, 784) < 300
    assert memory.estimate(KEY, text("x" * 399, "y" * 40, "z" * 384), 784) < 300


def test_text_whose_last_reply_cannot_be_seen_is_no_shorter_than_what_is_held() -> None:
    memory = Memory()
    prompt = APIS[COMPLETIONS].prompt_text({"prompt": "x" * 400})
    assert memory.estimate(KEY, prompt, 784) == 784
    assert memory.estimate(KEY, prompt, 50) == 100
    memory.remember(KEY, prompt, None)
    assert memory.estimate(KEY, prompt, 784) == 100


def test_what_is_with_the_engine_counts_and_teaches_nothing() -> None:
    memory = Memory()
    body = {"input": "x" * 384, "previous_response_id": "resp_1"}
    prompt = APIS[RESPONSES].prompt_text(body)
    memory.remember(KEY, prompt, None)
    memory.learn(KEY, prompt, 10_000)
    memory.located(KEY, prompt, 10_000)
    later = APIS[RESPONSES].prompt_text({**body, "input": "y" * 384})
    assert not memory.history_changed(KEY, later)
    assert memory.estimate(KEY, later, 784) == 784 + 100


# What is learned


def test_what_is_held_teaches_until_an_engine_has_told() -> None:
    memory = Memory()
    memory.located(KEY, text("x" * 168, "y" * 168, "z" * 1000), 200)  # 368 characters with what is around
    assert memory.estimate(OTHER, text("x" * 168)) == int(184 / 1.84)
    memory.remember(OTHER, text("x" * 384), None)
    memory.learn(OTHER, text("x" * 384), 50)
    assert memory.estimate(KEY, text("x" * 384)) == 50
    memory.located(KEY, text("x" * 168, "y" * 168, "z" * 1000), 200)
    assert memory.estimate(KEY, text("x" * 384)) == 50
    # Tenants and models teach none but themselves.
    assert memory.estimate(ConversationKey("t", "n", "c"), text("x" * 384)) == 100
    assert memory.estimate(ConversationKey("u", "m", "c"), text("x" * 384)) == 100


def test_what_cannot_be_the_text_that_is_held_teaches_nothing() -> None:
    memory = Memory()
    for held in (0, 1, 1_000_000):
        memory.located(KEY, text("x" * 168, "y" * 168, "z" * 1000), held)
    memory.learn(KEY, APIS[COMPLETIONS].prompt_text({"prompt": None}), 100)
    assert memory.estimate(OTHER, text("x" * 384)) == 100


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("to", "event"),
    [
        (CHAT, {"choices": [], "usage": {"prompt_tokens": 70, "total_tokens": 71}}),
        (RESPONSES, {"type": "response.completed", "response": {"usage": {"input_tokens": 70}}}),
        (
            MESSAGES,
            {"message": {"usage": {"input_tokens": 30, "cache_read_input_tokens": 40, "output_tokens": 0}}},
        ),
    ],
)
@pytest.mark.parametrize("end", [b"\n\n", b""])
def test_a_streams_length_is_seen_wherever_it_is_cut(
    to: str, event: dict[str, Any], size: int, end: bytes
) -> None:
    said = {
        "choices": [{"delta": {"content": '"usage":{"prompt_tokens":9,"input_tokens":9}'}}],
        "usage": None,
    }
    odd = b'data: {"prompt_tokens": \n\n' + b'data: [{"input_tokens": 4}]\n\n'
    raw = b"data: " + json.dumps(said).encode() + b"\n\n" + odd
    raw += b"event: x\ndata: " + json.dumps(event).encode() + end
    guard = StreamGuard(APIS[to])
    out = b"".join(guard.passed(raw[at : at + size]) for at in range(0, len(raw), size)) + guard.rest()
    assert (out, guard.prompt_tokens) == (raw, 70)


# Routers


async def estimated(r: Rig, reply: Reply) -> int:
    async with r.http.get(f"{r.url}/debug/turns/{reply.headers['x-request-id']}") as response:
        tokens = (await response.json())["tokens"]
        return int(tokens["prompt_estimated"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("to", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_any_answer_that_says_how_long_its_prompt_was_teaches_that(to: str, stream: bool) -> None:
    said = short(400)
    names = {COMPLETIONS: {"prompt": said}, RESPONSES: {"input": said}}
    limit = "max_output_tokens" if to == RESPONSES else "max_tokens"
    prompt = names.get(to, {"messages": [{"role": "user", "content": said}]})
    body = {"model": "fake", limit: 4, "conversation_id": "c1", **prompt}
    async with rig(prefill=0) as r:
        if stream:
            asked = {**body, "stream": True}
            if to in (CHAT, COMPLETIONS):
                asked["stream_options"] = {"include_usage": True}
            async with r.http.post(r.url + to, json=asked) as response:
                assert (response.status, bool(await response.read())) == (200, True)
        else:
            assert (await r.post(body, to=to)).status == 200
        true = len(kv.prompt_tokens({"prompt": said}))
        reply = await r.post({**body, "conversation_id": "c2"}, to=to)
        assert abs(await estimated(r, reply) - true) < 0.05 * true


async def test_routers_that_take_turns_know_what_is_new() -> None:
    async with rig() as r:
        settings = RouterSettings(
            port=0, plane_address="in-memory:1", prefill_urls=(r.p.url,), decode_urls=(r.d.url,)
        )
        async with RouterServer(settings, plane=r.plane) as second:
            urls = [r.url, f"http://127.0.0.1:{second.port}"]
            said, key = list[str](), ConversationKey("default", "fake", "c1")
            for turn in range(6):
                said.append(short(300 if turn else 600))
                async with r.http.post(urls[turn % 2] + CHAT, json=chat(*said)) as response:
                    answer = await response.json()
                    told = {name.lower(): value for name, value in response.headers.items()}
                said.append(answer["choices"][0]["message"]["content"])
                if turn:
                    held = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    new = answer["usage"]["prompt_tokens"] - held
                    assert told["x-kvplane-path"] == "direct"
                    assert abs(int(told["x-kvplane-new-tokens"]) - new) < 0.15 * new
                    assert abs(int(told["x-kvplane-expected-tokens"]) - held) < 0.05 * held
                await until(lambda: r.plane._over[key] == r.plane._latest[key])


async def test_a_turn_that_nobody_names_and_is_said_again_has_nothing_new() -> None:
    async with rig(prefill=0) as r:
        first = await r.post(chat(short(300), conversation=None))
        said = chat(short(300), first.text, short(300), conversation=None)
        await r.post(said)
        await until(lambda: len(r.plane.locations) == 2)
        del r.plane.locations[min(r.plane.locations, key=lambda key: r.plane.locations[key].turn)]
        settings = RouterSettings(port=0, plane_address="in-memory:1", decode_urls=(r.d.url,))
        async with (
            RouterServer(settings, plane=r.plane) as second,
            r.http.post(f"http://127.0.0.1:{second.port}{CHAT}", json=said) as response,
        ):
            assert response.headers["x-kvplane-new-tokens"] == "0"
