"""Real vLLM behind a proxy that knows nothing of kvplane: reuse on every turn after the first, and right.

Engines in float32; P has no prefix cache: what it did not pull it computed. The reference is P itself, asked
without kv_transfer_params, which nothing is reused for. Reuse is read from P's own counters.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.rig.engines import MODEL_NAME
from deploy.rig.metrics import read
from kvplane.client.model import Location
from tests.e2e.parts import Parts
from tests.e2e.talk import Messages, assistant, user

pytestmark = [pytest.mark.vllm, pytest.mark.stack("parts")]

CHUNK = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn brought, and how many tokens P pulled for it."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    pulled: int


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answered: dict[str, Any] = json.load(answer)
    return answered


class Pair:
    """P and D behind a plain proxy."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.prefill, self.url = parts, parts.prefill, parts.proxy_url()

    def turn(self, path: str, prompt: dict[str, Any], **more: Any) -> Turn:
        """Send one turn to the proxy, compare it with the reference, and return it."""
        body = {
            "model": MODEL_NAME,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **prompt,
        }
        before = read(self.prefill.url).transferred_tokens
        answer = post(self.url, path, body | more)
        pulled = read(self.prefill.url).transferred_tokens - before
        expected = post(self.prefill.url, path, body)
        choice, same = answer["choices"][0], expected["choices"][0]
        assert len(choice["token_ids"]) == 16
        assert choice["token_ids"] == same["token_ids"]
        return Turn(
            text=choice.get("text") or choice["message"]["content"],
            tokens=tuple(choice["token_ids"]),
            prompt_tokens=answer["usage"]["prompt_tokens"],
            pulled=int(pulled),
        )

    def complete(self, tokens: Sequence[int], **more: Any) -> Turn:
        return self.turn("/v1/completions", {"prompt": list(tokens)}, **more)

    def chat(self, messages: Messages, **more: Any) -> Turn:
        return self.turn("/v1/chat/completions", {"messages": messages}, **more)

    def location(self, conversation_id: str) -> Location:
        """Return where a conversation is retained, once it is."""
        ends = time.monotonic() + 60
        while (found := self.parts.location(conversation_id)) is None:
            assert time.monotonic() < ends, "not announced"
            time.sleep(0.02)
        return found


@pytest.fixture
def pair(parts: Parts) -> Pair:
    return Pair(parts)


def whole_chunks(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


WAYS: dict[str, dict[str, Any]] = {
    "kv_transfer_params": {"kv_transfer_params": {"conversation_id": "by-params"}},
    "session_id": {"session_id": "by-session"},
    "prompt": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_is_reused_on_every_turn_after_the_first(pair: Pair, way: str) -> None:
    """Replies come back as text here, and are not always the tokens again that they were."""
    messages: Messages = [user(150, f"chat/{way}")]
    last: Turn | None = None
    for number in range(6):
        turn = pair.chat(messages, **WAYS[way])
        if last is None:
            assert turn.pulled == 0
        else:
            assert turn.pulled >= whole_chunks(last.prompt_tokens), f"turn {number}"
        last = turn
        messages += [assistant(turn.text), user(8, f"chat/{way}/{number}")]


def test_tokens_that_come_back_as_they_were_are_reused_to_the_last(pair: Pair) -> None:
    tokens = [7 + (31 * number) % 4000 for number in range(300)]
    last: Turn | None = None
    for number in range(5):
        turn = pair.complete(tokens)
        # Of the reply, the last token's KV was never computed.
        assert turn.pulled == (last.prompt_tokens + 15 if last is not None else 0), f"turn {number}"
        last = turn
        tokens += [*turn.tokens, *(11 + number + (17 * word) % 3900 for word in range(20))]


def test_two_conversations_with_one_system_prompt_do_not_take_each_others(pair: Pair) -> None:
    system = {"role": "system", "content": user(200, "system")["content"]}
    histories: dict[str, Messages] = {name: [system, user(6, f"two/{name}")] for name in "ab"}
    last = dict[str, Turn]()
    for number in range(5):
        for name, messages in histories.items():
            turn = pair.chat(messages)
            if name in last:
                assert turn.pulled >= whole_chunks(last[name].prompt_tokens), f"{name}, turn {number}"
            else:
                assert turn.pulled == 0, "a system prompt in common is nobody's conversation"
            last[name] = turn
            messages += [assistant(turn.text), user(8, f"two/{name}/{number}")]


@pytest.mark.parametrize("named", [False, True])
def test_another_cache_salt_never_matches(pair: Pair, named: bool) -> None:
    way = {"kv_transfer_params": {"conversation_id": "salted"}} if named else {}
    tokens = [9 + (37 * number + named) % 4000 for number in range(300)]
    first = pair.complete(tokens, cache_salt="one", **way)
    tokens += [*first.tokens, 5, 6, 7]
    assert pair.complete(tokens, cache_salt="two", **way).pulled == 0
    tokens += [8, 9]
    again = pair.complete(tokens, cache_salt="two", **way)
    assert again.pulled == whole_chunks(len(tokens) - 2)


def test_a_decode_engine_that_is_gone_costs_no_request_and_is_left_alone(pair: Pair) -> None:
    """As a router of ours would that has claimed a moment before D dies: it gives its locations to P."""

    def body(tokens: Sequence[int]) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def asked(body: dict[str, Any]) -> dict[str, Any]:
        return post(pair.prefill.url, "/v1/completions", body)

    prompts = list[list[int]]()
    claimed = list[Location]()
    for number in range(5):
        tokens = [3 + number + (41 * word) % 3900 for word in range(400)]
        turn = pair.complete(tokens, kv_transfer_params={"conversation_id": f"gone-{number}"})
        prompts.append([*tokens, *turn.tokens, 5, 6, 7])
        claimed.append(pair.location(f"gone-{number}"))
    # Before D is gone: the breaker lets a first probe through after ten seconds.
    expected = [asked(body(tokens)) for tokens in prompts]
    pair.parts.decode.kill()
    try:
        answers, seconds = list[dict[str, Any]](), list[float]()
        for tokens, location in zip(prompts, claimed, strict=True):
            params = {
                **json.loads(location.kv_transfer_params),
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "kvplane": {
                    "router": True,
                    "token_count": location.token_count,
                    "fingerprint": {
                        "chunk_tokens": location.fingerprint.chunk_tokens,
                        "chain": location.fingerprint.chain.hex(),
                    },
                },
            }
            began = time.monotonic()
            answers.append(asked({**body(tokens), "kv_transfer_params": params}))
            seconds.append(time.monotonic() - began)
    finally:  # for the other tests, which come in any order
        pair.parts.restart_decode(same_id=False)  # P reads from nobody for a while that failed it three times
    print(f"seconds per request: {[round(each, 2) for each in seconds]}")  # for people (pytest -rP)
    for answer, reference in zip(answers, expected, strict=True):
        assert answer["choices"][0]["token_ids"] == reference["choices"][0]["token_ids"]
    reports = [answer["kv_transfer_params"]["kvplane"] for answer in answers]
    outcomes = [f"{report['outcome']}:{report.get('detail', '')}" for report in reports]
    assert outcomes == ["failed:read_failed"] * 3 + ["cold:peer_breaker"] * 2, seconds
