"""The rig's proxy that knows nothing of kvplane."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from deploy.rig.plain_proxy import PlainProxy
from tests.router.rig import CHAT, Rig, chat, rig


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Rig, str]]:
    """Run engines and the proxy; gives the URL to ask."""
    async with rig(with_plane=False) as r:
        runner = web.AppRunner(PlainProxy(r.p.url, r.d.url).app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield r, f"http://127.0.0.1:{runner.addresses[0][1]}{CHAT}"
        finally:
            await runner.cleanup()


def body(**more: object) -> io.BytesIO:
    return io.BytesIO(json.dumps(chat("hello", conversation=None, **more)).encode())


@pytest.mark.parametrize("down", ["prefill", "decode"])
async def test_an_engine_that_is_down_is_a_502_and_no_fault(
    down: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied() as (r, url):
        await (r.p if down == "prefill" else r.d).stop()
        with caplog.at_level(logging.ERROR):
            async with r.http.post(url, data=body()) as response:
                answer = await response.json(content_type=None)
        assert response.status == 502
        assert "an engine failed" in answer["error"]["message"]
        assert not caplog.records


async def test_what_breaks_off_ends_without_an_end() -> None:
    async with proxied() as (r, url):
        r.d.faults.append("break_stream")
        async with r.http.post(url, data=body(stream=True)) as response:
            with pytest.raises(aiohttp.ClientError):
                await response.read()
