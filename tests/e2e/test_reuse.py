"""Real conversations on real vLLM: what is reused is right, streamed or not, whatever the client changed.

Engines in float32. The reference is the same prompt without a conversation id, which nothing is reused for.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.histories import run
from tests.e2e.parts import Parts
from tests.e2e.player import Addresses
from tests.e2e.talk import Answer, Messages, assistant, say, user

pytestmark = [pytest.mark.vllm, pytest.mark.stack("parts")]


HISTORIES = 40


@pytest.fixture
def url(parts: Parts) -> str:
    """Base URL of a router with default settings."""
    return parts.router().url


def history(url: str, conversation_id: str, *, first_words: int = 120, turns: int = 2) -> Messages:
    """Play some turns of a conversation and return its messages."""
    messages = Messages()
    for turn in range(turns):
        messages.append(user(first_words if turn == 0 else 25, f"{conversation_id}/{turn}"))
        answer = say(url, messages, conversation_id)
        assert answer.status == 200, answer.body
        messages.append(assistant(answer.text))
    return messages


def reference(url: str, messages: Messages) -> Answer:
    """The same prompt, with nothing reused."""
    answer = say(url, messages, None, path="cold")
    assert (answer.status, answer.path) == (200, "cold"), answer.body
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", ["pull", "direct"])
def test_an_unchanged_history_is_reused_and_right(url: str, path: str, stream: bool) -> None:
    conversation_id = f"same-{path}-{stream}"
    messages = history(url, conversation_id)
    messages.append(user(20, "next"))
    reused = say(url, messages, conversation_id, path=path, stream=stream)
    expected = reference(url, messages)
    assert reused.path == path, reused.reason
    assert reused.tokens == expected.tokens
    assert len(reused.tokens) == 16
    prompt = reused.usage["prompt_tokens"]
    if path == "pull":
        assert reused.reused_tokens is not None
        assert reused.reused_tokens > prompt // 2
    elif not stream:
        assert reused.cached_tokens > prompt // 2


def test_different_contexts_give_different_tokens(url: str) -> None:
    """Or equal tokens would prove nothing."""
    seen = {reference(url, [user(40, f"context{number}")]).tokens for number in range(6)}
    assert len(seen) == 6


def test_random_histories_give_the_tokens_of_recomputing_and_reuse_what_is_equal(
    parts: Parts, url: str
) -> None:
    """`python -m tests.e2e.histories` plays as many as it is told."""
    at = Addresses(url, parts.prefill.url, parts.decode.url, parts.plane.address)
    report = asyncio.run(run(at, HISTORIES, seed=20261130))
    figures = report.summary()
    said = json.dumps(figures, indent=1)
    assert figures["histories_equal"] == HISTORIES, said
    assert figures["histories_reuse_exact"] == HISTORIES, said
    assert figures["tokens_pulled"] == figures["tokens_transferred_by_p_metrics"], said
    assert set(figures["served"]) == {"cold", "pull", "direct"}, said
    assert figures["turns_with_part_reused"] >= HISTORIES // 2, "edits leave prefixes to reuse"
    assert figures["different_replies"] > figures["turns"] * 0.8, "or equal tokens would prove nothing"


def test_two_hundred_turns_sent_the_moment_the_last_stream_ends(url: str) -> None:
    reused, reasons = 0, list[str]()
    for conversation in range(10):
        conversation_id = f"hasty-{conversation}"
        path = "pull" if conversation % 2 else None
        messages: Messages = [user(150, conversation_id)]
        for turn in range(21):
            answer = say(url, messages, conversation_id, path=path, stream=True, max_tokens=8)
            assert answer.status == 200, answer.body
            if turn:
                hit = answer.path == "direct" or (answer.path == "pull" and bool(answer.reused_tokens))
                reused += hit
                reasons += [] if hit else [f"{answer.path}: {answer.reason}"]
            messages += [assistant(answer.text), user(6, f"{conversation_id}/{turn}")]
    assert reused >= 199, reasons


def test_nothing_internal_reaches_the_client(url: str) -> None:
    messages = history(url, "internal")
    messages.append(user(10, "next"))
    for path in ("cold", "pull", "direct"):
        for stream in (False, True):
            answer = say(url, messages, "internal", path=path, stream=stream)
            assert answer.status == 200
            assert b"kv_transfer_params" not in answer.body.replace(b'"kv_transfer_params":null', b"")
            assert b"remote_host" not in answer.body
