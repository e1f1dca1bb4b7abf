"""`kvplane route --workers`: one port, several processes, one account of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvplane.cli.workers import share
from kvplane.client.model import EngineRole
from tests.cli.test_commands import event, refused, start
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.plane import FakePlane

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@asynccontextmanager
async def decode_engine(token_gap_s: float = 0.0) -> AsyncIterator[FakeEngine]:
    config = EngineConfig(EngineRole.DECODE, token_gap_s=token_gap_s)
    async with FakeEngine(config, FakePlane()) as engine:
        yield engine


class Fleet:
    """The processes of one `kvplane route --workers 2`, and what they have logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.pids: dict[int, int] = {}
        self.log: list[dict[str, object]] = []
        self._came = asyncio.Condition()

    async def read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            entry = json.loads(line)
            async with self._came:
                self.log.append(entry)
                if entry["event"] == "worker_started":
                    self.pids[entry["worker"]] = entry["pid"]
                self._came.notify_all()

    async def logged(self, name: str, times: int = 1) -> list[dict[str, object]]:
        def found() -> list[dict[str, object]]:
            return [entry for entry in self.log if entry["event"] == name]

        async with asyncio.timeout(120), self._came:
            await self._came.wait_for(lambda: len(found()) >= times)
        return found()

    async def chat(self) -> int:
        """Send a request on a connection of its own."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=CHAT) as response,
        ):
            await response.read()
            return response.status

    async def served(self) -> float:
        """Return how many requests the metrics know of."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{self.port}/metrics") as response,
        ):
            lines = (await response.text()).splitlines()
        assert not [line for line in lines if "pid=" in line]
        name = "kvplane_router_requests_total{"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def fleet(*arguments: str) -> AsyncIterator[Fleet]:
    process = await start("route", "--workers", "2", "--port", "0", *arguments)
    running = Fleet(process)
    reading = asyncio.create_task(running.read())
    try:
        running.port = int(str((await running.logged("workers_started"))[0]["port"]))
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(120):
            await process.wait()
            await reading
            assert process.stdout is not None
            await process.stdout.read()  # to its end, or its pipe stays open


async def test_workers_share_a_port_and_their_metrics_add_up() -> None:
    async with decode_engine() as engine, fleet("--decode", engine.url) as router:
        assert await asyncio.gather(*(router.chat() for _ in range(40))) == [200] * 40
        turns = await router.logged("turn_served", 40)
        assert {entry["worker"] for entry in turns} == {0, 1}
        # Whichever is asked.
        assert [await router.served() for _ in range(6)] == [40.0] * 6
    assert router.process.returncode == 0


async def test_a_worker_that_dies_is_started_again_and_what_it_counted_stays() -> None:
    async with decode_engine() as engine, fleet("--decode", engine.url) as router:
        assert await asyncio.gather(*(router.chat() for _ in range(20))) == [200] * 20
        await router.logged("turn_served", 20)
        before = dict(router.pids)
        os.kill(before[0], signal.SIGKILL)
        died = (await router.logged("worker_died"))[0]
        assert (died["worker"], died["problem"]) == (0, "killed by signal 9")
        # The other one serves meanwhile.
        assert await router.chat() == 200
        await router.logged("worker_started", 3)
        assert router.pids[0] != before[0]
        assert router.pids[1] == before[1]
        assert await asyncio.gather(*(router.chat() for _ in range(20))) == [200] * 20
        await router.logged("turn_served", 41)
        assert [await router.served() for _ in range(4)] == [41.0] * 4


async def test_a_worker_that_hangs_is_replaced() -> None:
    async with decode_engine() as engine, fleet("--decode", engine.url) as router:
        stuck = router.pids[1]
        os.kill(stuck, signal.SIGSTOP)
        died = (await router.logged("worker_died"))[0]
        assert died["worker"] == 1
        assert "no sign of life" in str(died["problem"])
        await router.logged("worker_started", 3)
        assert router.pids[1] != stuck
        assert await asyncio.gather(*(router.chat() for _ in range(20))) == [200] * 20


async def test_streams_finish_when_the_parent_is_told_to_stop() -> None:
    async with decode_engine(token_gap_s=0.05) as engine, fleet("--decode", engine.url) as router:
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"http://127.0.0.1:{router.port}/v1/chat/completions",
                json={**CHAT, "stream": True, "max_tokens": 20},
            ) as response,
        ):
            first = await response.content.readany()
            router.process.send_signal(signal.SIGTERM)
            rest = await response.content.read()
        assert (first + rest).rstrip().endswith(b"data: [DONE]")
        async with asyncio.timeout(120):
            assert await router.process.wait() == 0
        assert not [entry for entry in router.log if entry["event"] in ("worker_died", "worker_killed")]


async def test_no_worker_outlives_a_parent_that_was_killed() -> None:
    async with decode_engine() as engine, fleet("--decode", engine.url) as router:
        router.process.kill()
        # The log ends when the last process that writes to it does.
        await router.logged("stopped", 2)


async def test_up_runs_workers_beside_its_control_plane() -> None:
    async with decode_engine() as engine:
        ports = ("--port", "0", "--grpc-port", "0")
        process = await start("up", "--workers", "2", "--decode", engine.url, *ports)
        ready = await event(process, "ready")
        async with aiohttp.ClientSession() as http, http.get(f"{ready['http']}/ready") as response:
            assert (await response.json())["control_plane"] == "up"
        process.terminate()
        await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--decode is missing"),
        (("--decode", "http://127.0.0.1:1", "--host", "0.0.0.0"), "--allow-remote"),
        (("--decode", "http://127.0.0.1:1", "--workers", "0"), "--workers 0: input should be greater"),
    ],
)
async def test_what_cannot_work_is_refused_once_for_all(arguments: tuple[str, ...], said: str) -> None:
    assert said in await refused("route", "--workers", "2", "--port", "0", *arguments)


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "who-shares"])
async def test_a_port_that_somebody_else_listens_on_is_not_shared(shares: bool) -> None:
    with socket.socket() as taken:
        if shares:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ("--workers", "2", "--decode", "http://127.0.0.1:1", "--port", port)
        said = await refused("route", *arguments, code=1)
        assert f"port {port} on 127.0.0.1 is taken" in said


def test_limits_are_split_and_no_limit_stays_none() -> None:
    assert [share(limit, 3) for limit in (0, 1, 3, 4096)] == [0, 1, 1, 1366]
