"""The commands as processes: they start, serve, drain on SIGTERM, and refuse in one line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import EngineId, EngineRole, EngineSpec

PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def event(process: asyncio.subprocess.Process, name: str) -> dict[str, object]:
    """Read the log up to an event."""
    assert process.stderr is not None
    while line := await asyncio.wait_for(process.stderr.readline(), 120):
        entry: dict[str, object] = json.loads(line)
        if entry["event"] == name:
            return entry
    raise AssertionError(f"the program ended without {name}")


async def refused(*arguments: str, code: int = 2) -> str:
    process = await start(*arguments)
    _, said = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == code
    assert b"Traceback" not in said
    return said.decode().splitlines()[-1]


async def test_serve_serves_and_stops_on_sigterm() -> None:
    process = await start("serve", "--grpc-port", "0")
    port = (await event(process, "control_plane_started"))["port"]
    async with ControlPlaneClient(f"127.0.0.1:{port}") as client:
        await client.register_engine(EngineSpec(EngineId("d"), EngineRole.DECODE))
        assert [engine.spec.engine_id for engine in await client.list_engines()] == ["d"]
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0


async def test_up_runs_both_and_stops_on_sigint() -> None:
    process = await start("up", "--decode", "http://127.0.0.1:9", "--port", "0", "--grpc-port", "0")
    ready = await event(process, "ready")
    assert str(ready["http"]).startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--grpc-host", "0.0.0.0"), "--allow-remote"),
        (("serve", "--metrics-port", "0", "--metrics-host", "0.0.0.0"), "--metrics-host 0.0.0.0"),
        (("serve", "--location-ttl", "inf"), "--location-ttl inf"),
        (("serve", "--store", "redis://x"), "--store: unknown store scheme redis://"),
        (("serve", "--store", "etcd://h:1?ttl=1"), "etcd:// has no option 'ttl'; allowed: tls, ca"),
        (("serve", "--store", "etcd://u:pw@h:1"), "etcd:// takes no password; put it into a file"),
        (("serve", "--store", "etcd://h?ca=/nowhere"), "cannot read the file that ca names"),
        (("up", "--decode", "d:8200", "--grpc-port", "0"), "write it as http://d:8200"),
        (("route",), "or with --plane HOST:PORT a control plane"),
        (("serve", "--location-ttl", "5"), "--min-remaining (10 s) must be below --location-ttl (5 s)"),
        (
            ("route", "--decode", "http://127.0.0.1:1", "--plane", "plane"),
            "--plane: 'plane' is not host:port",
        ),
        (("route", "--decode", "http://127.0.0.1:1", "--plane", "http://p:1"), "is a URL; give host:port"),
        (("route", "--decode", "http://127.0.0.1:1", "--path", "fast"), "--path fast"),
    ],
)
async def test_what_cannot_work_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in await refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("serve", "--metrics-port", "0", "--metrics-host", "192.0.2.1", "--allow-remote"),
            "--metrics-host: cannot listen on 192.0.2.1",
        ),
        (
            ("serve", "--allow-remote", "--grpc-host", "192.0.2.1"),
            "--grpc-host: cannot listen on 192.0.2.1:50051",
        ),
        (("serve", "--allow-remote", "--grpc-host", "a b"), "--grpc-host: cannot listen on a b"),
        (
            ("route", "--decode", "http://127.0.0.1:1", "--allow-remote", "--host", "192.0.2.1"),
            "cannot listen on 192.0.2.1:8000",
        ),
        (
            (
                *("route", "--decode", "http://127.0.0.1:1", "--allow-remote"),
                "--host",
                "192.0.2.1",
                "--workers",
                "2",
            ),
            "cannot listen on 192.0.2.1:8000",
        ),
    ],
)
async def test_what_another_start_may_mend_ends_with_1(arguments: tuple[str, ...], said: str) -> None:
    assert said in await refused(*arguments, code=1)


async def test_up_without_engines_says_how_they_are_found() -> None:
    process = await start("up", "--port", "0", "--grpc-port", "0")
    assert "kvplane_endpoint" in str((await event(process, "engines_not_named"))["remedy"])
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 120)


async def test_config_show_shows_no_password() -> None:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("config", "show"),
        env={**os.environ, "KVPLANE_STORE": "etcd://u:secret@h1:1,h2:2/p"},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert b'store = "etcd://u:***@h1:1,h2:2/p"' in said
    assert b"secret" not in said


def test_what_config_show_prints_is_a_configuration_file(tmp_path: Path) -> None:
    def shown(*arguments: str, **environment: str) -> bytes:
        command = (*PROGRAM, "config", "show", *arguments)
        return subprocess.run(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
        ).stdout

    said = shown(KVPLANE_PREFILL="http://p:1,http://q:1", KVPLANE_TENANT='"é\\', KVPLANE_PORT="8123")
    assert b'prefill = ["http://p:1", "http://q:1"]' in said
    file = tmp_path / "kvplane.toml"
    file.write_bytes(said)
    assert shown("--config", str(file)) == said


async def test_taken_ports_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--grpc-port: cannot listen on 127.0.0.1:{port}" in await refused(
            "serve", "--grpc-port", port, code=1
        )
        arguments = ("--decode", "http://127.0.0.1:1", "--grpc-port", "0", "--port", port)
        said = await refused("up", *arguments, code=1)
        assert port in said
