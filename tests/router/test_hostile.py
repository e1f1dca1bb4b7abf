"""Clients that mean harm: a clear 4xx or a closed connection, bounded memory, and others are served on."""

from __future__ import annotations

import asyncio
import json
import resource
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvplane.router import openai
from kvplane.router.admission import AdmissionLimits
from kvplane.router.forms import _MODEL
from tests.router.rig import CHAT, Rig, chat, rig, until
from tests.router.stub import Answer, Stub, front

MB = 1_000_000
BAD = (b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")


@asynccontextmanager
async def unharmed(**settings: Any) -> AsyncIterator[Rig]:
    """Run a router that must serve as ever afterwards, with nothing left of what it was sent."""
    async with rig(**settings) as r:
        yield r
        assert (await r.post(chat("hello", conversation="after"))).status == 200
        await until(lambda: r.router._admission.requests == 0)
        assert r.router._bodies.held_bytes == 0


async def raw(r: Rig, *pieces: bytes) -> bytes:
    """Send bytes, and return all that comes until the router closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
    try:
        async with asyncio.timeout(60):
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            except ConnectionError:
                pass
            try:
                return await reader.read()
            except ConnectionError:
                return b""
    finally:
        writer.close()


def head(*headers: str, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: r", "Connection: close", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def test_a_body_of_ten_megabytes_is_served() -> None:
    async with unharmed() as r:
        reply = await r.post(chat("x" * (10 * MB)))
        assert reply.status == 200


async def test_ten_thousand_messages_are_served_and_cost_less_than_seconds() -> None:
    async with unharmed() as r:
        before = time.process_time()
        reply = await r.post(chat(*(f"m{number}" for number in range(10_001)), conversation=None))
        assert reply.status == 200
        # Router, two engines and client together.
        assert time.process_time() - before < 5


async def test_what_is_announced_as_too_large_is_refused_unread() -> None:
    async with unharmed() as r:
        said = await raw(r, head("Content-Length: 99999999999"))
        assert said.startswith(b"HTTP/1.1 413 ")
        assert b"larger than" in said


async def test_chunks_without_end_are_refused_at_the_limit() -> None:
    async with unharmed(max_body_bytes=MB) as r:
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        said = await raw(r, head("Transfer-Encoding: chunked"), *[chunk] * 20)
        assert said.startswith(b"HTTP/1.1 413 ")


async def test_a_body_in_chunks_of_a_byte_is_served() -> None:
    async with unharmed() as r:
        body = json.dumps(chat("x" * 50_000)).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        said = await raw(r, head("Transfer-Encoding: chunked"), chunks, b"0\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", ["zz", "-1", "ffffffffffffffffff"])
async def test_chunk_sizes_that_are_none_are_400(size: str) -> None:
    async with unharmed() as r:
        said = await raw(r, head("Transfer-Encoding: chunked"), f"{size}\r\n".encode(), b"{}\r\n0\r\n\r\n")
        assert said.startswith(BAD)


async def test_a_gzip_bomb_is_refused_before_it_is_unpacked() -> None:
    # Made piecewise: what it measures is this process's peak.
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(MB)) for _ in range(400)) + packer.flush()
    assert len(bomb) < MB
    async with unharmed(max_body_bytes=4 * MB) as r:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = await raw(r, head("Content-Encoding: gzip", f"Content-Length: {len(bomb)}"), bomb)
        # One that goes on sending may find the connection reset before it has read the answer.
        assert said.startswith((*BAD, b"HTTP/1.1 413 ")) or not said
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


async def test_many_small_values_are_400_before_they_are_built() -> None:
    async with unharmed() as r:
        body = b'{"model": "fake", "messages": [' + b"[]," * 2_000_000 + b"[]]}"
        reply = await r.post(body)
        assert (reply.status, "2,000,000 values" in reply.body["error"]["message"]) == (400, True)


async def test_messages_in_messages_are_served_or_400() -> None:
    async with unharmed() as r:
        statuses = list[int]()
        for depth in range(100, 520, 15):
            content = b'[{"content":' * depth + b'"x"' + b"}]" * depth
            said = b'{"model": "fake", "messages": [{"role": "user", "content": ' + content + b"}]}"
            statuses.append((await r.post(said)).status)
        assert set(statuses) == {200, 400}
        assert sorted(statuses) == statuses


def test_a_prompt_of_a_million_token_ids_is_not_too_many_values() -> None:
    body = json.dumps({"prompt": list(range(1_000_000))}).encode()
    assert len(openai.parse_body(body)["prompt"]) == 1_000_000


@pytest.mark.parametrize(
    "sent",
    [b"POST /v1/chat", b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX-Slow: ", b""],
    ids=["line", "header", "nothing"],
)
async def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    async with unharmed(keepalive_timeout_s=0.3) as r:
        assert await raw(r, sent) == b""


async def test_headers_that_do_not_come_after_a_first_request_end_the_connection() -> None:
    async with unharmed(keepalive_timeout_s=0.3) as r:
        said = await raw(r, b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n", b"GET /health HTTP/1.1\r\nHo")
        assert said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_come_is_408(path: str, length: str) -> None:
    async with unharmed(body_timeout_s=0.2) as r:
        # With something of the rest the connection need not linger.
        reader, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
        writer.write(head(length, path=path) + b"2\r\n{ \r\n")
        line = await asyncio.wait_for(reader.readline(), 60)
        assert line.startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize(
    "request_",
    [
        head(*(f"X-{number}: 1" for number in range(1000))),
        head("X-Long: " + "x" * 100_000),
        head(path="/" + "x" * 100_000),
        head("Content-Length: 1", "Content-Length: 2"),
        head("Content-Length: 2", "Transfer-Encoding: chunked"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    ],
    ids=["many", "long", "line", "two-lengths", "length-and-chunks", "tls"],
)
async def test_header_bombs_and_smuggling_are_400(request_: bytes) -> None:
    async with unharmed() as r:
        assert (await raw(r, request_)).startswith(BAD)


async def test_large_bodies_under_way_are_bounded_together() -> None:
    async with unharmed(body_budget_bytes=300_000) as r:
        r.d.gate.clear()
        first = asyncio.create_task(r.post(chat("x" * 200_000)))
        await until(lambda: r.d.requests)
        refused = await r.post(chat("x" * 200_000, conversation="c2"))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        elsewhere = await r.post(chat("x" * 200_000), to="/tokenize")
        assert elsewhere.status == 503
        small = asyncio.create_task(r.post(chat("hello", conversation="c3")))
        await until(lambda: len(r.d.requests) == 2)
        r.d.gate.set()
        assert ((await first).status, (await small).status) == (200, 200)
        assert (await r.post(chat("x" * 200_000, conversation="c2"))).status == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing() -> None:
    async with unharmed() as r:
        _, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
        writer.write(head("Content-Length: 1000000") + b"{" * 200_000)
        await until(lambda: r.router._bodies.held_bytes == MB)
        writer.close()
        await until(lambda: r.router._bodies.held_bytes == 0)


@pytest.mark.parametrize("text", ["\x00", "\ufeff", "e\u0301" * 1000])
async def test_odd_characters_are_passed_on_or_refused(text: str) -> None:
    async with unharmed() as r:
        for body in (chat(text, conversation=None), chat("x") | {"model": text, "user": text}):
            async with r.http.post(r.url + CHAT, data=json.dumps(body)) as response:
                assert response.status in (200, 400, 404)


def test_looking_for_the_model_in_a_form_takes_linear_time() -> None:
    before = time.process_time()
    assert _MODEL.search(b'name="model"\r\n' * 200_000) is None
    assert time.process_time() - before < 2


async def test_unknown_encodings_are_4xx() -> None:
    async with unharmed() as r:
        for encoding in ("br", "zstd", "deflate"):
            said = await raw(r, head(f"Content-Encoding: {encoding}", "Content-Length: 4") + b"\xff\0no")
            assert said.startswith(BAD)


async def test_clients_that_do_not_say_what_they_want_take_no_place() -> None:
    async with unharmed(admission=AdmissionLimits(max_requests=1)) as r:
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
            writer.write(head("Content-Type: application/json", "Content-Length: 100"))
            writers.append(writer)
        await until(lambda: len(r.router._bodies._by_request) == 4)
        assert (await r.post(chat("hello"))).status == 200
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_client_that_stops_reading_holds_no_engine_up(path: str) -> None:
    event = (
        b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "' + b"a" * 100_000 + b'"}}]}\n\n'
    )
    async with front(Stub(Answer(event * 200, events=True)), send_timeout_s=1.0) as f:
        body = json.dumps(chat("hi") | {"stream": True, "input": "hi"}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", f.router.port, limit=1024)
        writer.write(head(f"Content-Length: {len(body)}", path=path) + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        (engine,) = f.router.pool.engines
        assert engine.outstanding == 1
        await until(lambda: engine.outstanding == 0 and f.router._admission.requests == 0)
        writer.close()
