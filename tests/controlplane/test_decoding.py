"""What is no message, or is far larger than any may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvplane.client.errors import from_rpc_error
from kvplane.controlplane import decoding
from kvplane.controlplane.decoding import MAX_REQUEST_BYTES, MAX_SPEC_BYTES, has_more_fields
from kvplane.v1 import common_pb2, engine_pb2, location_pb2
from tests.controlplane.wire import SPEC, Wire, wire_key

UNARY = [
    "EngineService/RegisterEngine",
    "EngineService/DrainEngine",
    "LocationService/BeginTurn",
    "LocationService/AnnounceLocation",
    "LocationService/WatchLocations",
]
STREAMS = ["LocationService/Turns", "EngineService/AttachEngine"]
EMPTY_ELEMENT = b"\x0a\x00"


async def _answered(wire: Wire, method: str, raw: bytes) -> grpc.aio.AioRpcError:
    async def requests() -> AsyncIterator[bytes]:
        yield raw

    path = f"/kvplane.v1.{method}"
    channel: Any = wire.channel
    if method in STREAMS:
        answer = channel.stream_stream(path)(requests(), timeout=10).read()
    elif method.endswith("WatchLocations"):
        answer = channel.unary_stream(path)(raw, timeout=10).read()
    else:
        answer = channel.unary_unary(path)(raw, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    return raised.value


async def test_bytes_that_are_no_message_are_the_callers_fault(wire: Wire) -> None:
    bad_text = ("EngineService/DrainEngine", b"\x0a\x02\xff\xfe")
    bad = [(method, raw) for method in UNARY + STREAMS for raw in (b"\xff\xff\xff\xff", b"\x0a\x7f")]
    with capture_logs() as logs:
        for method, raw in [*bad, bad_text]:
            answer = await _answered(wire, method, raw)
            assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, answer)
            assert from_rpc_error(answer).reason == "UNREADABLE_MESSAGE"
    assert [line for line in logs if line["log_level"] == "error"] == []


async def test_a_stream_fails_at_a_later_message_too(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch

    async def requests() -> AsyncIterator[bytes]:
        hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=epoch)
        yield engine_pb2.AttachEngineRequest(sequence=1, hello=hello).SerializeToString()
        yield b"\xff"

    channel: Any = wire.channel
    call = channel.stream_stream("/kvplane.v1.EngineService/AttachEngine")(requests(), timeout=10)
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as raised:
        _ = [answer async for answer in call]
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [line for line in logs if line["log_level"] == "error"] == []


@pytest.mark.parametrize("method", ["LocationService/RenewLocations", *STREAMS])
async def test_millions_of_empty_elements_are_not_decoded(wire: Wire, method: str) -> None:
    answer = await _answered(wire, method, EMPTY_ELEMENT * 1_000_000)
    assert from_rpc_error(answer).reason == "UNREADABLE_MESSAGE"
    assert "more elements" in str(answer.details())


async def test_no_engine_has_thousands_of_names(wire: Wire) -> None:
    spec = engine_pb2.EngineSpec(served_models=[""] * 100_000)
    raw = engine_pb2.RegisterEngineRequest(spec=spec).SerializeToString()
    answer = await _answered(wire, "EngineService/RegisterEngine", raw)
    assert str(MAX_SPEC_BYTES) in str(answer.details())


async def test_what_is_larger_than_any_message_is_not_received(wire: Wire) -> None:
    answer = await _answered(wire, "LocationService/Turns", b"\x12" * (MAX_REQUEST_BYTES + 1))
    assert answer.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_largest_messages_of_engines_and_routers_are_taken(wire: Wire) -> None:
    fingerprint = common_pb2.Fingerprint(chunk_tokens=1, chain=bytes(1024 * 1024))
    lookup = location_pb2.LookupLocationRequest(key=wire_key(), fingerprint=fingerprint)
    operation = location_pb2.TurnsOperation(id=1, lookup=lookup)
    request = location_pb2.TurnsRequest(operations=[operation] * 3)
    request.operations.extend([location_pb2.TurnsOperation(id=2)] * 1021)
    stub: Any = wire.channel.stream_stream(
        "/kvplane.v1.LocationService/Turns",
        request_serializer=location_pb2.TurnsRequest.SerializeToString,
        response_deserializer=location_pb2.TurnsResponse.FromString,
    )

    async def requests() -> AsyncIterator[location_pb2.TurnsRequest]:
        yield request

    results = [result async for answer in stub(requests(), timeout=30) for result in answer.results]
    assert len(results) == 1024
    assert sum(result.HasField("lookup") for result in results) == 3


def test_a_spec_of_the_largest_size_is_received() -> None:
    names = ["\U0001f600" * 64] * 64
    most = engine_pb2.EngineSpec(engine_id=names[0], endpoint="x" * 2048, served_models=names)
    for field in ("model", "model_revision", "kv_dtype", "engine_version"):
        setattr(most.profile, field, names[0])
    assert engine_pb2.RegisterEngineRequest(spec=most).ByteSize() < MAX_SPEC_BYTES


@pytest.mark.parametrize(
    ("raw", "most", "more"),
    [
        (b"", 0, False),
        (EMPTY_ELEMENT, 0, True),
        (EMPTY_ELEMENT * 3, 3, False),
        (EMPTY_ELEMENT * 4, 3, True),
        (b"\x08\xff\x01" + b"\x11" + b"x" * 8 + b"\x1d" + b"x" * 4 + b"\x22\x03abc", 4, False),
        (b"\x0b\x0c" + EMPTY_ELEMENT, 100, True),  # a group
        (b"\x08", 100, True),
        (b"\x08" + b"\xff" * 11, 100, True),
        (b"\x08\x96\x01", 1, False),
    ],
)
def test_fields_are_counted(raw: bytes, most: int, more: bool) -> None:
    assert has_more_fields(raw, most) is more


def test_a_message_with_lists_of_all_kinds_is_within_the_limit() -> None:
    request = engine_pb2.AttachEngineRequest(
        sequence=1,
        hello=engine_pb2.EngineHello(engine_id="d", engine_epoch=1),
        announcements=[common_pb2.Announcement(request_id="q" * 256)] * 1024,
        withdrawals=[engine_pb2.Withdrawal(request_id="q")] * 1024,
        renewals=[common_pb2.Renewal(request_id="q")] * 1024,
        freed=[engine_pb2.Freed(request_id="q")] * 1024,
        load=engine_pb2.EngineLoad(),
        sent_at_ms=1,
    )
    assert request.ByteSize() > decoding._PLAIN_BYTES
    decode = decoding.decoder(engine_pb2.AttachEngineRequest.FromString, MAX_REQUEST_BYTES, streams=True)
    assert decode(request.SerializeToString()) == request
