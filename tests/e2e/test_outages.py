"""Real engines under pressure and with parts of the fleet killed: every request that can be is answered."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.e2e.conftest import StackWith
from tests.e2e.crowd import BLOCKS, CROWDED, FIT, WORDS
from tests.e2e.parts import Parts
from tests.e2e.talk import Answer, Messages, assistant, say, user

pytestmark = pytest.mark.vllm
on_parts = pytest.mark.stack("parts")


@pytest.mark.stack("crowd")
def test_a_decoder_with_room_for_eight_serves_forty_conversations(stack_with: StackWith) -> None:
    """The next after those that fit hangs on stock vLLM until a lease of 480 s ends."""
    stack = stack_with(decode_options=CROWDED)
    assert FIT == 8
    seconds = list[float]()
    for number in range(40):
        conversation_id = f"one-by-one-{number}"
        messages: Messages = [user(WORDS, conversation_id)]
        begin = time.perf_counter()
        answer = say(stack.url, messages, conversation_id, timeout_s=60)
        seconds.append(time.perf_counter() - begin)
        assert answer.status == 200, answer.body
        assert BLOCKS - 1 <= -(-answer.usage["total_tokens"] // 32) <= BLOCKS
        if number % 2:
            messages += [assistant(answer.text), user(5, "more")]
            answer = say(stack.url, messages, conversation_id, path="direct", timeout_s=60)
            assert (answer.status, answer.path) == (200, "direct"), answer.body
    messages += [assistant(answer.text), user(5, "and more")]
    recent = say(stack.url, messages, conversation_id, path="pull", timeout_s=60)
    assert recent.path == "pull", recent.reason
    assert recent.reused_tokens, recent.reason
    # For people (pytest -rP): a ratio is a benchmark, and a decoder that starves would have hung above.
    median = statistics.median(seconds)
    print(
        f"slowest / median: {max(seconds) / median:.2f}, without the first, which pays for handshakes: ",
        end="",
    )
    print(f"{max(seconds[1:]) / median:.2f}")


def until_reused(url: str, conversation_id: str, within_s: float = 90.0) -> Answer:
    """Go on with a conversation until a turn is served with reuse."""
    messages, ends = [user(60, conversation_id)], time.monotonic() + within_s
    while True:
        answer = say(url, messages, conversation_id)
        if answer.status == 200:
            if answer.path in ("pull", "direct"):
                return answer
            messages += [assistant(answer.text), user(5, f"{time.monotonic()}")]
        assert time.monotonic() < ends, f"no reuse: {answer.status} {answer.path} {answer.reason}"


@on_parts
def test_the_control_plane_killed_and_restarted(parts: Parts) -> None:
    url = parts.router().url
    until_reused(url, "before")
    messages: Messages = [user(60, "killed")]
    try:
        for turn in range(12):
            if turn == 4:
                parts.plane.kill()
            if turn == 8:
                parts.plane.start()
                parts.plane.wait_ready()
            answer = say(url, messages, "killed")
            assert answer.status == 200, answer.body
            if 4 <= turn < 8:
                assert answer.path == "cold", answer.reason
            messages += [assistant(answer.text), user(5, f"killed/{turn}")]
        until_reused(url, "after")
    finally:  # for the other tests, which come in any order
        if not parts.plane.running:
            parts.plane.start()
            parts.plane.wait_ready()
        parts.until_attached()


def until_pulled(url: str, conversation_id: str, within_s: float = 90.0) -> None:
    """Go on with a conversation until the prefill engine has read from the decode engine."""
    messages, ends = [user(60, conversation_id)], time.monotonic() + within_s
    while not (answer := say(url, messages, conversation_id, path="pull", timeout_s=60)).reused_tokens:
        assert time.monotonic() < ends, f"nothing pulled: {answer.status} {answer.path} {answer.reason}"
        if answer.status == 200:
            messages += [assistant(answer.text), user(5, f"{time.monotonic()}")]


@on_parts
@pytest.mark.parametrize("same_id", [False, True], ids=["as-another-engine", "with-the-same-engine-id"])
def test_the_decode_engine_killed_and_restarted(parts: Parts, same_id: bool) -> None:
    name, url = f"killed, {same_id}", parts.router().url
    until_pulled(url, f"{name}, before")
    messages: Messages = [user(60, name)]
    answer = say(url, messages, name)
    assert answer.status == 200, answer.body
    messages += [assistant(answer.text), user(5, name)]
    ends = time.monotonic() + 60
    while parts.location(name) is None:
        assert time.monotonic() < ends, "not announced"
        time.sleep(0.02)
    parts.decode.kill()
    ends = time.monotonic() + 1.0
    while (offered := parts.location(name) is not None) and time.monotonic() < ends:
        time.sleep(0.02)
    parts.restart_decode(same_id=same_id)
    assert not offered, "the killed engine's location was still offered after a second"
    ends = time.monotonic() + 60
    while (answer := say(url, messages, name, timeout_s=60)).status != 200:
        assert time.monotonic() < ends, answer.body
        time.sleep(0.2)
    assert answer.path == "cold", answer.reason
    until_pulled(url, f"{name}, after")
