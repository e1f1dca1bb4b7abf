"""deploy/CLI.md: each call in it works as it stands, and each field and code of the commands is in it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvplane.cli import conversations, engines
from kvplane.cli.entry import COMMANDS
from kvplane.client import model as m
from tests.cli import people
from tests.cli.people import Plane, key

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "deploy" / "CLI.md").read_text()
CALLS = [line for line in PAGE.splitlines() if line.startswith(("grpcurl ", "buf curl "))]
DOCUMENTED = "127.0.0.1:50051"


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with people.plane() as made:
        epoch = await made.engine("decode-0", served_models=("qwen",))
        await made.retain(epoch, key("ticket-4711", model="qwen"), "decode-0")
        yield made


async def started(call: str, plane: Plane) -> asyncio.subprocess.Process:
    """Start a documented call, at the test's own control plane."""
    program, *arguments = shlex.split(call.replace(DOCUMENTED, plane.address))
    return await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / program),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def called(call: str, plane: Plane) -> Any:
    process = await started(call, plane)
    said, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, told.decode()
    return json.loads(said, object_hook=camel)


def camel(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with fields named as buf names them; grpcurl has the names of the protos."""
    return {re.sub("_(.)", lambda found: found[1].upper(), name): value for name, value in message.items()}


def of(method: str) -> list[str]:
    return [call for call in CALLS if call.endswith(f"/{method}")]


def test_every_call_is_one_of_those_that_are_tested() -> None:
    tested = ("ListEngines", "ListLocations", "WatchLocations", "ReleaseLocation", "DrainEngine", "GetStatus")
    known = [call for method in (*tested, "Check") for call in of(method)]
    assert sorted(known) == sorted(CALLS)
    for method in (*tested, "Check"):
        programs = {call.split()[0] for call in of(method)}
        assert "grpcurl" in programs
        assert "buf" in programs or method in ("WatchLocations", "Check")


@pytest.mark.parametrize("call", of("ListEngines"))
async def test_listing_engines(call: str, plane: Plane) -> None:
    (engine,) = (await called(call, plane))["engines"]
    assert engine["spec"]["engineId"] == "decode-0"
    if "olding" in call:
        assert engine["holdings"] == {"conversations": "1", "tokens": "100", "blocks": "4"}


@pytest.mark.parametrize("call", of("ListLocations"))
async def test_listing_locations(call: str, plane: Plane) -> None:
    (location,) = (await called(call, plane))["locations"]
    assert location["key"]["conversationId"] == "ticket-4711"


@pytest.mark.parametrize("call", of("WatchLocations"))
async def test_watching(call: str, plane: Plane) -> None:
    process = await started(call, plane)
    assert process.stdout is not None
    epoch = (await plane.client.list_engines())[0].engine_epoch
    seen = ""
    async with asyncio.timeout(120):
        while "LOCATION_EVENT_TYPE_RETAINED" not in seen:
            # It says nothing of when it has begun to watch: so there is more to see until it does.
            await plane.retain(epoch, key("ticket-4711", model="qwen"), "decode-0")
            reading = asyncio.create_task(process.stdout.read(4096))
            done, _ = await asyncio.wait([reading], timeout=0.2)
            if done:
                seen += reading.result().decode()
            else:
                reading.cancel()
    process.kill()
    await process.communicate()


@pytest.mark.parametrize("call", of("ReleaseLocation"))
async def test_ending(call: str, plane: Plane) -> None:
    assert (await called(call, plane))["outcome"] == "RELEASE_OUTCOME_RELEASED"
    found = await plane.client.lookup_location(key("ticket-4711", model="qwen"))
    assert found is m.MissReason.UNKNOWN_CONVERSATION
    assert (await called(call, plane))["outcome"] == "RELEASE_OUTCOME_NOTHING"


@pytest.mark.parametrize("call", of("DrainEngine"))
async def test_draining(call: str, plane: Plane) -> None:
    await called(call, plane)
    assert (await plane.client.list_engines())[0].draining


@pytest.mark.parametrize("call", of("GetStatus"))
async def test_status(call: str, plane: Plane) -> None:
    status = await called(call, plane)
    assert status["serving"] is True
    assert status["settings"]["locationTtl"] == "480s"
    assert status["counts"]["turns"] == "1"


@pytest.mark.parametrize("call", of("Check"))
async def test_health(call: str, plane: Plane) -> None:
    assert await called(call, plane) == {"status": "SERVING"}


async def test_every_field_of_the_json_is_documented(plane: Plane) -> None:
    (engine,) = await plane.client.list_engines(with_holdings=True)
    locations, _ = await plane.client.list_locations()
    fields = {*engines.as_json(engine), *conversations.as_json(locations[0])}
    for arguments in (["end", "x", "--model", "m"], ["drain", "decode-0"], ["top", "--once"], ["doctor"]):
        fields |= set((await plane.run(*arguments, "-o", "json")).json)
    missing = [field for field in sorted(fields) if f"`{field}`" not in PAGE]
    assert not missing


def test_every_code_of_the_doctor_is_documented() -> None:
    sources = (ROOT / "controlplane" / "kvplane" / "cli" / "doctor").glob("*_checks.py")
    text = "\n".join(source.read_text() for source in sources)
    codes = set(re.findall(r'(?:problem|warning|found)\(\s*"([a-z_]+)"', text))
    assert len(codes) > 30
    missing = [code for code in sorted(codes) if f"`{code}`" not in PAGE]
    assert not missing


def test_every_command_for_people_has_a_section() -> None:
    for name in ("top", "engines", "conversations", "explain", "doctor", "end", "drain"):
        assert name in COMMANDS
        assert f"\n## {name}\n" in PAGE
