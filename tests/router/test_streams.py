"""Streams: bytes untouched, at once, to the end, and never clean when they were broken off."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from tests.router.rig import CHAT, chat, expected_reply, long_text, rig, until


def text_of(stream: bytes) -> str:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(event) for event in events]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
async def test_streaming_reuses_as_well(path: str) -> None:
    async with rig() as r:
        said = [long_text(200)]
        for wanted in ("cold", path):
            body = chat(*said, stream=True, stream_options={"include_usage": True})
            async with r.http.post(r.url + CHAT, json=body, headers={"x-kvplane-path": path}) as response:
                assert response.content_type == "text/event-stream"
                assert response.headers["x-kvplane-path"] == wanted
                assert ("x-kvplane-reused-tokens" in response.headers) == (wanted != "direct")
                stream = await response.read()
            assert stream.endswith(b"data: [DONE]\n\n")
            assert text_of(stream) == expected_reply(body)
            said += [text_of(stream), "next"]


async def test_first_byte_comes_before_the_rest_exists_case_9() -> None:
    async with rig() as r:
        r.d.gate.clear()
        async with r.http.post(r.url + CHAT, json=chat("hello", stream=True)) as response:
            got = b""
            while b'content": "t' not in got:
                got += await response.content.readany()
            assert b"[DONE]" not in got
            r.d.gate.set()
            got += await response.content.read()
        assert got.endswith(b"data: [DONE]\n\n")


async def test_bytes_pass_through_untouched_whatever_they_are() -> None:
    pieces = [
        b'data: {"x":',
        b" 1}\n\nda",
        b"ta: \xff\xfe\x00",
        b"\n\n: comment\n\n" + bytes(range(256)) * 300,
    ]

    async def generate(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-engine": "yes"})
        await out.prepare(request)
        for piece in pieces:
            await out.write(piece)
            await asyncio.sleep(0)
        return out

    app = web.Application()
    app.router.add_post(CHAT, generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = RouterSettings(decode_urls=(url,), port=0)
    async with (
        RouterServer(settings) as router,
        aiohttp.ClientSession() as http,
        http.post(f"http://127.0.0.1:{router.port}{CHAT}", json=chat("x")) as response,
    ):
        assert await response.read() == b"".join(pieces)
        assert response.headers["x-engine"] == "yes"
        assert response.headers["x-kvplane-reason"] == "no_prefill_engine"
    await runner.cleanup()


async def test_a_slow_reader_gets_everything_case_14() -> None:
    async with rig() as r:
        body = chat("hello", stream=True, max_tokens=3000)
        async with r.http.post(r.url + CHAT, json=body) as response:
            got = b""
            while chunk := await response.content.read(20_000):
                got += chunk
                await asyncio.sleep(0.001)
        assert got.endswith(b"data: [DONE]\n\n")
        assert text_of(got) == expected_reply(body)


async def test_a_stream_that_its_engine_broke_off_does_not_end_cleanly() -> None:
    async with rig() as r:
        r.d.faults.append("break_stream")
        async with r.http.post(r.url + CHAT, json=chat("hello", stream=True)) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert (await r.say("still alive")).path is not None


@pytest.mark.parametrize(("fault", "whole"), [("break_stream", False), (None, True)])
async def test_a_client_without_chunks_can_tell_a_broken_stream_too(fault: str | None, whole: bool) -> None:
    async with rig() as r:
        r.d.faults.append(fault)
        body = json.dumps(chat("hello", stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
        writer.write(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        if whole:
            assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        else:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()


async def test_an_error_as_first_event_is_tried_again() -> None:
    async with rig() as r:
        r.d.faults.append("error_stream")
        body = chat("hello", stream=True)
        async with r.http.post(r.url + CHAT, json=body) as response:
            assert response.headers["x-kvplane-reason"] == "decode_failed"
            assert text_of(await response.read()) == expected_reply(body)
        assert len(r.p.requests) == 2


async def test_a_client_that_leaves_mid_stream_stops_the_engine_case_28() -> None:
    async with rig() as r:
        r.d.gate.clear()
        async with aiohttp.ClientSession() as http:
            response = await http.post(r.url + CHAT, json=chat("hello", stream=True))
            await response.content.readany()
            response.close()
        await until(lambda: r.d.aborted)
        await until(lambda: all(e.outstanding == 0 for e in r.router.pool.engines))
        assert (await r.metric("kvplane_router_client_disconnects_total"))[""] == 1


async def test_a_client_that_leaves_during_prefill_stops_that_case_28() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        r.p.faults.append("hang")
        task = asyncio.create_task(r.post(chat(*r.said["c1"], "x"), path="pull"))
        await until(lambda: len(r.p.requests) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: r.p.aborted)
        assert len(r.d.requests) == 1
        # The engine may have begun to read: only time ends this claim.
        assert not r.plane.finished
        assert len(r.plane.claims) == 1


async def test_a_client_that_leaves_while_claiming_leaves_no_claim_case_28() -> None:
    async with rig(plane_timeout_s=5.0) as r:
        await r.say(long_text(200))
        claims = r.plane.calls["claim_location"]
        original = r.plane.claim_location
        reached, go = asyncio.Event(), asyncio.Event()

        async def slow(*args: object, **more: object) -> object:
            reached.set()
            await go.wait()
            return await original(*args, **more)  # type: ignore[arg-type]

        r.plane.claim_location = slow  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(r.post(chat(*r.said["c1"], "x"), path="pull"))
        await reached.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: r.router.metrics.disconnects._value.get() == 1)
        go.set()
        await until(lambda: r.plane.finished)
        assert r.plane.calls["claim_location"] == claims + 1
        assert not r.plane.claims
        assert len(r.p.requests) == 1


async def test_drain_finishes_open_streams() -> None:
    async with rig() as r:
        r.d.gate.clear()
        body = chat("hello", stream=True)
        async with r.http.post(r.url + CHAT, json=body) as response:
            first = await response.content.readany()
            stopping = asyncio.create_task(r.router.stop())
            await asyncio.sleep(0)
            r.d.gate.set()
            assert text_of(first + await response.content.read()) == expected_reply(body)
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await r.http.get(r.url + "/health")


async def test_drain_is_bounded() -> None:
    async with rig(drain_timeout_s=0.1) as r:
        r.d.gate.clear()
        async with r.http.post(r.url + CHAT, json=chat("hello", stream=True)) as response:
            await response.content.readany()
            async with asyncio.timeout(60):
                await r.router.stop()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
