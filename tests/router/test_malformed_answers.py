"""Engines whose bytes are no HTTP: whoever reads hears of it at once, and holds no place for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from tests.router.rig import CHAT, chat, until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
BAD = (b"%x\r\n%sXXXX\r\n" % (len(EVENT), EVENT), b"zz\r\n", b"5\r\nhello\rX")


@asynccontextmanager
async def front(kind: bytes, *pieces: bytes) -> AsyncIterator[tuple[RouterServer, aiohttp.ClientSession]]:
    """Run a router whose engine answers a POST by pieces, and then is silent but for its open connection."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                body = json.dumps({"object": "list", "data": [{"id": "fake"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            assert head.startswith(b"POST")
            writer.write(HEAD % kind + CHUNK)
            for piece in pieces:
                await asyncio.sleep(0.05)
                writer.write(piece)
            await over.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = RouterSettings(port=0, decode_urls=(url,))
    try:
        async with RouterServer(settings) as router, aiohttp.ClientSession() as http:
            yield router, http
    finally:
        over.set()
        server.close()


@pytest.mark.parametrize("bad", BAD)
async def test_a_stream_whose_chunks_are_malformed_ends_at_once_so_that_its_client_can_tell(
    bad: bytes,
) -> None:
    async with front(b"text/event-stream", bad) as (router, http), asyncio.timeout(10):
        url = f"http://127.0.0.1:{router.port}{CHAT}"
        async with http.post(url, json=chat("hi", conversation=None, stream=True)) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await until(lambda: router._admission.requests == 0)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_an_answer_whose_chunks_are_malformed_is_502_at_once(path: str) -> None:
    async with front(b"application/json", BAD[0]) as (router, http), asyncio.timeout(10):
        url = f"http://127.0.0.1:{router.port}{path}"
        async with http.post(url, json=chat("hi", conversation=None)) as response:
            assert response.status in (502, 503)
            assert "error" in await response.json()
