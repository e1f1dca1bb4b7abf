"""Real Envoy before control planes, with certificates: who gets through, and what a replica's end costs."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.credentials import Credentials
from kvplane.client.errors import ControlPlaneError
from kvplane.controlplane.roles import OPEN, TABLE, Role
from tests.mesh.conftest import Mesh, until

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent))
ROLES = {"router": Role.ROUTER, "prefill": Role.ENGINE, "dashboard": Role.VIEWER, "ops": Role.ADMIN}
PARAMS = json.dumps(
    {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "held",
        "remote_request_id": "before",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
    }
).encode()
ENDLESS = {"AttachEngine", "Turns", "WatchLocations", "ServerReflectionInfo", "Watch"}


@asynccontextmanager
async def client(mesh: Mesh, name: str) -> AsyncIterator[ControlPlaneClient]:
    credentials = await asyncio.to_thread(Credentials, mesh.shown(name))
    async with ControlPlaneClient(mesh.envoy.address, credentials=credentials) as opened:
        yield opened


@asynccontextmanager
async def channel(
    mesh: Mesh, name: str | None, address: str = "", authority: str = ""
) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel to Envoy, or an address of that authority; None shows no certificate."""

    def read() -> tuple[bytes, bytes | None, bytes | None]:
        ca = Path(authority or mesh.authority.ca).read_bytes()
        own = mesh.pair(name) if name else None
        return (ca, Path(own.key).read_bytes(), Path(own.cert).read_bytes()) if own else (ca, None, None)

    credentials = grpc.ssl_channel_credentials(*await asyncio.to_thread(read))
    options = [("grpc.ssl_target_name_override", "plane.internal")]
    async with grpc.aio.secure_channel(address or mesh.envoy.address, credentials, options=options) as opened:
        yield opened


async def outcome(open_channel: grpc.aio.Channel, method: str) -> tuple[grpc.StatusCode, str]:
    """Call a method with nothing in the request; return the status and its text."""
    timeout = 2.0 if method.rpartition("/")[2] in ENDLESS else 10.0
    try:
        call: Any = open_channel.unary_unary(method)
        await call(b"", timeout=timeout)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_envoy_lets_each_role_call_what_the_table_says(mesh: Mesh) -> None:
    methods = [*TABLE, *OPEN, "/kvplane.v1.EngineService/Unheard", "/other.Service/Method"]

    async def calls(name: str) -> None:
        async with channel(mesh, name) as opened:
            results = await asyncio.gather(*(outcome(opened, method) for method in methods))
        for method, (code, text) in zip(methods, results, strict=True):
            refused = code is grpc.StatusCode.PERMISSION_DENIED and text == "RBAC: access denied"
            allowed = method in OPEN or (name in ROLES and ROLES[name] in TABLE.get(method, ()))
            assert refused is not allowed, (name, method, code, text)
            if allowed:
                assert code is not grpc.StatusCode.UNAVAILABLE, (name, method, text)

    await asyncio.gather(*(calls(name) for name in (*ROLES, "stranger")))


@pytest.mark.parametrize("name", [None, "expired"])
async def test_who_has_no_good_certificate_does_not_connect(mesh: Mesh, name: str | None) -> None:
    async with channel(mesh, name) as opened:
        code, _ = await outcome(opened, "/grpc.health.v1.Health/Check")
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_nobody_gets_past_envoy(mesh: Mesh) -> None:
    """Control planes let in Envoy alone, whatever certificate of the callers' authority one has."""
    for name in (None, "ops"):
        async with channel(mesh, name, mesh.planes[-1].address, mesh.inner_ca) as opened:
            code, _ = await outcome(opened, "/kvplane.v1.StatusService/GetStatus")
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_grpcurl_reflects_and_asks_for_health(mesh: Mesh) -> None:
    async def grpcurl(name: str, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            str(GRPCURL),
            *mesh.grpcurl(name),
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    address = mesh.envoy.address
    results = await asyncio.gather(
        grpcurl("ops", address, "list"),
        grpcurl("ops", address, "grpc.health.v1.Health/Check"),
        grpcurl("ops", address, "kvplane.v1.EngineService/ListEngines"),
        grpcurl("router", address, "list"),
    )
    (_, listed), (_, health), (code, _), (refused, why) = results
    assert {"kvplane.v1.LocationService", "grpc.health.v1.Health"} <= set(listed.split())
    assert json.loads(health) == {"status": "SERVING"}
    assert code == 0
    assert refused != 0
    assert "access denied" in why


async def test_grpc_web_as_from_a_browser(mesh: Mesh) -> None:
    def context() -> ssl.SSLContext:
        own, made = mesh.pair("ops"), ssl.create_default_context(cafile=mesh.authority.ca)
        made.load_cert_chain(own.cert, own.key)
        return made

    headers = {"Content-Type": "application/grpc-web+proto"}
    url = f"https://{mesh.envoy.address}/grpc.health.v1.Health/Check"
    async with aiohttp.ClientSession() as http:
        asked = http.post(url, data=bytes(5), headers=headers, ssl=await asyncio.to_thread(context))
        async with asked as response:
            data = await response.read()
    serving = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()
    assert data.startswith(bytes([0, 0, 0, 0, len(serving)]) + serving)
    assert b"grpc-status:0" in data


def _key(conversation: str) -> m.ConversationKey:
    return m.ConversationKey("mesh", "fake", conversation)


async def test_replicas_end_and_no_call_notices(mesh: Mesh) -> None:
    """One is killed, another one stops, under load. Other tests make do with the third."""
    failed, answered, ending = list[ControlPlaneError](), 0, asyncio.Event()

    async def call(router: ControlPlaneClient, caller: int) -> None:
        nonlocal answered
        number = 0
        while not ending.is_set():
            number += 1
            try:
                await router.begin_turn(_key(f"{caller}-{number}"), f"{caller}-{number}")
                answered += 1
            except ControlPlaneError as error:
                failed.append(error)
            await asyncio.sleep(0.02)

    async def some_more() -> None:
        seen = answered
        await until(lambda: answered > seen + 50)

    async with client(mesh, "router") as router, asyncio.TaskGroup() as group:
        for caller in range(4):
            group.create_task(call(router, caller))
        await some_more()
        killed, stopped, _ = mesh.planes
        await asyncio.to_thread(killed.kill)
        await some_more()
        await asyncio.to_thread(stopped.stop)
        await some_more()
        ending.set()
    assert failed == []


async def test_a_long_stream_through_envoy(mesh: Mesh) -> None:
    """A watch that is silent for longer than Envoy's checks and pings take, and then tells at once."""
    profile = m.EngineProfile(model="fake", kv_dtype="float32", block_size=16)
    spec = m.EngineSpec(m.EngineId("held"), m.EngineRole.DECODE, profile, total_blocks=64)
    async with client(mesh, "ops") as ops, client(mesh, "decode") as decode, client(mesh, "router") as router:
        epoch = (await decode.register_engine(spec)).engine_epoch

        async def announce(conversation: str) -> None:
            turn = await router.begin_turn(_key(conversation), conversation)
            announcement = m.Announcement(
                key=_key(conversation),
                request_id=m.RequestId(conversation),
                turn=turn.turn,
                token_count=64,
                block_count=4,
                kv_transfer_params=PARAMS,
                fingerprint=m.Fingerprint(64, b"12345678"),
                ttl_s=60.0,
            )
            result = await decode.announce_location(m.EngineId("held"), epoch, announcement)
            assert result.outcome is m.AnnounceOutcome.ACCEPTED, result.detail

        events = ops.watch_locations(tenant_id="mesh")
        heard = asyncio.create_task(_keys(events, 2))
        await asyncio.sleep(0.5)
        await announce("before")
        await asyncio.sleep(3.5)
        await decode.renew_engine(m.EngineId("held"), epoch)
        await announce("after")
        async with asyncio.timeout(10):
            assert await heard == ["before", "after"]


async def _keys(events: AsyncIterator[m.LocationEvent], count: int) -> list[str]:
    """Return whose the first events are."""
    found = list[str]()
    async for event in events:
        found.append(event.location.key.conversation_id)
        if len(found) == count:
            break
    return found


async def test_a_certificate_of_envoys_that_is_replaced_is_shown(mesh: Mesh) -> None:
    before = await asyncio.to_thread(_shown_by, mesh)
    new = await asyncio.to_thread(mesh.authority.server, "renewed", "plane.internal")
    folder = mesh.authority.folder / "tls"
    for source, name in ((new.key, "tls.key"), (new.cert, "tls.crt")):
        await asyncio.to_thread(_replace, Path(source), folder / name)
    await until(lambda: _shown_by(mesh) != before)


def _replace(source: Path, target: Path) -> None:
    new = target.with_suffix(".new")
    shutil.copy(source, new)
    new.rename(target)


def _shown_by(mesh: Mesh) -> bytes:
    """Return the certificate that Envoy shows."""
    context = ssl.create_default_context(cafile=mesh.authority.ca)
    context.load_cert_chain(mesh.pair("ops").cert, mesh.pair("ops").key)
    host, _, port = mesh.envoy.address.partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="plane.internal") as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""
