"""Clients that name no conversation, over each of vLLM's chat APIs: reuse on every turn after the first."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from deploy.rig.engines import MODEL_NAME
from tests.e2e.parts import Parts
from tests.e2e.talk import Messages, assistant, user

pytestmark = [pytest.mark.vllm, pytest.mark.stack("parts")]

TURNS = 4


@pytest.fixture
def url(parts: Parts) -> str:
    """Of a router that waits for an announcement that is on its way, however busy the machine is."""
    return parts.router("--turn-wait", "2").url


def post(url: str, route: str, body: dict[str, Any], path: str) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the answer and its headers."""
    headers = {"content-type": "application/json", "x-kvplane-path": path}
    request = urllib.request.Request(
        url + route, json.dumps({"model": MODEL_NAME, "temperature": 0, **body}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer), dict(answer.headers)


def chat(url: str, messages: Messages, path: str) -> tuple[str, Mapping[str, str]]:
    answer, said = post(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 16}, path)
    return answer["choices"][0]["message"]["content"], said


def responses(url: str, messages: Messages, path: str) -> tuple[str, Mapping[str, str]]:
    answer, said = post(url, "/v1/responses", {"input": messages, "max_output_tokens": 16}, path)
    parts = [part for item in answer["output"] for part in item.get("content") or ()]
    return "".join(part["text"] for part in parts), said


def messages_api(url: str, messages: Messages, path: str) -> tuple[str, Mapping[str, str]]:
    answer, said = post(url, "/v1/messages", {"messages": messages, "max_tokens": 16}, path)
    return "".join(part["text"] for part in answer["content"]), said


@pytest.mark.parametrize("path", ["pull", "direct"])
@pytest.mark.parametrize("api", [chat, responses, messages_api], ids=["chat", "responses", "messages"])
def test_without_an_id_every_turn_after_the_first_is_reused(url: str, api: Any, path: str) -> None:
    messages: Messages = [user(80, f"{api.__name__}/{path}")]
    for turn in range(TURNS):
        text, said = api(url, messages, path)
        how = f"turn {turn}: {said['x-kvplane-path']}, {said['x-kvplane-reason']}"
        assert said["x-kvplane-path"] == (path if turn else "cold"), how
        if turn and path == "pull":
            assert int(said["x-kvplane-reused-tokens"]) >= 128, how
        messages += [assistant(text), user(6, f"{path}/{turn}")]
