"""Which engine, and which path, by learned rates, queues and prefix caches."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from kvplane.client.model import ConversationKey, EngineRole
from kvplane.router import openai
from kvplane.router.choice import PrefillChoice
from kvplane.router.explain import Trail
from kvplane.router.learned import Memory, RateBook
from kvplane.router.messages import Messages
from kvplane.router.policy import Holder, Path, Rates, Thresholds, TurnFacts, decide, estimate_costs
from kvplane.router.pool import EnginePool
from kvplane.router.turn import Turn
from tests.fakes.core import EngineConfig
from tests.router.rig import chat, long_text, rig, until

KEY = ConversationKey("t", "m", "c")
LIMITS = Thresholds()
RATES = Rates(prefill=1000, decode_prefill=1000, transfer=10_000, receive=10_000)
HELD = TurnFacts(2000, held_tokens=1500, holder=Holder(True), rates=RATES)


def cost(facts: TurnFacts, path: Path) -> float:
    return dict(estimate_costs(facts))[path]


def test_costs_in_seconds() -> None:
    assert cost(HELD, Path.COLD) == pytest.approx(2 + 0.2)
    assert cost(HELD, Path.PULL) == pytest.approx(0.15 + 0.5 + 0.05)
    assert cost(HELD, Path.DIRECT) == pytest.approx(0.5)


def test_queues_count() -> None:
    queued = replace(HELD, prefill_ahead_tokens=3000)
    assert cost(queued, Path.COLD) == pytest.approx(cost(HELD, Path.COLD) + 3)
    assert cost(queued, Path.PULL) == pytest.approx(cost(HELD, Path.PULL) + 3)
    busy = replace(HELD, holder=Holder(True, ahead_tokens=1000))
    assert cost(busy, Path.DIRECT) == pytest.approx(1.5)
    assert decide(replace(busy, prompt_tokens=2400), LIMITS).path is Path.PULL
    assert decide(replace(busy, prompt_tokens=2400, prefill_ahead_tokens=9000), LIMITS).path is Path.DIRECT


def test_affinity_pays_until_the_holder_is_loaded() -> None:
    paths = [
        decide(replace(HELD, prompt_tokens=2300, holder=Holder(True, outstanding=load)), LIMITS).path
        for load in range(0, 12)
    ]
    assert paths[0] is Path.DIRECT
    assert paths[-1] is Path.PULL
    assert paths == sorted(paths, key=lambda path: path is Path.PULL)  # it changes once


def test_a_holder_that_lacks_the_new_part_is_sent_no_more_than_that() -> None:
    elsewhere = replace(HELD, holder=Holder(False))
    assert cost(elsewhere, Path.PULL) == pytest.approx(cost(HELD, Path.PULL) + 0.15)


def test_what_the_prefill_engine_has_itself_is_not_pulled() -> None:
    facts = replace(HELD, holder=Holder(False), local_tokens=1450)
    assert decide(facts, LIMITS).reason == "prefill_has_prefix"
    assert cost(facts, Path.COLD) == pytest.approx(0.55 + 0.2)
    # A long reply is worth a pull all the same.
    assert decide(replace(facts, local_tokens=500), LIMITS).path is Path.PULL
    assert decide(replace(facts, local_tokens=1450, rates=Rates()), LIMITS).reason == "prefill_has_prefix"


# The prefill engine


def _pool(count: int, session: aiohttp.ClientSession) -> EnginePool:
    urls = tuple(f"http://p{index}:1" for index in range(count))
    return EnginePool(
        session,
        prefill_urls=urls,
        decode_urls=(),
        probe_interval_s=1,
        monotonic=lambda: 0.0,
        chance=random.Random(3),
    )


def _turn(tokens: int) -> Turn:
    turn = Turn(None, Messages(), "r", 0.0, Trail("r", "/", lambda: 0.0))  # type: ignore[arg-type]  # no request is read here
    turn.key, turn.prompt_tokens = KEY, tokens
    return turn


async def test_the_engine_that_computed_the_last_prompt_is_taken_until_it_is_loaded() -> None:
    memory, rates = Memory(), RateBook()
    async with aiohttp.ClientSession() as session:
        pool = _pool(3, session)
        choice = PrefillChoice(pool, memory, rates)
        last = pool.engines[2]
        memory.remember(KEY, openai.NO_TEXT, 3000, last.url)
        turn = _turn(4000)
        assert choice.choose(turn, pool.engines) is last
        last.ahead_tokens = 2900
        assert choice.choose(turn, pool.engines) is last
        last.ahead_tokens = 3100
        assert choice.choose(turn, pool.engines) is not last
        # And without a memory to speak of, it is not waited for either.
        last.ahead_tokens = 1000
        for _ in range(3):
            rates.hit(last.url, 3000, 0)
        assert choice.choose(turn, pool.engines) is not last


async def test_a_faster_engine_may_have_the_longer_queue() -> None:
    memory, rates = Memory(), RateBook()
    async with aiohttp.ClientSession() as session:
        pool = _pool(2, session)
        slow, fast = pool.engines
        for _ in range(3):
            rates.computed(slow.url, 1000, 1.0)
            rates.computed(fast.url, 4000, 1.0)
        fast.ahead_tokens = 2000
        assert PrefillChoice(pool, memory, rates).choose(_turn(1000), pool.engines) is fast


async def test_a_changed_history_finds_nothing_in_a_prefix_cache() -> None:
    memory, rates = Memory(), RateBook()
    async with aiohttp.ClientSession() as session:
        pool = _pool(1, session)
        choice = PrefillChoice(pool, memory, rates)
        memory.remember(KEY, openai.NO_TEXT, 3000, pool.engines[0].url)
        turn = _turn(4000)
        assert choice.local_tokens(turn, pool.engines[0], unknown_share=1.0) == 3000
        turn.history_changed = True
        assert choice.local_tokens(turn, pool.engines[0], unknown_share=1.0) == 0


def test_a_rate_counts_the_queue_that_was_before_one() -> None:
    book = RateBook()
    for _ in range(3):
        book.computed("p", 1000 + 3000, 4.0)
    assert book.compute("p") == pytest.approx(1000)


def test_pairs_are_learned_both_ways() -> None:
    book = RateBook()
    for _ in range(3):
        book.received("p", "d", 5000, 0.5)
        book.received("p", "e", 5000, 5.0)
    assert book.rates("p", "d").receive == pytest.approx(10_000)
    assert book.rates("p", "e").receive == pytest.approx(1_000)
    assert book.rates("p", "d").transfer is None


# With engines


def _engines(count: int, role: EngineRole, **more: Any) -> list[EngineConfig]:
    return [EngineConfig(role, **more) for _ in range(count)]


async def test_a_conversation_stays_with_the_prefill_engine_that_has_its_prefix() -> None:
    async with rig(prefill=_engines(3, EngineRole.PREFILL)) as r:
        for _ in range(4):
            await r.say(long_text(300), path="cold")
        assert sorted(len(e.requests) for e in r.prefill) == [0, 0, 4]


async def test_so_does_one_that_nobody_names() -> None:
    async with rig(prefill=_engines(3, EngineRole.PREFILL)) as r:
        said = list[str]()
        for index in range(5):
            said.append(long_text(300, f"s{index}x"))
            # What a decode engine computes in between is no reason to forget the prefill engine.
            reply = await r.post(chat(*said, conversation=None), path="direct" if index == 2 else "cold")
            assert (reply.status, reply.path) == (200, "direct" if index == 2 else "cold")
            said.append(reply.text)
        assert sorted(len(e.requests) for e in r.prefill) == [0, 0, 4]


async def test_idle_prefill_engines_take_turns() -> None:
    async with rig(prefill=3) as r:
        for index in range(6):
            await r.say("hello", f"c{index}")
        assert [len(e.requests) for e in r.prefill] == [2, 2, 2]


async def test_models_and_their_pools_are_kept_apart() -> None:
    prefill = [EngineConfig(EngineRole.PREFILL, model=model) for model in ("a", "a", "b")]
    decode = [EngineConfig(EngineRole.DECODE, model=model) for model in ("a", "b", "b")]
    async with rig(prefill=prefill, decode=decode) as r:
        for index in range(6):
            for model in ("a", "b"):
                await r.say("hello", f"{model}{index}", model=model)
        assert [len(e.requests) for e in r.prefill] == [3, 3, 6]
        assert [len(e.requests) for e in r.decode] == [6, 3, 3]


async def test_what_is_ahead_is_counted_while_it_is() -> None:
    async with rig() as r:
        engine = next(e for e in r.router.pool.engines if e.prefill)
        r.p.faults.append("hang")
        task = asyncio.create_task(r.post(chat(long_text(1000))))
        await until(lambda: r.p.requests)
        assert engine.ahead_tokens > 500
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.ahead_tokens == 0)
