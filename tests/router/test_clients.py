"""The openai SDK in front, the real control plane behind, IPv6 in between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import openai
import pytest

from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import EngineRole
from kvplane.controlplane.model import Settings
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.url import open_store
from tests.fakes.core import EngineConfig
from tests.fakes.plane import FakePlane
from tests.router.rig import Rig, expected_reply, long_text, rig


@asynccontextmanager
async def sdk(r: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    # The SDK looks at files of the machine while it is set up.
    client = await asyncio.to_thread(
        openai.AsyncOpenAI, base_url=f"{r.url}/v1", api_key="none", max_retries=0
    )
    async with client:
        yield client


async def test_openai_sdk_without_streaming() -> None:
    async with rig() as r, sdk(r) as client:
        messages: list[Any] = [{"role": "user", "content": long_text(100)}]
        for path in ("cold", "direct"):
            raw = await client.chat.completions.with_raw_response.create(
                model="fake", messages=messages, max_tokens=6, extra_body={"conversation_id": "c"}
            )
            completion = raw.parse()
            assert raw.headers["x-kvplane-path"] == path
            answer = completion.choices[0].message.content
            assert answer == expected_reply({"messages": messages, "max_tokens": 6})
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 6
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "next"}]


async def test_openai_sdk_with_streaming() -> None:
    async with rig() as r, sdk(r) as client:
        messages: list[Any] = [{"role": "user", "content": long_text(100)}]
        for _ in range(2):
            stream = await client.chat.completions.create(
                model="fake",
                messages=messages,
                max_completion_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"conversation_id": "c"},
            )
            answer, usage = "", None
            async for chunk in stream:
                usage = chunk.usage or usage
                answer += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert answer == expected_reply({"messages": messages, "max_tokens": 6})
            assert usage is not None
            assert usage.completion_tokens == 6
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "next"}]
        assert len(r.p.requests) == 1


async def test_openai_sdk_completions_and_errors() -> None:
    async with rig() as r, sdk(r) as client:
        completion = await client.completions.create(model="fake", prompt="once upon", max_tokens=3)
        assert completion.choices[0].text == expected_reply({"prompt": "once upon", "max_tokens": 3})
        with pytest.raises(openai.BadRequestError, match="conversation_id must be a non-empty string"):
            await client.completions.create(model="fake", prompt="x", extra_body={"conversation_id": 5})
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        r.d.faults += ["500", "500"]
        with pytest.raises(openai.InternalServerError, match="decode engine failed"):
            await client.completions.create(model="fake", prompt="x")
        assert [model.id async for model in client.models.list()] == ["fake"]


@asynccontextmanager
async def real_plane(**settings: Any) -> AsyncIterator[tuple[ControlPlaneServer, FakePlane]]:
    clock = SystemClock()
    async with open_store("memory://", clock) as store:
        server = ControlPlaneServer(store, clock, Settings(**settings))
        port = await server.start("127.0.0.1:0")
        async with ControlPlaneClient(f"127.0.0.1:{port}") as client:
            try:
                yield server, cast(FakePlane, client)
            finally:
                await server.stop(0.1)


@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
async def test_conversations_over_the_real_control_plane(path: str) -> None:
    async with real_plane() as (_, plane), rig(plane=plane, prefill=2, decode=2) as r:
        for index in range(3):
            await r.say(long_text(200, f"{index}."), f"c{index}")
        for _ in range(3):
            for index in range(3):
                reply = await r.say("and then", f"c{index}", path=path)
                assert reply.path == path
                if path == "pull":
                    assert reply.reason == "pulled"
                    assert int(reply.reused or 0) > 190


async def test_the_next_turn_may_come_at_once() -> None:
    async with real_plane() as (_, plane), rig(plane=plane) as r:
        await r.say(long_text(100))
        paths = [(await r.say("on")).path for _ in range(30)]
        assert paths == ["direct"] * 30


async def test_a_finished_claim_ends_at_the_real_control_plane() -> None:
    async with real_plane() as (_, plane), rig(plane=plane) as r:
        await r.say(long_text(200))
        assert (await r.say("next", path="pull")).reason == "pulled"
        for _ in range(100):
            locations, _ = await cast(ControlPlaneClient, plane).list_locations()
            if [location.claimed for location in locations] == [False]:
                break
            await asyncio.sleep(0.01)
        assert [location.claimed for location in locations] == [False]


async def test_killed_control_plane_comes_back_with_reuse() -> None:
    clock = SystemClock()
    async with (
        open_store("memory://", clock) as store,
        real_plane() as (server, plane),
        rig(plane=plane, poll_interval_s=0.05) as r,
    ):
        await r.say(long_text(200))
        await server.stop(0)
        for _ in range(3):
            reply = await r.say("next")
            assert (reply.path, reply.reason) == ("cold", "plane_unavailable")
        again = ControlPlaneServer(store, clock)
        await again.start(f"127.0.0.1:{server.port}")
        try:
            for _ in range(400):
                reply = await r.say("back")
                if reply.path == "direct":
                    break
                await asyncio.sleep(0.02)
            assert reply.path == "direct"
        finally:
            await again.stop(0)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")
async def test_ipv6_engines_case_37() -> None:
    engines = [EngineConfig(role, host="::1") for role in (EngineRole.PREFILL, EngineRole.DECODE)]
    async with rig(prefill=engines[:1], decode=engines[1:]) as r:
        assert r.d.url.startswith("http://[::1]:")
        await r.say(long_text(200))
        reply = await r.say("next", path="pull")
        assert reply.path == "pull"
        assert r.p.requests[1]["kv_transfer_params"]["remote_host"] == "::1"
