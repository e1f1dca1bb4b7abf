"""Whose conversation it is: tenants, models, adapters and ranks apart, ids secret, memory bounded."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvplane.client.model import ConversationKey, EngineId, EngineRole
from kvplane.router.app import APIS
from kvplane.router.learned import Memory
from kvplane.router.settings import RouterSettings
from tests.fakes.core import EngineConfig
from tests.router.rig import Rig, chat, long_text, rig, until
from tests.router.test_clients import real_plane


async def second(stack: AsyncExitStack, r: Rig, plane: Any, **settings: Any) -> Rig:
    """Start another router over the same engines and control plane."""
    urls: dict[str, Any] = {
        "prefill_urls": tuple(e.url for e in r.prefill),
        "decode_urls": tuple(e.url for e in r.decode),
    }
    more = rig(plane=plane, prefill=0, decode=0, static=False, **urls, **settings)
    return await stack.enter_async_context(more)


@pytest.mark.parametrize("conversation", ["c", None], ids=["named", "automatic"])
async def test_tenants_do_not_see_each_other_case_32(conversation: str | None) -> None:
    async with real_plane() as (_, plane), rig(plane=plane, tenant_id="one") as r, AsyncExitStack() as stack:
        other = await second(stack, r, plane, tenant_id="two")
        body = chat(long_text(200), conversation=conversation)
        first = await r.post(body)
        again = body | {"messages": [*body["messages"], *chat("x", first.text, "on")["messages"][1:]]}
        assert (await other.post(again)).reason == "unknown_conversation"
        assert (await r.post(again)).path == "direct"


async def test_names_are_never_joined_case_32() -> None:
    async with real_plane() as (_, plane), rig(plane=plane, tenant_id="a/b") as r, AsyncExitStack() as stack:
        other = await second(stack, r, plane, tenant_id="a")
        await r.post(chat(long_text(200), conversation="c"))
        for reader, conversation in ((other, "b/c"), (r, "b/c"), (other, "c")):
            reply = await reader.post(chat(long_text(200), "x", "on", conversation=conversation))
            assert reply.reason == "unknown_conversation"
        assert (await r.post(chat(long_text(200), "x", "on", conversation="c"))).path == "direct"


@pytest.mark.parametrize("conversation", ["c", None], ids=["named", "automatic"])
async def test_models_and_adapters_are_apart_case_32(conversation: str | None) -> None:
    names = ("base", "base-lora")
    configs = [
        EngineConfig(role, model=names[0], adapters=names[1:], prefix_caching=role is EngineRole.DECODE)
        for role in (EngineRole.PREFILL, EngineRole.DECODE)
    ]
    async with rig(prefill=configs[:1], decode=configs[1:]) as r:
        said = [long_text(200)]
        first = await r.post(chat(*said, conversation=conversation, model=names[0]))
        said += [first.text, "on"]
        foreign = await r.post(chat(*said, conversation=conversation, model=names[1]))
        assert (foreign.status, foreign.reason) == (200, "unknown_conversation")
        assert (await r.post(chat(*said, conversation=conversation, model=names[0]))).path == "direct"


async def test_ids_and_prompts_are_in_no_log_case_34() -> None:
    secret, prompt = "ticket-of-somebody", "what-somebody-said"
    with capture_logs() as logs:
        async with rig() as r:
            for _ in range(2):
                await r.post(chat(prompt, conversation=secret), headers={"Authorization": "Bearer hidden"})
            r.d.faults += ["500", "500"]
            await r.post(chat(prompt, conversation=secret))
            metrics = json.dumps(await r.metric("kvplane"))
    text = metrics + repr(logs)
    assert logs
    for word in (secret, prompt, "hidden"):
        assert word not in text


def test_the_default_is_loopback_case_34() -> None:
    assert RouterSettings(decode_urls=("http://d",)).host == "127.0.0.1"


async def test_invented_ids_take_bounded_memory_case_35() -> None:
    """In the router; the control plane's own bound, and that engines are told, is tested there."""
    memory, rates = Memory(capacity=100), 0
    text = APIS["/v1/chat/completions"].prompt_text(chat("hello"))
    for index in range(10_000):
        memory.remember(ConversationKey("t", f"m{index % 7}", f"i{index}"), text, 5)
        rates = max(rates, len(memory))
    assert rates == len(memory) == 100


async def test_each_of_four_ranks_behind_one_address_gets_its_own_case_36() -> None:
    config = EngineConfig(EngineRole.DECODE, announces_endpoint=True)
    async with rig(decode=[config], poll_interval_s=0.01) as r:
        (engine,) = [e for e in r.plane.engines.values() if e.spec.role is EngineRole.DECODE]
        for rank in range(1, 4):
            name = EngineId(f"{engine.spec.engine_id}_dp{rank}")
            spec = replace(engine.spec, engine_id=name, data_parallel_rank=rank)
            r.plane.engines[name] = replace(engine, spec=spec)
        await until(lambda: any(len(e.engine_ids) == 4 for e in r.router.pool.engines))
        for rank in range(4):
            await r.say(long_text(100, f"{rank}."), f"c{rank}")
            key = next(key for key in r.plane.locations if key.conversation_id == f"c{rank}")
            r.plane.locations[key] = replace(r.plane.locations[key], data_parallel_rank=rank)
        for rank in range(4):
            # A client has no say in it.
            reply = await r.say("next", f"c{rank}", headers={"X-data-parallel-rank": "2"})
            assert reply.path == "direct"
            assert r.d.headers[-1]["X-data-parallel-rank"] == str(rank)
