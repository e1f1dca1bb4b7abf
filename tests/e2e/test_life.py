"""Real engines that pause, get new weights, and end: what was retained before is not reused after."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from urllib.request import Request, urlopen

import pytest

from deploy.rig.stack import Stack
from kvplane.client.client import ControlPlaneClient
from tests.e2e.conftest import StartStack
from tests.e2e.talk import Messages, assistant, say, user

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def stack(start_stack: StartStack) -> Stack:
    """Engines with vLLM's calls for developers, and time to end in."""
    common = {"variables": {"VLLM_SERVER_DEV_MODE": "1"}, "arguments": ["--shutdown-timeout", "20"]}
    return start_stack(
        decode_options=common,
        prefill_options={"extra_config": {"kvplane_ttl_s": 300}},
        plane_arguments=["--turn-wait", "2"],  # for announcements that are on their way
    )


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
    kept, pulled = metrics(stack.decode.url), metrics(stack.prefill.url)  # other tests came before
    messages = turn(stack, "seen")
    moved(stack.decode.url, "retained_turns_total", kept.get("retained_turns_total", 0) + 1)
    decode = moved(stack.decode.url, "announcements_total", kept.get("announcements_total", 0) + 1)
    assert decode["retained_blocks"] >= 4
    assert decode["control_plane_attached"] == 1
    assert decode["budget_blocks"] > 100
    answer = say(stack.url, messages, "seen", path="pull")
    assert answer.path == "pull", answer.reason
    prefill = moved(stack.prefill.url, "pulls_total", pulled.get("pulls_total", 0) + 1)

    def more(name: str) -> float:
        return prefill[name] - pulled.get(name, 0)

    assert more("pulled_tokens_total") == answer.reused_tokens
    assert more("pulled_bytes_total") > 0
    assert more("verified_tokens_total") >= answer.reused_tokens
    assert prefill.get("faults_total", 0) == decode.get("faults_total", 0) == 0


def test_a_pause_does_not_wait_for_leases_and_nothing_is_reused_after(stack: Stack) -> None:
    messages = turn(stack, "paused")
    begin = time.monotonic()
    assert post(f"{stack.decode.url}/pause?mode=abort&clear_cache=true") == 200
    assert time.monotonic() - begin < 60  # a lease takes minutes
    assert post(f"{stack.decode.url}/resume") == 200
    answer = say(stack.url, messages, "paused")
    assert (answer.status, answer.path) == (200, "cold"), answer.reason
    messages = [*messages, assistant(answer.text), user(20, "and again")]
    assert say(stack.url, messages, "paused", path="pull").path == "pull"


def test_nothing_is_reused_after_new_weights(stack: Stack) -> None:
    messages = turn(stack, "reloaded")
    before = metrics(stack.decode.url).get("cache_resets_total", 0)
    assert post(f"{stack.decode.url}/collective_rpc", {"method": "reload_weights"}) == 200
    answer = say(stack.url, messages, "reloaded")
    assert (answer.status, answer.path) == (200, "cold"), answer.reason
    moved(stack.decode.url, "cache_resets_total", before + 1)


def test_an_engine_that_is_told_to_end_leaves_nothing_behind(stack: Stack) -> None:
    turn(stack, "ended")

    async def left() -> tuple[int, int]:
        async with ControlPlaneClient(stack.plane.grpc_address) as client:
            locations, _ = await client.list_locations()
            return len(await client.list_engines()), len(locations)

    engines, locations = asyncio.run(left())
    assert engines == 2
    assert locations >= 1
    begin = time.monotonic()
    stack.decode.stop(grace=60)
    took = time.monotonic() - begin
    assert asyncio.run(left()) == (1, 0)
    assert took < 30
    stack.decode.start()  # for the other tests, which come in any order
    stack.decode.wait_ready()
    stack.plane.wait_engines()
