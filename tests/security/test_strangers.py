"""What strangers send is not read, and how many connect is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from kvplane.controlplane.connections import MAX_CONNECTIONS, most_connections
from kvplane.controlplane.decoding import MAX_REQUEST_BYTES, MAX_SPEC_BYTES
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.security import SecuritySettings
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.controlplane.throttle import Throttle
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from kvplane.v1 import engine_pb2
from tests.security.test_roles import ACCESS, REQUESTS

BEGIN = "/kvplane.v1.LocationService/BeginTurn"
WATCH = "/kvplane.v1.LocationService/WatchLocations"
TOO_LARGE = bytes(MAX_REQUEST_BYTES + 1)
"""Whoever reads so much says that it is too large."""


class Place:
    """A control plane that tells its callers by tokens alone, in clear."""

    def __init__(self, folder: Path, *, access: bool = True) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.file = folder / "access.toml"
        self.file.write_text(ACCESS)
        self.meter = Meter(self.clock)
        self.server = ControlPlaneServer(
            self.store,
            self.clock,
            meter=self.meter,
            security=SecuritySettings(access_file=str(self.file) if access else ""),
        )
        self.port = 0

    async def __aenter__(self) -> Place:
        self.port = await self.server.start("127.0.0.1:0")
        options = [("grpc.max_send_message_length", -1)]
        self.channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.store.aclose()

    async def code(self, method: str, raw: bytes, token: str = "") -> grpc.StatusCode:
        metadata = [("authorization", f"Bearer {token}")] if token else []
        if method == WATCH:
            call = self.channel.unary_stream(method)(raw, metadata=metadata, timeout=10)
        else:
            call = self.channel.unary_unary(method)(raw, metadata=metadata, timeout=10)
        code = await call.code()
        assert isinstance(code, grpc.StatusCode)
        return code


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    return await asyncio.to_thread(Place, tmp_path)


@pytest.mark.parametrize("method", [BEGIN, WATCH])
@pytest.mark.parametrize("token", ["", "token-of-stranger"])
async def test_a_strangers_message_is_not_read(
    place: Place, method: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplane.controlplane.guard._refusals", Throttle(place.clock.monotonic))
    with capture_logs() as logs:
        async with place:
            assert await place.code(method, TOO_LARGE, token) is grpc.StatusCode.UNAUTHENTICATED
    (refused,) = [entry for entry in logs if entry["event"] == "rpc_refused"]
    assert (refused["rpc"], refused["reason"]) == (method, "UNKNOWN_CALLER")
    assert refused["peer"].startswith("ipv4:127.0.0.1")
    (counted,) = [calls for name, calls in place.meter.calls.items() if method.endswith(f"/{name}")]
    assert counted.codes == {"OK": 0, "UNAUTHENTICATED": 1}
    assert counted.in_flight == 0


async def test_a_known_callers_message_is_read(place: Place) -> None:
    async with place:
        assert await place.code(BEGIN, TOO_LARGE, "token-of-router") is grpc.StatusCode.RESOURCE_EXHAUSTED
        raw = REQUESTS["BeginTurn"].SerializeToString()
        assert await place.code(BEGIN, raw, "token-of-router") is grpc.StatusCode.OK
        assert await place.code(BEGIN, raw, "token-of-viewer") is grpc.StatusCode.PERMISSION_DENIED
        # Who is taken out is a stranger from then on.
        await asyncio.to_thread(place.file.write_text, _without_router(ACCESS))
        assert place.server._security is not None
        for _ in range(2):
            await place.server._security.look()
        assert await place.code(BEGIN, TOO_LARGE, "token-of-router") is grpc.StatusCode.UNAUTHENTICATED


def _without_router(text: str) -> str:
    return "[[identity]]".join(part for part in text.split("[[identity]]") if 'role = "router"' not in part)


@pytest.mark.parametrize("name", ["x" * 100_000, "\U000e0001" * 1000, "\u00e9" * 128])
async def test_what_a_caller_names_does_not_make_its_answer_too_long(place: Place, name: str) -> None:
    spec = engine_pb2.EngineSpec(engine_id="d", role=engine_pb2.ENGINE_ROLE_DECODE, endpoint=f"http://{name}")
    async with place:
        for method, request in (
            ("DrainEngine", engine_pb2.DrainEngineRequest(engine_id=name)),
            ("RegisterEngine", engine_pb2.RegisterEngineRequest(spec=spec)),
        ):
            path, raw = f"/kvplane.v1.EngineService/{method}", request.SerializeToString()
            if len(raw) > MAX_SPEC_BYTES and method == "RegisterEngine":
                continue
            assert await place.code(path, raw, "token-of-engine") is grpc.StatusCode.PERMISSION_DENIED


async def test_what_is_no_message_is_the_callers_to_know_and_nobody_elses(place: Place) -> None:
    path = "/kvplane.v1.EngineService/DrainEngine"
    async with place:
        assert await place.code(path, b"\xff", "token-of-engine") is grpc.StatusCode.INVALID_ARGUMENT
        assert await place.code(path, b"\xff", "token-of-viewer") is grpc.StatusCode.PERMISSION_DENIED
        assert await place.code(path, b"\xff") is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_for_everyone_and_says_nothing_of_our_code(place: Place) -> None:
    method = "/grpc.health.v1.Health/Check"
    with capture_logs() as logs:
        async with place:
            raw = health_pb2.HealthCheckRequest().SerializeToString()
            assert await place.code(method, raw) is grpc.StatusCode.OK
            assert await place.code(method, b"\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
            absent = health_pb2.HealthCheckRequest(service="absent").SerializeToString()
            assert await place.code(method, absent) is grpc.StatusCode.NOT_FOUND
            every = "/grpc.health.v1.Health/List"
            assert await place.code(every, b"") is grpc.StatusCode.UNIMPLEMENTED
    assert not [entry for entry in logs if entry["log_level"] == "error"]


async def test_without_an_access_file_everyone_is_read(tmp_path: Path) -> None:
    async with await asyncio.to_thread(lambda: Place(tmp_path, access=False)) as place:
        assert await place.code(BEGIN, TOO_LARGE) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("files", "most"), [(1024, 896), (100, 16), (1 << 20, MAX_CONNECTIONS), (-1, MAX_CONNECTIONS)]
)
def test_connections_leave_files_for_the_rest(files: int, most: int) -> None:
    assert most_connections(files) == most


async def test_more_connections_are_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.controlplane.server.most_connections", lambda: 2)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    async with place:
        came, writers = list[bytes](), list[asyncio.StreamWriter]()
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
            writers.append(writer)
            writer.write(preface)
            try:
                came.append(await asyncio.wait_for(reader.read(1), 10))
            except ConnectionError:
                came.append(b"")
        for writer in writers:
            writer.close()
    assert came == [b"\0", b"\0", b""]
