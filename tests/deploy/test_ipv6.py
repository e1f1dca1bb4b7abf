"""All of it where there is no IPv4: etcd, control plane, router, engines, Envoy and commands on ::1."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from deploy.docker import health
from deploy.rig.envoy import CONFIGURATIONS, envoy_command, healthy, placed
from deploy.rig.etcd import etcd_binary
from deploy.rig.process import RigProcess, free_ports
from kvplane.cli.config import load_config
from kvplane.client.client import ControlPlaneClient
from tests.cli import people
from tests.mesh.conftest import until

MAIN = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")
HOST = "::1"


def _has_it() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((HOST, 0))
    except OSError:
        return False
    return True


class Site:
    """The processes that run, and the ports of them."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self._folder = folder
        self._running = running
        self._processes = list[RigProcess]()
        self.grpc, self.metrics, self.http, self.router_metrics, self.front = free_ports(5)

    def run(self, name: str, command: list[str], ready: str) -> None:
        """Start a program; a URL of it answers well once it is ready."""
        process = RigProcess(
            name,
            command,
            environment=dict(os.environ),
            log_file=self._folder / f"{name}.log",
            ready_url=ready,
        )
        self._processes.append(self._running.enter_context(process))

    def wait_ready(self) -> None:
        """Wait for all that were started."""
        for process in self._processes:
            process.wait_ready(60.0)

    def etcd(self) -> str:
        client, peer = (f"http://[{HOST}]:{port}" for port in free_ports(2))
        urls = {
            "--data-dir": str(self._folder / "etcd"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
        }
        words = [word for pair in urls.items() for word in pair]
        self.run("etcd", [str(etcd_binary()), *words], f"{client}/health")
        return client.removeprefix("http://")

    def plane(self, etcd: str) -> list[str]:
        words = ["serve", f"--grpc-host={HOST}", f"--grpc-port={self.grpc}", f"--store=etcd://{etcd}/kvplane"]
        words += [f"--metrics-host={HOST}", f"--metrics-port={self.metrics}"]
        self.run("plane", [*MAIN, *words], f"http://[{HOST}]:{self.metrics}/ready")
        return words

    def engine(self, role: str) -> str:
        (port,) = free_ports(1)
        where = [f"--host={HOST}", f"--port={port}", f"--plane=[{HOST}]:{self.grpc}", "--announce-endpoint"]
        command = [sys.executable, "-m", "tests.fakes.engine", f"--role={role}", *where]
        self.run(role, command, f"http://[{HOST}]:{port}/health")
        return f"http://[{HOST}]:{port}"

    def router(self) -> list[str]:
        words = ["route", f"--host=[{HOST}]", f"--port={self.http}", f"--plane=[{HOST}]:{self.grpc}"]
        words += [f"--metrics-host={HOST}", f"--metrics-port={self.router_metrics}"]
        self.run("router", [*MAIN, *words], f"http://[{HOST}]:{self.http}/ready")
        return words

    def envoy(self) -> str:
        (admin,) = free_ports(1)
        content = placed(
            yaml.safe_load((CONFIGURATIONS / "router.yaml").read_text()),
            admin=(HOST, admin),
            listeners={"clients": (HOST, self.front)},
            endpoints={"routers": [(HOST, self.http)]},
        )
        path = self._folder / "envoy.json"
        path.write_text(json.dumps(content))
        self.run("envoy", envoy_command(path), f"http://[{HOST}]:{admin}/ready")
        return f"http://[{HOST}]:{admin}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as running:
        yield Site(tmp_path, running)


def say(url: str, *contents: str) -> tuple[str, str]:
    """Send a turn of one conversation; returns the path it went and the reply."""
    messages = [
        {"role": role, "content": content}
        for content, role in zip(contents, ("user", "assistant", "user"), strict=False)
    ]
    body = {"model": "fake", "conversation_id": "c", "max_tokens": 4, "messages": messages}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        path, page = answer.headers["x-kvplane-path"], json.load(answer)
    return path, page["choices"][0]["message"]["content"]


@pytest.mark.skipif(not _has_it(), reason="this host has no IPv6 loopback")
async def test_a_conversation_without_ipv4(site: Site) -> None:
    def start() -> tuple[list[str], list[str], list[str], str]:
        plane = site.plane(site.etcd())
        site.wait_ready()
        started = plane, site.router(), [site.engine(role) for role in ("prefill", "decode")], site.envoy()
        site.wait_ready()
        return started

    plane, router, engines, admin = await asyncio.to_thread(start)
    for words in (plane, router):
        assert await asyncio.to_thread(health.main, words, {}) == 0
    await until(lambda: healthy(admin, "routers") == 1)
    front = f"http://[{HOST}]:{site.front}"
    path, reply = await asyncio.to_thread(say, front, "hello")
    assert path == "cold"
    path, _ = await asyncio.to_thread(say, front, "hello", reply, "go on")
    assert path == "direct"
    there = f"127.0.0.1:1,[{HOST}]:{site.grpc}"  # of both kinds, of which one is not there
    async with ControlPlaneClient(there, timeout_s=10) as client:
        found = await client.list_engines()
    assert sorted(engine.spec.endpoint for engine in found) == sorted(engines)
    at = ("--plane", f"[{HOST}]:{site.grpc}", "--router", f"http://[{HOST}]:{site.http}")
    looked = await people.run("doctor", "-o", "json", *at)
    # What is left is that this etcd is an old one.
    assert [problem["code"] for problem in looked.json["findings"]] == ["store_unsound"]


@pytest.mark.parametrize("option", ["host", "grpc_host", "metrics_host"])
def test_brackets_are_those_of_urls(option: str) -> None:
    assert getattr(load_config({option: "[fd00::7]"}, None, {}), option) == "fd00::7"
    assert getattr(load_config({option: "fd00::7"}, None, {}), option) == "fd00::7"
