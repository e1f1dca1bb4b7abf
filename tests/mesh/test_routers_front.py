"""Real Envoy in front of two routers: nothing buffered, nothing cut, none that drains."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from deploy.rig.envoy import Envoy
from deploy.rig.process import LOCALHOST, free_ports
from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from tests.mesh.conftest import until
from tests.router.rig import CHAT, Rig, chat, expected_reply, rig
from tests.router.test_streams import text_of

DONE = b"data: [DONE]\n\n"


@dataclass
class Front:
    """`url` is Envoy's, before the rig's router and another one of the same engines and control plane."""

    rig: Rig
    other: RouterServer
    envoy: Envoy

    @property
    def url(self) -> str:
        return f"http://{self.envoy.address}"

    @property
    def routers(self) -> list[RouterServer]:
        return [self.rig.router, self.other]

    async def healthy(self, count: int) -> None:
        """Wait until Envoy sends to so many routers."""
        await until(lambda: self.envoy.healthy("routers") == count)


def _router(r: Rig, port: int) -> RouterServer:
    settings = RouterSettings(
        port=port, plane_address="in-memory:1", prefill_urls=(r.p.url,), decode_urls=(r.d.url,)
    )
    return RouterServer(settings, plane=r.plane)


@asynccontextmanager
async def front(
    folder: Path, drain_grace_s: float = 0.0, replaced: Mapping[str, str] | None = None
) -> AsyncIterator[Front]:
    async with rig(drain_grace_s=drain_grace_s) as r:
        other = _router(r, free_ports(1)[0])
        await other.start()
        ports = (r.router.port, other.port)
        endpoints = {"routers": [(LOCALHOST, port) for port in ports]}
        envoy = await asyncio.to_thread(Envoy, "router", folder, endpoints=endpoints, replaced=replaced)
        try:
            await asyncio.to_thread(envoy.start)
            await asyncio.to_thread(envoy.wait_ready, 20.0)
            found = Front(r, other, envoy)
            await found.healthy(2)
            yield found
        finally:
            await asyncio.to_thread(envoy.stop)
            await other.stop()


async def opened(f: Front, conversation: str) -> tuple[aiohttp.ClientResponse, bytes]:
    """Begin a stream whose reply stops after its first token; return it and what has come of it."""
    body = {**chat("hello", conversation=conversation), "stream": True}
    response = await f.rig.http.post(f.url + CHAT, json=body)
    data = b""
    async with asyncio.timeout(10):
        while not text_of(data):
            data += await response.content.readany()
    return response, data


async def test_streams_tokens_as_they_come_and_survive_a_router_that_drains(tmp_path: Path) -> None:
    async with front(tmp_path, drain_grace_s=4.0) as f:
        f.rig.d.gate.clear()
        streams = [await opened(f, f"open{index}") for index in range(8)]
        leaving = asyncio.create_task(f.rig.router.stop())
        await f.healthy(1)
        # What is new goes to the other one, and does not see that one leaves.
        f.rig.d.gate.set()
        for response, data in streams:
            data += await response.content.read()
            assert data.endswith(DONE)
            assert text_of(data) == expected_reply(chat("hello"))
        await leaving
        for index in range(6):
            async with f.rig.http.post(f.url + CHAT, json=chat("more", conversation=f"c{index}")) as response:
                assert response.status == 200


async def test_a_router_that_is_gone_is_not_seen_by_clients(tmp_path: Path) -> None:
    async with front(tmp_path) as f:
        port = f.other.port
        await f.other.stop()  # without a word: its health was good a moment ago
        for index in range(10):
            async with f.rig.http.post(f.url + CHAT, json=chat("hi", conversation=f"c{index}")) as response:
                assert response.status == 200
        await f.healthy(1)
        back = _router(f.rig, port)
        await back.start()
        try:
            await f.healthy(2)
        finally:
            await back.stop()


async def test_what_passes_and_what_does_not(tmp_path: Path) -> None:
    async with front(tmp_path) as f:
        # Prompts above every buffer of Envoy's.
        body = io.BytesIO(json.dumps(chat("w" * 3_000_000, conversation="long")).encode())
        json_type = {"Content-Type": "application/json"}
        async with f.rig.http.post(f.url + CHAT, data=body, headers=json_type) as response:
            assert response.status == 200
        headers = {"x-request-id": "mine-4711"}
        async with f.rig.http.post(f.url + CHAT, json=chat("hi"), headers=headers) as response:
            assert response.headers["x-request-id"] == "mine-4711"
        for path in (
            "/debug/turns/mine-4711",
            "/metrics",
            "/ui",
            "/%64ebug/turns/x",
            "//ui",
            "/v1/../ui",
        ):
            status = await asyncio.to_thread(_status, f.envoy.address, path)
            assert status == 404, path
        assert await asyncio.to_thread(_status, f.envoy.address, "/ready") == 200


async def test_no_more_is_taken_than_is_allowed(tmp_path: Path) -> None:
    replaced = {
        "max_active_downstream_connections: 20000": "max_active_downstream_connections: 4",
        "max_requests: 16384": "max_requests: 2",
    }
    async with front(tmp_path, replaced=replaced) as f:
        f.rig.d.gate.clear()
        streams = [await opened(f, f"open{index}") for index in range(2)]
        async with f.rig.http.post(f.url + CHAT, json=chat("one too many")) as response:
            assert response.status == 503
            assert response.headers["x-envoy-overloaded"] == "true"
        # Three connections are open; the admin port is no client.
        host, port = f.envoy.address.split(":")
        _, fourth = await asyncio.open_connection(host, port)
        reader, fifth = await asyncio.open_connection(host, port)
        assert await reader.read() == b"", "closed unheard"
        assert await asyncio.to_thread(f.envoy.healthy, "routers") == 2
        f.rig.d.gate.set()
        for response, data in streams:
            assert (data + await response.content.read()).endswith(DONE)
        for writer in (fourth, fifth):
            writer.close()


async def test_without_memory_to_spare_requests_are_refused(tmp_path: Path) -> None:
    async with front(tmp_path, replaced={"max_heap_size_bytes: 2147483648": "max_heap_size_bytes: 1"}) as f:
        await until(lambda: _status(f.envoy.address, "/ready") == 503)


def _status(address: str, path: str) -> int:
    """Ask for a path as it is written: clients would tidy it up."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
