"""Real engines that pause, get new weights, and end: what was retained before is not reused after."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.request import Request, urlopen

import pytest

from tests.e2e.parts import Parts
from tests.e2e.talk import Messages, assistant, say, user

pytestmark = [pytest.mark.vllm, pytest.mark.stack("parts")]


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts, and a router that waits for announcements that are on their way."""

    parts: Parts
    url: str

    @property
    def prefill_url(self) -> str:
        return self.parts.prefill.url

    @property
    def decode_url(self) -> str:
        return self.parts.decode.url


@pytest.fixture
def stack(parts: Parts) -> Stack:
    return Stack(parts, parts.router("--turn-wait", "2").url)


def post(url: str, body: Mapping[str, object] | None = None, timeout_s: float = 90.0) -> int:
    data = json.dumps(body or {}).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=timeout_s) as answer:
        return int(answer.status)


def turn(stack: Stack, conversation_id: str) -> Messages:
    """Play a first turn; return the messages of the second."""
    messages: Messages = [user(120, conversation_id)]
    answer = say(stack.url, messages, conversation_id)
    assert answer.status == 200, answer.body
    return [*messages, assistant(answer.text), user(20, "next")]


def metrics(url: str) -> dict[str, float]:
    """What /metrics says of the connector, summed over labels; and whether NIXL is still there."""
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert "vllm:nixl_xfer_time_seconds" in text
    sums: dict[str, float] = {}
    for name, value in re.findall(
        r"^kvplane_connector_(\w+?)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE
    ):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def moved(url: str, name: str, least: float, within_s: float = 15.0) -> dict[str, float]:
    end = time.monotonic() + within_s
    while (values := metrics(url)).get(name, 0.0) < least and time.monotonic() < end:
        time.sleep(0.2)
    assert values.get(name, 0.0) >= least, values
    return values


def test_metrics_are_on_the_engines_own_page(stack: Stack) -> None:
    kept, pulled = metrics(stack.decode_url), metrics(stack.prefill_url)  # other tests came before
    messages = turn(stack, "seen")
    moved(stack.decode_url, "retained_turns_total", kept.get("retained_turns_total", 0) + 1)
    decode = moved(stack.decode_url, "announcements_total", kept.get("announcements_total", 0) + 1)
    assert decode["retained_blocks"] >= 4
    assert decode["control_plane_attached"] == 1
    assert decode["budget_blocks"] > 100
    answer = say(stack.url, messages, "seen", path="pull")
    assert answer.path == "pull", answer.reason
    prefill = moved(stack.prefill_url, "pulls_total", pulled.get("pulls_total", 0) + 1)

    def more(name: str) -> float:
        return prefill[name] - pulled.get(name, 0)

    assert more("pulled_tokens_total") == answer.reused_tokens
    assert more("pulled_bytes_total") > 0
    assert more("verified_tokens_total") >= answer.reused_tokens
    assert prefill.get("faults_total", 0) == decode.get("faults_total", 0) == 0


def test_a_pause_does_not_wait_for_leases_and_nothing_is_reused_after(stack: Stack) -> None:
    messages = turn(stack, "paused")
    begin = time.monotonic()
    assert post(f"{stack.decode_url}/pause?mode=abort&clear_cache=true") == 200
    assert time.monotonic() - begin < 60  # a lease takes minutes
    assert post(f"{stack.decode_url}/resume") == 200
    answer = say(stack.url, messages, "paused")
    assert (answer.status, answer.path) == (200, "cold"), answer.reason
    messages = [*messages, assistant(answer.text), user(20, "and again")]
    assert say(stack.url, messages, "paused", path="pull").path == "pull"


def test_nothing_is_reused_after_new_weights(stack: Stack) -> None:
    messages = turn(stack, "reloaded")
    before = metrics(stack.decode_url).get("cache_resets_total", 0)
    assert post(f"{stack.decode_url}/collective_rpc", {"method": "reload_weights"}) == 200
    answer = say(stack.url, messages, "reloaded")
    assert (answer.status, answer.path) == (200, "cold"), answer.reason
    moved(stack.decode_url, "cache_resets_total", before + 1)


def test_an_engine_that_is_told_to_end_leaves_nothing_behind(stack: Stack) -> None:
    turn(stack, "ended")
    parts = stack.parts
    ended = parts.decode_id
    assert ended in parts.engines()
    assert parts.held(ended) >= 1
    begin = time.monotonic()
    parts.decode.stop(grace=60)
    took = time.monotonic() - begin
    left = (ended in parts.engines(), parts.held(ended))
    parts.restart_decode(same_id=False)  # for the other tests, which come in any order
    assert left == (False, 0)
    assert took < 45
