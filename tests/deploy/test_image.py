"""The Dockerfile, as far as can be told without a container engine.

Its steps are carried out by `make release-check` (deploy/release/image.py).
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.docker import health
from deploy.release.image import DOCKERFILE, command_of, stages
from tests.cli import people
from tests.deploy.charts import CHART, ROOT

STAGES = stages()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_image_of_engines_is_built_from_sources_alone() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sources = project["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
    named = {"pyproject.toml", project["project"]["readme"], "LICENSE", *sources}
    assert [line for line in lines if not line.startswith(("#", "!"))] == ["*", "**/__pycache__"]
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == named


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("USER 65532:65532", "USER root"))
    done = subprocess.run([hadolint, broken], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "DL3002" in done.stdout


def test_it_runs_as_nobody_and_starts_kvplane() -> None:
    run = STAGES["run"]
    (user,) = (one.text for one in run if one.name == "USER")
    pod = (CHART / "templates" / "_helpers.tpl").read_text()
    assert f"runAsUser: {user.partition(':')[0]}" in pod
    assert int(user.partition(":")[0]) > 0
    assert command_of(run, "ENTRYPOINT") == ["kvplane"]
    assert not [one for one in run if one.name == "RUN"], "what is installed is installed in the other stage"
    assert next(one.text.split()[0] for one in run if one.name == "COPY") == "--from=build"


def test_its_base_is_an_argument_that_both_stages_take() -> None:
    (argument,) = (one.text for one in STAGES[""] if one.name == "ARG")
    assert argument.startswith("BASE=")
    bases = [one.text.split()[0] for stage in STAGES.values() for one in stage if one.name == "FROM"]
    assert bases == ["${BASE}", "${BASE}"]


def test_its_ports_are_the_charts() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (exposed,) = (one.text.split() for one in STAGES["run"] if one.name == "EXPOSE")
    used = {
        str(values[part][name]) for part in ("controlPlane", "router") for name in ("port", "metricsPort")
    }
    assert set(exposed) == used


def test_what_it_copies_is_let_through() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    copied = {one.text.split()[-2] for stage in STAGES.values() for one in stage if one.name == "COPY"}
    for source in copied - {"/opt/kvplane"}:
        assert f"!{source.replace('*.whl', 'kvplane-*.whl')}" in ignored
        assert "*" in source or (ROOT / source).is_file()


def test_what_it_installs_is_pinned() -> None:
    pinned = (DOCKERFILE.parent / "constraints.txt").read_text().splitlines()
    packages = {line.partition("==")[0].lower() for line in pinned if not line.startswith("#")}
    assert {"grpcio", "protobuf", "aiohttp", "pydantic-settings", "structlog", "pyjwt"} <= packages
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line) for line in pinned)


async def test_the_health_check_asks_the_control_plane() -> None:
    async with people.plane() as plane:
        port = plane.address.rpartition(":")[2]
        for words, variables in (
            (["kvplane", "serve", f"--grpc-port={port}"], {}),
            (["kvplane", "serve", "--grpc-port", port], {}),
            (["kvplane", "serve"], {"KVPLANE_GRPC_PORT": port}),
            (["kvplane", "serve", f"--grpc-port={port}", "--grpc-tls-cert=c"], {}),
        ):
            assert await asyncio.to_thread(health.main, words, variables) == 0
    for more in ([], ["--grpc-tls-cert=c"]):
        words = ["kvplane", "serve", f"--grpc-port={port}", *more]
        assert await asyncio.to_thread(health.main, words, {}) == 1


async def test_the_health_check_asks_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readline()).decode()
        ok = asked.startswith("GET /health ")
        writer.write(b"HTTP/1.0 %s\r\n\r\n" % (b"200 OK" if ok else b"404 Not Found"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    words = ["kvplane", "route", f"--port={port}"]
    async with server:
        assert await asyncio.to_thread(health.main, words, {}) == 0
        assert await asyncio.to_thread(health.main, [*words, "--tls-cert=c"], {}) == 1
    assert await asyncio.to_thread(health.main, words, {}) == 1
    assert await asyncio.to_thread(health.main, ["sh"], {}) == 1
    assert "no kvplane serve, route or up: 'sh'" in capsys.readouterr().out
