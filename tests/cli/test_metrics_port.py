"""The port that shows nothing but metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvplane.cli.metrics_port import MetricsPort, MetricsPortError


async def page() -> bytes:
    return b"a 1\n"


async def other() -> bytes:
    return b"b 2\n"


@pytest.fixture
async def served() -> AsyncIterator[MetricsPort]:
    async with MetricsPort([page, other]) as served:
        await served.start("127.0.0.1", 0)
        yield served


async def ask(served: MetricsPort, request: bytes) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


async def test_all_pages_are_shown_as_one(served: MetricsPort) -> None:
    head, body = await ask(served, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4" in head
    assert b"Content-Length: 8" in head
    assert body == b"a 1\nb 2\n"


async def test_parameters_of_the_url_change_nothing(served: MetricsPort) -> None:
    _, body = await ask(served, b"GET /metrics?name=a HTTP/1.1\r\n\r\n")
    assert body == b"a 1\nb 2\n"


async def test_head_has_no_body(served: MetricsPort) -> None:
    head, body = await ask(served, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 8" in head
    assert body == b""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"404"),
    ],
)
async def test_there_is_nothing_else(served: MetricsPort, request_: bytes, status: bytes) -> None:
    head, _ = await ask(served, request_)
    assert head.split(b" ")[1] == status


async def test_probes_are_answered_without_metrics(served: MetricsPort) -> None:
    async def broken() -> bytes:
        raise AssertionError("asked for metrics")

    served.pages.append(broken)
    head, body = await ask(served, b"GET /health HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"ok\n"
    # A router is ready at its own port.
    assert b" 404 " in (await ask(served, b"GET /ready HTTP/1.1\r\n\r\n"))[0]
    serving = True
    served.serving = lambda: serving
    assert b" 200 " in (await ask(served, b"GET /ready HTTP/1.1\r\n\r\n"))[0]
    serving = False
    assert b" 503 " in (await ask(served, b"HEAD /ready HTTP/1.1\r\n\r\n"))[0]
    assert b" 200 " in (await ask(served, b"GET /health HTTP/1.1\r\n\r\n"))[0]


async def test_a_head_that_does_not_end_is_not_read_for_ever(served: MetricsPort) -> None:
    head, body = await ask(served, b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 5000)
    assert (head, body) == (b"", b"")


async def test_more_than_some_at_once_are_turned_away(served: MetricsPort) -> None:
    waiting = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(16)]
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    assert await reader.read() == b""
    for _, other_writer in [*waiting, (reader, writer)]:
        other_writer.close()


async def test_a_port_that_is_taken_is_said_to_be(served: MetricsPort) -> None:
    async with MetricsPort([page]) as second:
        with pytest.raises(MetricsPortError, match="is taken") as caught:
            await second.start("127.0.0.1", served.port)
    assert caught.value.taken


async def test_an_address_of_another_host_is_none_to_listen_on() -> None:
    async with MetricsPort([page]) as served:
        with pytest.raises(MetricsPortError) as caught:
            await served.start("192.0.2.1", 0)
    assert not caught.value.taken
