"""The live view: what it counts, once for scripts, again and again for people."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from kvplane.cli.top_view import quantile
from kvplane.client import model as m
from tests.cli.fleet import Fleet, fleet
from tests.cli.people import run
from tests.controlplane.wire import announcement

PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    async with fleet() as made:
        await made.plane()
        await made.engine("p", "prefill", total_blocks=100)
        await made.engine("d", "decode", total_blocks=100)
        yield made


async def retained(f: Fleet, conversation: str) -> None:
    """Have a conversation announced by an engine without a stream, and its next turn begun."""
    client = await f.client()
    epoch = (await client.register_engine(m.EngineSpec(m.EngineId("d2"), m.EngineRole.DECODE))).engine_epoch
    key = m.ConversationKey("default", "m", conversation)
    turn = (await client.begin_turn(key, f"{conversation}-1", wait_s=0)).turn
    said = announcement("q", turn, key)
    params = {**json.loads(said.kv_transfer_params), "remote_engine_id": "d2"}
    await client.announce_location(
        m.EngineId("d2"),
        epoch,
        m.Announcement(
            key, said.request_id, turn, 100, 4, json.dumps(params).encode(), said.fingerprint, 400.0
        ),
    )
    await client.begin_turn(key, f"{conversation}-2", wait_s=0)


async def test_once_for_scripts(f: Fleet) -> None:
    await retained(f, "c")
    url = await f.router()
    done = await run("top", "--once", "--plane", f.addresses[0], "--router", url, "-o", "json")
    assert done.code == 0
    said = done.json
    assert (said["turns"], said["hits"], said["hit_rate"]) == (2, 1, 0.5)
    assert said["misses"] == {"unknown_conversation": 1}
    assert said["announcements"] == 1
    assert said["retained"] == {"conversations": 1, "tokens": 100, "blocks": 4, "claimed": 0}
    assert said["turns_per_s"] is None
    assert [engine["id"] for engine in said["engines"]] == ["d", "d2", "p"]
    assert said["replicas"][0]["serving"] is True
    assert set(said["router"]["paths"]) >= {"direct", "pull", "cold"}
    assert said["router"]["trouble"] is None


async def test_once_for_people(f: Fleet) -> None:
    await retained(f, "c")
    url = await f.router()
    done = await run("top", "--once", "--plane", f.addresses[0], "--router", url)
    assert done.lines[0].startswith("replica ")
    assert "turns 2  hit rate 50%" in done.said
    assert "misses: unknown_conversation 1" in done.said
    assert "retained 1 conversations, 100 tokens, 4 blocks; 0 claimed" in done.said
    assert f"router {url}" in done.said
    assert any(line.split()[:4] == ["d", "decode", "m", "attached"] for line in done.lines)


async def test_again_and_again_with_rates(f: Fleet) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "top", "-o", "json", "--interval", "0.2", "--plane", f.addresses[0]),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    first = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
    assert (first["turns"], first["turns_per_s"], first["router"]) == (0, None, None)
    await retained(f, "c")
    async with asyncio.timeout(120):
        while (look := json.loads(await process.stdout.readline()))["turns"] < 2:
            pass
    assert look["turns_per_s"] > 0
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0


async def test_a_control_plane_that_goes_away_is_said_to_be_away(f: Fleet) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "top", "-o", "json", "-n", "0.2", "--timeout", "0.5", "--plane", f.addresses[0]),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert json.loads(await asyncio.wait_for(process.stdout.readline(), 120))["trouble"] is None
    await f.servers[0].stop(0)
    async with asyncio.timeout(120):
        while not (look := json.loads(await process.stdout.readline()))["trouble"]:
            pass
    assert "no control plane answers there" in look["trouble"]
    assert len(look["engines"]) == 2  # as they were seen last
    process.terminate()
    await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0


async def test_on_a_terminal_the_screen_is_given_back(f: Fleet) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "top", "--interval", "0.2", "--plane", f.addresses[0]),
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
    )
    os.close(theirs)
    said = b""
    async with asyncio.timeout(120):
        while b"prefill" not in said:
            said += await asyncio.to_thread(os.read, ours, 65536)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in said:
            said += await asyncio.to_thread(os.read, ours, 65536)
        assert await process.wait() == 0
    os.close(ours)
    assert b"\x1b[?1049h" in said
    assert b"Traceback" not in said


async def test_a_router_that_is_away_does_not_hide_the_rest(f: Fleet) -> None:
    done = await run("top", "--once", "--plane", f.addresses[0], "--router", "http://127.0.0.1:1")
    assert done.code == 0
    assert "router http://127.0.0.1:1: " in done.said
    assert "turns 0" in done.said


async def test_where_nobody_answers_it_does_not_start() -> None:
    done = await run("top", "--plane", "127.0.0.1:1", "--timeout", "2")
    assert (done.code, "no control plane answers there" in done.error) == (2, True)
    assert "--router" in (await run("top", "--router", "nonsense")).error


def test_quantiles_lie_between_the_bounds() -> None:
    inf = float("inf")
    assert quantile((), 0.5) is None
    assert quantile(((1.0, 0.0), (inf, 0.0)), 0.5) is None
    assert quantile(((1.0, 10.0), (2.0, 10.0), (inf, 10.0)), 0.5) == 0.5
    assert quantile(((1.0, 0.0), (2.0, 10.0), (inf, 10.0)), 0.5) == 1.5
    assert quantile(((1.0, 0.0), (2.0, 0.0), (inf, 10.0)), 0.5) == 2.0
