"""What answers is no router of ours, means harm, or does not end: one line says so, no key goes astray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvplane.cli.fetch import Reach, fetch_text
from kvplane.controlplane.engine_service import EngineServicer
from kvplane.controlplane.status import Status, StoreStatus
from kvplane.store.base import StoreFacts
from tests.cli import people
from tests.cli.fleet import Fleet, fleet
from tests.cli.people import Done, run
from tests.router.rig import chat, rig, until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
_PATIENCE_S = 20.0
Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """What it was asked, and where it is."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.asked: list[str] = []


@asynccontextmanager
async def server(serve: bytes | Serve) -> AsyncIterator[Server]:
    """Answer each request with some bytes, or as `serve` does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        try:
            if isinstance(serve, bytes):
                writer.write(serve)
                await writer.drain()
            else:
                await serve(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        made = Server(listening.sockets[0].getsockname()[1])
        yield made


def says(body: object) -> bytes:
    return HEAD + (body if isinstance(body, bytes) else json.dumps(body).encode())


async def never_ends(writer: asyncio.StreamWriter) -> None:
    """A byte now and then: whoever waits for the next one only, waits for ever."""
    writer.write(HEAD)
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def explained(url: str, *more: str) -> Done:
    async with asyncio.timeout(_PATIENCE_S):
        return await run("explain", "x", "--router", url, *more)


async def test_a_control_plane_that_waits_for_its_store_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(self: EngineServicer, request: object, context: object) -> object:
        return await asyncio.get_running_loop().create_future()

    async def frozen(self: Status) -> StoreStatus:
        return StoreStatus(None, 9.0, "it does not answer within 2 s", "", StoreFacts())

    monkeypatch.setattr(EngineServicer, "ListEngines", waits)
    monkeypatch.setattr(Status, "_store", frozen)
    async with people.plane() as plane:
        for command in (("top", "--once"), ("engines",)):
            done = await plane.run(*command, "--timeout", "0.2")
            assert "the control plane answers, but cannot say: its store: it does not answer" in done.error
            assert done.error.endswith("kvplane doctor tells more")


async def test_a_port_of_grpc_is_no_router() -> None:
    async with people.plane() as plane:
        done = await explained(f"http://{plane.address}")
    assert done.error.startswith(f"--router http://{plane.address}: no router of kvplane's answers there: ")
    assert "gRPC's port" in done.error
    assert "name where it is with --router URL" in done.error
    assert "\\x" not in done.error
    assert "name where it is with --router URL" in (await explained("http://127.0.0.1:1")).error


@pytest.fixture
async def key(tmp_path: Path) -> str:
    file = tmp_path / "key"
    await asyncio.to_thread(file.write_text, "operators-key\n")
    return str(file)


async def test_a_key_is_sent_on_to_nobody(key: str) -> None:
    async with server(says({})) as other:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other.url}/x\r\nContent-Length: 0\r\n\r\n"
        async with server(moved.encode()) as router:
            done = await explained(router.url, "--api-key-file", key)
        assert "answered 302" in done.error
        assert "operators-key" in router.asked[0]
        assert not other.asked


async def test_a_key_goes_past_a_proxy_of_the_environment(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server(says({})) as proxy, server(says({"request_id": "x"})) as router:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert (await explained(router.url, "--api-key-file", key, "-o", "json")).json == {"request_id": "x"}
        assert not proxy.asked


async def test_an_answer_that_never_ends_is_not_waited_for() -> None:
    async with server(never_ends) as router:
        assert "in time" in (await explained(router.url, "--timeout", "0.3")).error


@pytest.mark.parametrize("body", [b"[" * 200_000, {"request_id": "x"}, {"request_id": "x", "tokens": 1}, [1]])
async def test_explain_says_that_an_answer_makes_no_sense(body: object) -> None:
    async with server(says(body)) as router:
        done = await explained(router.url)
    assert "no router of kvplane's" in done.error or "another version" in done.error


async def test_an_id_that_is_none_is_refused() -> None:
    assert "must not be empty" in (await run("explain", "")).error


async def test_names_from_clients_do_nothing_to_a_terminal() -> None:
    name = "\x1b]0;mine\x07\x1b[2Jx"
    async with rig() as r:
        reply = await r.post(chat("hello", model=name))
        done = await run("explain", reply.headers["x-request-id"], "--router", r.url)
        told = await run("explain", reply.headers["x-request-id"], "--router", r.url, "-o", "json")
    assert told.json["model"] == name
    assert "mine" in done.said
    assert done.said.replace("\n", "").isprintable()


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    async with fleet() as made:
        await made.plane()
        yield made


@pytest.mark.parametrize(
    "lines", ['requests_total{path="cold"} NaN', 'reused_tokens_total{path="cold"} +Inf']
)
async def test_top_leaves_out_what_is_no_number(f: Fleet, lines: str) -> None:
    bucket = 'kvplane_router_ttft_seconds_bucket{path="cold",le="%s"} 3\n'
    text = f"kvplane_router_{lines}\n" + bucket % "0.1" + bucket % "many" + bucket % "nan"
    async with server(says(text.encode())) as router:
        done = await run("top", "--once", "--plane", f.addresses[0], "--router", router.url, "-o", "json")
    cold = done.json["router"]["paths"]["cold"]
    assert (cold["requests"], cold["reused_tokens"], cold["ttft_p95_s"]) == (0, 0, pytest.approx(0.095))


async def test_top_says_where_there_is_no_router(f: Fleet) -> None:
    async with server(says(b"node_load1 0.5\n")) as router:
        done = await run("top", "--once", "--plane", f.addresses[0], "--router", router.url)
    assert "no router of kvplane's" in done.said


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, {"status": {}, "prefill": 7, "decode": [[1], {}], "problems": [None, 1]}]
)
async def test_the_doctor_looks_on_whatever_answers(f: Fleet, body: object) -> None:
    async with server(says(body)) as router:
        done = await run("doctor", "--plane", f.addresses[0], "--router", router.url)
    assert (done.code, done.error) == (1, "")
    assert "no_engines" in done.said


async def test_those_that_hang_make_nobody_else_look_dead() -> None:
    hang = asyncio.Event()

    async def hangs(writer: asyncio.StreamWriter) -> None:
        await hang.wait()

    async with server(hangs) as silent, server(says({})) as well, Reach().session(600.0) as session:
        waiting = [asyncio.create_task(fetch_text(session, silent.url)) for _ in range(150)]
        await until(lambda: len(silent.asked) >= 100)
        async with asyncio.timeout(_PATIENCE_S):
            answer = await fetch_text(session, well.url)
        hang.set()
        await asyncio.gather(*waiting)
    assert (answer.trouble, answer.status) == ("", 200)
