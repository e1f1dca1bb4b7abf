"""Engines that come back at the address of those before: what was kept there is not there any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvplane.client.model import EngineRole
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.router.rig import CHAT, Rig, chat, expected_reply, long_text, rig, until


@asynccontextmanager
async def restarted(r: Rig, engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """Kill an engine; another process takes its place, whose memory holds something else."""
    port = engine.port
    await engine.stop()
    other = FakeEngine(engine.config)
    await other.start(port)
    try:
        async with r.http.post(other.url + CHAT, json=chat(long_text(400, "other"))) as response:
            assert response.status == 200
        yield other
        assert other.violations == []
    finally:
        await other.stop()


async def test_what_the_engine_before_kept_is_not_read_from_the_next_one() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        async with restarted(r, r.d) as other:
            reply = await r.say("next", path="pull")
            assert (reply.path, reply.reason, reply.reused) == ("pull", "failed", "0")
            assert other.strangers == 1


async def test_a_prefill_engine_that_fails_for_it_is_not_asked_with_the_handle_again() -> None:
    """kv_load_failure_policy "fail", vLLM's default: the request ends with an error."""
    failing = EngineConfig(EngineRole.PREFILL, prefix_caching=False, load_failure_policy="fail")
    async with rig(prefill=[failing]) as r:
        await r.say(long_text(200))
        async with restarted(r, r.d) as other:
            reply = await r.say("next", path="pull")
            assert (reply.path, reply.reason) == ("cold", "prefill_failed")
            assert other.strangers == 1
            assert [bool(b["kv_transfer_params"]["remote_block_ids"]) for b in r.p.requests] == [
                False,
                True,
                False,
            ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_decode_engine_computes_or_fails_what_the_prefill_engine_before_had(
    policy: str, stream: bool
) -> None:
    async with rig() as r:
        body = chat(long_text(200), conversation=None, max_tokens=4)
        asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        async with r.http.post(r.p.url + CHAT, json=asked) as response:
            params = (await response.json())["kv_transfer_params"]
        config = replace(r.d.config, load_failure_policy=policy)
        async with restarted(r, r.p) as other, FakeEngine(config) as decode:
            leg = {**body, "stream": stream, "kv_transfer_params": params}
            async with r.http.post(decode.url + CHAT, json=leg) as response:
                status, text = response.status, await response.text()
            assert other.strangers == 1
            if policy == "recompute":
                assert status == 200
                assert all(word in text for word in expected_reply(body).split())
            else:
                # As from vLLM: a stream has begun by then.
                assert (status, '"error"' in text) == (200 if stream else 500, True)


async def test_nothing_is_prefilled_while_no_decode_engine_is_there() -> None:
    async with rig() as r:
        port = r.d.port
        await r.d.stop()
        first = await r.post(chat("hello"))
        again = await r.post(chat("hello"))
        assert [(e.status, e.reason) for e in (first, again)] == [(503, "decode_unreachable")] * 2
        # That it was gone was known the second time.
        assert len(r.p.requests) == 1
        await r.d.start(port)
        # Whether or not it is known already that it is back.
        assert (await r.say("hello")).path == "cold"
        await until(lambda: r.router.pool.engines[1].up)
        asked = len(r.p.requests)
        await r.say("more", path="cold")
        assert len(r.p.requests) == asked + 1


async def test_a_holder_that_is_gone_leaves_nothing_for_prefill_engines_to_do() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        await r.d.stop()
        for path in ("direct", "pull"):
            reply = await r.post(chat(*r.said["c1"], "next"), path=path)
            assert (reply.status, reply.reason) == (503, "decode_unreachable")
        assert len(r.p.requests) == 1
        assert not r.plane.claims
