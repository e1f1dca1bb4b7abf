"""The router bench: mocks and load generator against each other, then all of it, briefly."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvloop

from kvplane.bench.figures import Of, Row, Target
from kvplane.bench.rig import BenchError
from kvplane.bench.routing import mock, plot, proxy, systems
from kvplane.bench.routing.load import Outcome, chat_request, close_all, hold, load
from kvplane.bench.routing.run import BENCHES, RoutingOptions, request_for, run

SHORT = RoutingOptions(seconds=0.2, rounds=1, streams=20)


@asynccontextmanager
async def engines(events: int = 8, gap_s: float = 0.0) -> AsyncIterator[mock.Engines]:
    async with mock.running(mock.Script(events, gap_s)) as started:
        yield started


def test_load_measures_and_checks_what_the_mocks_answer() -> None:
    async def measure() -> Outcome:
        async with engines() as at:
            return await load(at.decode_port, request_for(at.decode_port), in_flight=4, seconds=0.2)

    outcome = uvloop.run(measure())
    assert not outcome.failures
    assert outcome.done > 4
    assert all(0 < waited < 60 for waited in outcome.first_byte_s)
    assert outcome.rate > 0


def test_mocks_answer_ordinary_clients() -> None:
    async def talk() -> tuple[list[bytes], dict[str, object], dict[str, object]]:
        async with engines(3, 0.001) as at, aiohttp.ClientSession() as session:
            body = {"stream": True, "messages": []}
            async with session.post(f"{at.decode_url}/v1/chat/completions", json=body) as answer:
                events = [line async for line in answer.content if line.startswith(b"data:")]
            async with session.post(f"{at.prefill_url}/v1/chat/completions", json={}) as answer:
                prefilled = await answer.json()
            async with session.get(f"{at.decode_url}/v1/models") as answer:
                return events, prefilled, await answer.json()

    events, prefilled, models = uvloop.run(talk())
    assert len(events) == 3
    assert events[-1] == b"data: [DONE]\n"
    assert prefilled["kv_transfer_params"]["remote_port"] == 5600  # type: ignore[index]
    assert models["data"][0]["id"] == mock.MODEL  # type: ignore[index]


def test_a_body_that_comes_in_pieces_is_one_request() -> None:
    async def talk() -> bytes:
        async with engines(2) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.decode_port)
            raw = chat_request(at.decode_port, b'{"stream": true}', {})
            for piece in (raw[:20], raw[20:-5], raw[-5:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            answer = await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            return answer

    assert uvloop.run(talk()).count(b"data: ") == 2


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


async def _refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
    writer.close()


async def _cutting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n")
    writer.close()


@pytest.mark.parametrize(
    ("server", "problem"), [(_refusing, "answered 503"), (_cutting, "closed before the answer was whole")]
)
def test_wrong_answers_are_failures(server: Handler, problem: str) -> None:
    async def measure() -> Outcome:
        bad = await asyncio.start_server(server, "127.0.0.1", 0)
        async with bad:
            port = bad.sockets[0].getsockname()[1]
            return await load(port, request_for(port), in_flight=1, seconds=0.05)

    outcome = uvloop.run(measure())
    assert not outcome.done
    assert problem in outcome.failures[0]


def test_streams_are_held_open() -> None:
    async def held() -> tuple[int, int]:
        async with engines(4, 600.0) as at:
            streams = await hold(at.decode_port, request_for(at.decode_port), streams=12)
            opened = sum(stream.open for stream in streams)
            close_all(streams)
            return len(streams), opened

    assert uvloop.run(held()) == (12, 12)


def test_all_of_it_runs() -> None:
    command = f"{sys.executable} {proxy.__file__} {{port}} {{prefill}} {{decode}}"
    options = RoutingOptions(0.2, 1, 20, (systems.peer(f"other={command}"),))
    rows = uvloop.run(run(["first-token", "rate", "gaps", "memory"], options))
    names = {row.case.split(":", 1)[0] for row in rows}
    assert names == {"direct", systems.OURS, systems.TOGETHER, systems.BARE, "other"}
    assert {row.bench for row in rows} == set(BENCHES) - {"workers"}
    assert all(row.value > 0 for row in rows)
    assert sum(row.target is not None for row in rows) == 8  # ours only


def test_workers_are_compared_by_clock_and_by_cpu() -> None:
    by_clock, by_cpu = uvloop.run(run(["workers"], RoutingOptions(1.0, 1)))
    assert (by_clock.target, by_cpu.target is not None) == (None, True)
    assert by_clock.value > 0
    # Two share the work: the busier one does less per request than the only one.
    assert by_cpu.ratio is not None
    assert by_cpu.ratio > 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name", "NAME=COMMAND"),
        ("=run {port}", "NAME=COMMAND"),
        ("name=", "NAME=COMMAND"),
        ("name=run", "does not say {port}"),
        ("name=run 'x {port}", "no closing quotation"),
    ],
)
def test_peers_are_checked(text: str, problem: str) -> None:
    with pytest.raises(BenchError, match="--peer.*" + re.escape(problem)):
        systems.peer(text)


@pytest.mark.parametrize("part", ["{prefil}", "{0}", "{port.x}", "{port[0]}", "{port!x}", "{"])
def test_a_placeholder_nobody_knows_is_named(part: str) -> None:
    with pytest.raises(BenchError, match=r"--peer name: cannot fill in .*known are"):
        systems.peer(f"name=run {{port}} {part}").filled(1, mock.Engines(2, 3))


@pytest.mark.parametrize(
    ("command", "said"), [("false {port}", "did not start"), ("no-such-program {port}", "cannot run")]
)
def test_a_peer_that_does_not_start_is_named(command: str, said: str) -> None:
    async def start() -> None:
        async with engines() as at, systems.running(systems.peer(f"name={command}"), at, ()):
            raise AssertionError("it started")

    with pytest.raises(BenchError, match=f"name: .*{said}|{said}"):
        uvloop.run(start())


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"routers.{ending}"
    added = Target(0.6, at_most=True, of=Of.DIFFERENCE)
    rows = [
        Row("first-token", "direct: p50, 1 at a time", "ms", (0.1,)),
        Row("first-token", "kvplane: p50, 1 at a time", "ms", (0.6,), (0.1,), added),
        Row("gaps", "kvplane: CPU per 1,000 requests, 5 ms gaps", "s", (2.0,)),
    ]
    plot.draw(path, rows, systems.OURS)
    assert path.stat().st_size > 1000
    assert json.dumps([row.as_json() for row in rows])
