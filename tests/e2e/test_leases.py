"""Leases on real engines, in real time: renewed by touches, over when idle, and no burden under pressure."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.rig.engines import MODEL_NAME
from deploy.rig.metrics import read
from deploy.rig.stack import Stack
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import ConversationKey, EngineLoad, EngineRole
from tests.e2e.conftest import StackWith
from tests.e2e.crowd import CROWDED, FIT, WORDS
from tests.e2e.talk import Messages, assistant, say, user

pytestmark = pytest.mark.vllm
on_short = pytest.mark.stack("short leases")

TTL_S = 4.0
CLAIM_S = 5.0
BLOCKS_S = TTL_S + 10 + 5 + CLAIM_S + 10
"""The blocks' first deadline: after a last claim's life, the message's margin, and its timeout with grace."""
BLOCKS_PER_CONVERSATION = 16
CONVERSATIONS = 10 * FIT
WORKERS = 6
"""With two fewer than fit; what is retained takes up to half of the room."""


def load(stack: Stack) -> EngineLoad:
    """Return what the decode engine reports."""

    async def ask() -> EngineLoad:
        async with ControlPlaneClient(stack.plane.grpc_address) as client:
            engines = await client.list_engines()
        (decode,) = [engine for engine in engines if engine.spec.role is EngineRole.DECODE]
        return decode.load or EngineLoad()

    return asyncio.run(ask())


def touch(stack: Stack, conversation_id: str, ttl_s: float) -> bool:
    """Ask for a conversation to be kept; returns whether there is anything to keep."""

    async def ask() -> bool:
        async with ControlPlaneClient(stack.plane.grpc_address) as client:
            key = ConversationKey("default", MODEL_NAME, conversation_id)
            return (await client.touch_conversation(key, ttl_s)).noted

    return asyncio.run(ask())


def until(condition: Callable[[], bool], within_s: float) -> float:
    """Wait for a condition; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within_s
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture
def short(stack_with: StackWith) -> Stack:
    """Turns are kept for four seconds."""
    return stack_with(
        decode_options={"extra_config": {"kvplane_ttl_s": TTL_S}},
        plane_arguments=["--claim-timeout", str(CLAIM_S)],
    )


def begin(stack: Stack, conversation_id: str, words: int = 150) -> Messages:
    """Play the first turn of a conversation; returns what its second turn sends."""
    messages: Messages = [user(words, conversation_id)]
    answer = say(stack.url, messages, conversation_id)
    assert answer.status == 200, answer.body
    return [*messages, assistant(answer.text), user(8, "next")]


@on_short
def test_a_touched_turn_is_pulled_long_after_its_first_deadlines(short: Stack) -> None:
    messages, began = begin(short, "touched"), time.monotonic()
    while time.monotonic() < began + BLOCKS_S + 2:
        assert touch(short, "touched", 8.0), f"gone after {time.monotonic() - began:.1f} s"
        time.sleep(1.0)
    answer = say(short.url, messages, "touched", path="pull")
    assert (answer.path, answer.status) == ("pull", 200), answer.reason
    assert answer.reused_tokens, answer.reason
    # vLLM frees and warns of blocks at their deadline, and declines to read what it takes for expired.
    assert "Declining expired" not in Path(short.prefill.log_file).read_text()


@on_short
def test_an_idle_turns_blocks_are_free_soon_after_its_lease(short: Stack) -> None:
    until(lambda: load(short).retained_conversations == 0, 30)
    begin(short, "idle")
    until(lambda: load(short).retained_blocks >= BLOCKS_PER_CONVERSATION, 3)
    took_s = until(lambda: load(short).retained_blocks == 0, BLOCKS_S)
    assert took_s < TTL_S + 4, "long before the blocks' own deadline, by agreement"
    assert not touch(short, "idle", 8.0)


def crowd(stack: Stack) -> float:
    """Play two turns of each of many conversations; returns the mean seconds in the decode engine's queue."""
    before = read(stack.decode.url)

    def first(number: int) -> Messages:
        return begin(stack, f"crowd-{number}", WORDS)

    def second(number: int, messages: Messages) -> int:
        return say(stack.url, messages, f"crowd-{number}").status

    with ThreadPoolExecutor(WORKERS) as workers:
        messages = list(workers.map(first, range(CONVERSATIONS)))
        assert set(workers.map(second, range(CONVERSATIONS), messages)) == {200}
    cost = read(stack.decode.url) - before
    assert cost.requests == 2 * CONVERSATIONS
    return cost.wait_seconds / cost.requests


def figures(stack: Stack) -> dict[str, float]:
    """Return what the decode engine's connector counts, by its own names for it."""
    with urllib.request.urlopen(f"{stack.decode.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sums = defaultdict[str, float](float)
    for name, labels, value in re.findall(
        r"^kvplane_connector_(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE
    ):
        kind = re.search(r'(?:event|reason)="(\w+)"', labels)
        is_counted_apart = kind is not None and name in ("events", "early_frees")
        sums[kind[1] if kind is not None and is_counted_apart else name] += float(value)
    return dict(sums)


def settled(seen: dict[str, float]) -> float:
    """Return how many turns ended, retained or not."""
    return seen.get("retained_turns", 0) + seen.get("not_retained_turns", 0)


@pytest.mark.stack("crowd", last=True)  # for it ends with another stack
def test_ten_times_more_conversations_than_fit_wait_for_no_retained_block(stack_with: StackWith) -> None:
    stack = stack_with(decode_options=CROWDED)
    before = figures(stack)
    ours_s = crowd(stack)
    until(lambda: settled(figures(stack)) - settled(before) == 2 * CONVERSATIONS, 60)
    seen = figures(stack)
    one_way = {"connector": "stock", "extra_config": {"bidirectional_kv_xfer": False}}
    stock_s = crowd(stack_with(prefill_options=one_way, decode_options=CROWDED | one_way))
    print(f"mean seconds in the queue: {ours_s:.4f}, one-directional {stock_s:.4f}; {seen}")

    def more(name: str) -> float:
        return seen.get(name, 0) - before.get(name, 0)

    yielded = more("withdrawn") - more("idle") + more("not_retained_turns")
    assert yielded > CONVERSATIONS // 2, "there was pressure"
    assert seen.get("waited_ms", 0) <= 100 * seen.get("waited", 0)
    assert seen.get("waited_ms_most", 0) <= 2000, "a busy machine may hold one up, a lease lasts longer"
    assert ours_s - stock_s <= 0.1
