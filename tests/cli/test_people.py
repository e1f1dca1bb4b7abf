"""Commands for people: engines, conversations, end, drain; what they print, for whom, and how they end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from kvplane.cli.config import load_config
from kvplane.cli.connection import Target
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import EngineId, EngineLoad, Location
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.cli import people
from tests.cli.people import Plane, key, run

PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with people.plane() as made:
        yield made


async def test_engines_are_listed_with_what_they_hold(plane: Plane) -> None:
    epoch = await plane.engine("d", endpoint="http://10.0.0.2:8200", total_blocks=500)
    await plane.engine("p", "prefill")
    await plane.client.renew_engine(EngineId("d"), epoch, EngineLoad(1, 2, 30, 4, 1))
    await plane.retain(epoch, key())
    done = await plane.run("engines")
    assert done.code == 0
    title, first, second = done.lines
    assert title.split()[:4] == ["ENGINE", "ROLE", "MODEL", "STATE"]
    assert first.split()[:8] == ["d", "decode", "m", "registered", "1", "100", "4", "0"]
    assert "http://10.0.0.2:8200" in first
    assert second.split()[:4] == ["p", "prefill", "m", "registered"]
    d, _ = (await plane.run("engines", "--output", "json")).json["engines"]
    assert d["id"] == "d"
    assert (d["role"], d["state"], d["epoch"], d["models"]) == ("decode", "registered", epoch, ["m"])
    assert d["retained"] == {"conversations": 1, "tokens": 100, "blocks": 4, "claimed": 0}
    assert d["load"]["waiting_requests"] == 2
    assert 0 <= d["last_seen_s"] < 10
    assert d["announcements"] == 1


async def test_engines_that_are_gone_are_shown_if_asked_for(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.client.deregister_engine(EngineId("d"), epoch)
    empty = await plane.run("engines")
    assert (empty.code, len(empty.lines)) == (0, 1)
    assert "no engine" in empty.told
    done = await plane.run("engines", "--all")
    assert done.lines[1].split()[:4] == ["d", "-", "-", "expired"]
    (gone,) = (await plane.run("engines", "--all", "-o", "json")).json["engines"]
    assert (gone["state"], gone["epoch"], gone["role"], gone["retained"]) == ("expired", epoch, None, None)


async def test_conversations_are_listed_filtered_and_paged(plane: Plane) -> None:
    epoch, other = await plane.engine("d"), await plane.engine("e")
    await plane.retain(epoch, key("a1"))
    await plane.retain(epoch, key("a2", "t2"))
    await plane.retain(other, key("b", model="n"), "e")

    async def listed(*options: str) -> list[str]:
        done = await plane.run("conversations", *options, "--output", "json")
        return sorted(found["conversation_id"] for found in done.json["conversations"])

    assert await listed() == ["a1", "a2", "b"]
    assert await listed("--engine", "e") == ["b"]
    assert await listed("--tenant", "t2") == ["a2"]
    assert await listed("--model", "n") == ["b"]
    assert await listed("--prefix", "a") == ["a1", "a2"]
    first = (await plane.run("conversations", "--limit", "2", "-o", "json")).json
    assert len(first["conversations"]) == 2
    token = first["next_page_token"]
    rest = (await plane.run("conversations", "--page-token", token, "-o", "json")).json
    assert (len(rest["conversations"]), rest["next_page_token"]) == (1, "")
    short = await plane.run("conversations", "--limit", "1")
    assert len(short.lines) == 2
    assert "--all" in short.told
    assert len((await plane.run("conversations", "--all", "--limit", "1")).lines) == 4


async def test_conversations_are_sorted_by_name(plane: Plane) -> None:
    epoch = await plane.engine("d")
    for name in ("b", "aaa", "z9", "aa"):
        await plane.retain(epoch, key(name))
    done = await plane.run("conversations")
    assert [line.split()[0] for line in done.lines[1:]] == ["aa", "aaa", "b", "z9"]
    listed = (await plane.run("conversations", "-o", "json")).json["conversations"]
    assert [found["conversation_id"] for found in listed] == ["aa", "aaa", "b", "z9"]


async def test_what_is_claimed_is_said_to_be(plane: Plane) -> None:
    epoch = await plane.engine("d")
    turn = await plane.retain(epoch, key())
    assert not isinstance(await plane.client.claim_location(key(), "r", "o", turn=turn), m.MissReason)
    (found,) = (await plane.run("conversations", "-o", "json")).json["conversations"]
    assert (found["state"], found["tokens"], found["engine_id"]) == ("claimed", 100, "d")


async def test_ids_cannot_write_to_the_terminal(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.retain(epoch, key("\x1b[31mred\n\x07[bold]"))
    done = await plane.run("conversations")
    assert "\\x1b[31mred\\n\\x07[bold]" in done.said
    assert "\x1b" not in done.said
    (found,) = (await plane.run("conversations", "-o", "json")).json["conversations"]
    assert found["conversation_id"] == "\x1b[31mred\n\x07[bold]"


async def test_watching_shows_what_is_there_and_what_changes(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.retain(epoch, key("first"))
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "conversations", "--watch", "-o", "json", "--prefix", "f", "--plane", plane.address),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None

    async def event() -> tuple[str, str]:
        assert process.stdout is not None
        said = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        return said["event"], said["conversation_id"]

    assert await event() == ("retained", "first")
    await plane.retain(epoch, key("other"))
    await plane.retain(epoch, key("fourth"))
    assert await event() == ("retained", "fourth")
    await plane.client.end_conversation(key("first"))
    assert await event() == ("gone", "first")
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0


async def test_watching_goes_on_when_the_control_plane_is_back() -> None:
    clock = SystemClock()
    async with MemoryStore(clock) as store:
        async with ControlPlaneServer(store, clock) as server:
            port = await server.start("127.0.0.1:0")
            process = await asyncio.create_subprocess_exec(
                *(*PROGRAM, "conversations", "--watch", "-o", "json", "--plane", f"127.0.0.1:{port}"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            assert process.stderr is not None
            async with ControlPlaneClient(f"127.0.0.1:{port}", timeout_s=10) as client:
                plane = Plane(client, port)
                epoch = await plane.engine("d")
                await plane.retain(epoch, key("first"))
                assert b'"first"' in await asyncio.wait_for(process.stdout.readline(), 120)
        told = await asyncio.wait_for(process.stderr.readline(), 120)
        assert b"does not answer" in told
        async with ControlPlaneServer(store, clock) as server:
            await server.start(f"127.0.0.1:{port}")
            async with ControlPlaneClient(f"127.0.0.1:{port}", timeout_s=10) as client:
                plane.client = client
                await plane.retain(epoch, key("second"))
                assert b'"second"' in await asyncio.wait_for(process.stdout.readline(), 120)
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0


async def test_ending_says_what_the_api_says(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.retain(epoch, key())
    done = await plane.run("end", "c", "-o", "json")
    assert done.code == 0
    assert done.json == {
        "conversation_id": "c",
        "tenant_id": "default",
        "model": "m",
        "adapter": None,
        "outcome": "released",
    }
    assert isinstance(await plane.client.lookup_location(key()), m.MissReason)
    again = await plane.run("end", "c")
    assert (again.code, again.said.split()[:2]) == (0, ["c:", "nothing:"])
    never = await plane.run("end", "never", "--tenant", "t2", "--model", "m", "--adapter", "x")
    assert (never.code, never.said.split()[1]) == (0, "nothing:")


async def test_a_model_that_no_engine_serves_is_said_to_be_one(plane: Plane) -> None:
    done = await plane.run("end", "c", "--model", "tyny")
    assert done.told == "--model tyny: no live engine serves it; none says what it serves\n"
    epoch = await plane.engine("d", served_models=("m", "tiny"))
    done = await plane.run("end", "c", "--model", "tyny")
    assert (done.code, done.said.split()[:2]) == (0, ["c:", "nothing:"])
    assert done.told == "--model tyny: no live engine serves it; they serve m, tiny\n"
    assert (await plane.run("end", "c", "--model", "tiny")).told == ""
    await plane.retain(epoch, key(model="old"))
    done = await plane.run("end", "c", "--model", "old")
    assert (done.said.split()[1], done.told) == ("released:", "")


async def test_of_another_tenant_nothing_ends(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.retain(epoch, key(tenant="t2"))
    assert (await plane.run("end", "c", "-o", "json")).json["outcome"] == "nothing"
    assert isinstance(await plane.client.lookup_location(key(tenant="t2")), Location)


async def test_which_model_is_asked_for_where_it_has_to_be(plane: Plane) -> None:
    assert "--model is needed: no live engine" in (await plane.run("end", "c")).error
    await plane.engine("d")
    await plane.engine("e", served_models=("n",))
    done = await plane.run("end", "c")
    assert (done.code, done.error) == (2, "--model is needed: engines serve m, n")


async def test_an_engine_that_nobody_needs_is_drained_at_once(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.retain(epoch, key())
    done = await plane.run("drain", "d", "-o", "json")
    assert done.code == 0
    assert done.json == {
        "engine_id": "d",
        "drained": True,
        "claims": 0,
        "requests": None,
        "conversations": 1,
        "gone": False,
    }
    assert (await plane.client.list_engines())[0].draining
    assert await plane.client.lookup_location(key()) is m.MissReason.ENGINE_DRAINING
    assert (await plane.run("engines", "-o", "json")).json["engines"][0]["state"] == "draining"


async def test_draining_says_it_where_routers_may_not_know_which_engine_it_is(plane: Plane) -> None:
    await plane.engine("d")
    assert "it has no kvplane_endpoint" in (await plane.run("drain", "d")).told


async def test_draining_waits_for_claims(plane: Plane) -> None:
    epoch = await plane.engine("d", endpoint="http://127.0.0.1:8200")
    turn = await plane.retain(epoch, key())
    claim = await plane.client.claim_location(key(), "r", "o", turn=turn)
    assert isinstance(claim, m.Claim)
    soon = await plane.run("drain", "d", "--no-wait")
    assert (soon.code, soon.said) == (0, "draining: 1 open claim, 0 conversations kept\n")
    short = await plane.run("drain", "d", "--within", "0")
    assert short.code == 1
    waiting = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "drain", "d", "--plane", plane.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert waiting.stderr is not None
    told = await asyncio.wait_for(waiting.stderr.readline(), 120)
    assert told == b"draining: 1 open claim, 0 conversations kept; claims end within 40s\n"
    await plane.client.finish_claim(claim.claim_id, "o")
    said, told = await asyncio.wait_for(waiting.communicate(), 120)
    assert (waiting.returncode, said.split(b":")[0], told) == (0, b"drained", b"")


async def test_draining_waits_for_requests_that_the_engine_tells_of(plane: Plane) -> None:
    epoch = await plane.engine("d")
    await plane.client.renew_engine(EngineId("d"), epoch, EngineLoad(running_requests=3))
    done = await plane.run("drain", "d", "--within", "0", "-o", "json")
    assert (done.code, done.json["requests"], done.json["drained"]) == (1, 3, False)
    await plane.client.deregister_engine(EngineId("d"), epoch)
    assert "no engine d is live" in (await plane.run("drain", "d")).error


@pytest.mark.parametrize(
    "arguments",
    [("engines",), ("conversations",), ("end", "c", "--model", "m"), ("drain", "d")],
)
async def test_where_nobody_answers_the_address_and_the_remedy_are_named(arguments: tuple[str, ...]) -> None:
    done = await run(*arguments, "--plane", "127.0.0.1:1", "--timeout", "3")
    assert done.code == 2
    assert done.error.startswith("--plane 127.0.0.1:1: no control plane answers there")
    assert "kvplane serve" in done.error
    assert "KVPLANE_PLANE" in done.error


async def test_an_address_that_is_none_is_refused() -> None:
    assert "--plane: 'plane' is not host:port" in (await run("engines", "--plane", "plane")).error


async def test_of_several_replicas_one_has_to_answer(plane: Plane) -> None:
    await plane.engine("d")
    done = await run("engines", "-o", "json", "--plane", f"127.0.0.1:1,{plane.address}")
    assert [engine["id"] for engine in done.json["engines"]] == ["d"]


@pytest.mark.parametrize(
    "name", ["KVPLANE_HTTP_CA", "KVPLANE_ROUTER", "KVPLANE_PLANE_CA", "KVPLANE_PLANE_TOKEN_FILE"]
)
def test_variables_of_these_commands_are_no_mistake_to_servers(name: str) -> None:
    load_config({}, None, {name: "x"})


async def test_a_name_stands_for_all_replicas_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        if host == "unknown":
            raise socket.gaierror
        return [(0, 0, 0, "", (address, port)) for address in ("10.0.0.1", "10.0.0.1", "fd00::7")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await Target("dns:///plane:50051", 1.0).replicas() == ["10.0.0.1:50051", "[fd00::7]:50051"]
    assert await Target("dns:///unknown:50051", 1.0).replicas() == ["dns:///unknown:50051"]
    assert await Target("10.0.0.1:1,10.0.0.2:2", 1.0).replicas() == ["10.0.0.1:1", "10.0.0.2:2"]
