"""Every RPC of the descriptors, asked by every role and by nobody; and whose engines, hosts and tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, duration_pb2, message_factory
from google.rpc import error_details_pb2
from google.rpc import status_pb2 as rpc_status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvplane.controlplane import callers, roles
from kvplane.controlplane.access import token_digest
from kvplane.controlplane.roles import Role
from kvplane.controlplane.security import SecuritySettings
from kvplane.controlplane.server import SERVICES, ControlPlaneServer
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from kvplane.v1 import common_pb2, engine_pb2, location_pb2, status_pb2
from tests.controlplane import harness

ACCESS = "\n".join(
    f"""
[[identity]]
name = "{role}"
role = "{role}"
token_sha256 = ["{token_digest("token-of-" + role)}"]
{'engine_ids = ["d", "d_dp*"]' if role == "engine" else ""}
{'addresses = ["10.0.0.0/24", "*.kv.example"]' if role == "engine" else ""}
tenants = ["t", "t-*"]
"""
    for role in Role
)
CALLERS = [*Role, None, "stranger"]
PARAMS = harness.PARAMS.replace(b"127.0.0.1", b"10.0.0.7")
KEY = common_pb2.ConversationKey(tenant_id="t", model="m", conversation_id="c")


def announcement(**changes: Any) -> common_pb2.Announcement:
    return common_pb2.Announcement(
        **{
            "key": KEY,
            "request_id": "q",
            "turn": 1,
            "token_count": 100,
            "block_count": 4,
            "kv_transfer_params": PARAMS,
            "fingerprint": common_pb2.Fingerprint(chunk_tokens=64, chain=b"x" * 16),
            "ttl": duration_pb2.Duration(seconds=400),
            **changes,
        }
    )


REQUESTS: dict[str, Any] = {
    "RegisterEngine": engine_pb2.RegisterEngineRequest(
        spec=engine_pb2.EngineSpec(
            engine_id="d", role=engine_pb2.ENGINE_ROLE_DECODE, endpoint="http://10.0.0.7:8200"
        )
    ),
    "RenewEngine": engine_pb2.RenewEngineRequest(engine_id="d", engine_epoch=1),
    "DrainEngine": engine_pb2.DrainEngineRequest(engine_id="d"),
    "DeregisterEngine": engine_pb2.DeregisterEngineRequest(engine_id="d", engine_epoch=1),
    "ListEngines": engine_pb2.ListEnginesRequest(),
    "AttachEngine": engine_pb2.AttachEngineRequest(
        sequence=1, hello=engine_pb2.EngineHello(engine_id="d", engine_epoch=1)
    ),
    "AnnounceLocation": location_pb2.AnnounceLocationRequest(
        engine_id="d", engine_epoch=1, announcement=announcement()
    ),
    "LookupLocation": location_pb2.LookupLocationRequest(key=KEY),
    "BeginTurn": location_pb2.BeginTurnRequest(key=KEY, request_id="r"),
    "ClaimLocation": location_pb2.ClaimLocationRequest(
        key=KEY, request_id="r", owner="o", reader_engine_id="d"
    ),
    "TouchConversation": location_pb2.TouchConversationRequest(
        key=KEY, ttl=duration_pb2.Duration(seconds=60)
    ),
    "ReleaseLocation": location_pb2.ReleaseLocationRequest(
        finish_claim=location_pb2.FinishClaim(claim_id="r", owner="o")
    ),
    "RenewLocations": location_pb2.RenewLocationsRequest(
        engine_id="d", engine_epoch=1, renewals=[common_pb2.Renewal(request_id="q")]
    ),
    "ListLocations": location_pb2.ListLocationsRequest(tenant_id="t"),
    "GetStatus": status_pb2.GetStatusRequest(),
    "WatchLocations": location_pb2.WatchLocationsRequest(tenant_id="t", from_revision=10**9),
    "Turns": location_pb2.TurnsRequest(
        operations=[
            location_pb2.TurnsOperation(
                id=1, begin_turn=location_pb2.BeginTurnRequest(key=KEY, request_id="r")
            )
        ]
    ),
    "ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(list_services=""),
    "Check": health_pb2.HealthCheckRequest(),
    "Watch": health_pb2.HealthCheckRequest(),
    "List": health_pb2.HealthListRequest(),
}
"""A request of each method that is well-formed and is the caller's own, where that is asked for."""

RELEASES: dict[str, Any] = {
    "end_conversation": location_pb2.EndConversation(key=KEY),
    "finish_claim": location_pb2.FinishClaim(claim_id="r", owner="o"),
    "withdraw": location_pb2.WithdrawLocation(engine_id="d", engine_epoch=1, request_id="q"),
}

Outcome = tuple[grpc.StatusCode, str]
OK: Outcome = (grpc.StatusCode.OK, "")


class Server:
    """A control plane with an access file, and calls to it by anyone."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.file = folder / "access.toml"
        self.server = ControlPlaneServer(
            self.store, self.clock, security=SecuritySettings(access_file=str(self.file))
        )

    async def start(self) -> None:
        await asyncio.to_thread(self.file.write_text, ACCESS)
        port = await self.server.start("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.store.aclose()

    async def answers(self, method: Any, request: Any, caller: str | None) -> tuple[list[Any], Outcome]:
        """Call a method of a descriptor, or several at once where it streams; what came, and how it ended."""
        for _ in range(20):
            came, (code, reason) = await self._answers_once(method, request, caller)
            if code is not grpc.StatusCode.INTERNAL or reason:
                break
            # Not ours, which gives a reason: the client was still writing when it was refused.
        return came, (code, reason)

    async def _answers_once(self, method: Any, request: Any, caller: str | None) -> tuple[list[Any], Outcome]:
        service = method.containing_service.full_name
        pool = descriptor_pool.Default()
        kind = pool.FindServiceByName(service).methods_by_name[method.name].output_type
        answer_type = message_factory.GetMessageClass(kind)
        requests = request if isinstance(request, list) else [request]
        arity = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        call: Any = arity(
            f"/{service}/{method.name}",
            request_serializer=type(requests[0]).SerializeToString,
            response_deserializer=answer_type.FromString,
        )
        metadata = [] if caller is None else [("authorization", f"Bearer token-of-{caller}")]
        given = iter(requests) if method.client_streaming else requests[0]
        came = list[Any]()
        try:
            if not method.server_streaming:
                return [await call(given, timeout=10, metadata=metadata)], OK
            stream = call(given, timeout=10, metadata=metadata)
            while (answer := await stream.read()) is not grpc.aio.EOF:
                came.append(answer)
                if method.name == "Watch":
                    stream.cancel()
                    break
        except grpc.aio.AioRpcError as error:
            return came, (error.code(), _reason(error))
        return came, OK

    async def outcome(self, name: str, request: Any, caller: str | None) -> Outcome:
        """Call a method by its name; for Turns, what became of its one operation."""
        method = next(one for one in _methods() if one.name == name)
        came, ended = await self.answers(method, request, caller)
        if name == "Turns" and ended == OK and came[0].results[0].HasField("error"):
            error = came[0].results[0].error
            return next(code for code in grpc.StatusCode if code.value[0] == error.code), error.reason
        return ended


def _reason(error: grpc.aio.AioRpcError) -> str:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in rpc_status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return str(info.reason)
    return ""


def _methods() -> list[Any]:
    pool = descriptor_pool.Default()
    services = (*SERVICES, roles.HEALTH_SERVICE, roles.REFLECTION_SERVICES[1])
    return [method for service in services for method in pool.FindServiceByName(service).methods]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    server = Server(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as server:
        yield server


@pytest.mark.parametrize("method", _methods(), ids=lambda method: str(method.name))
async def test_every_rpc_of_every_role_and_of_nobody(plane: Server, method: Any) -> None:
    full = f"/{method.containing_service.full_name}/{method.name}"
    assert (full in roles.TABLE) != (full in roles.OPEN), f"{full} is in no table, so nobody may call it"
    assert method.name in REQUESTS, f"{full} has no request here"
    for caller in CALLERS:
        request = REQUESTS[method.name]
        if method.name == "ReleaseLocation" and caller is Role.ADMIN:
            request = location_pb2.ReleaseLocationRequest(end_conversation=RELEASES["end_conversation"])
        _, (code, reason) = await plane.answers(method, request, caller)
        if full in roles.OPEN:
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED), caller
        elif caller not in iter(Role):
            assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_CALLER"), caller
        elif caller in roles.TABLE[full]:
            assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED), caller
        else:
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED"), caller


def test_the_tables_name_nothing_else() -> None:
    known = {f"/{method.containing_service.full_name}/{method.name}" for method in _methods()}
    known.add(f"/{roles.REFLECTION_SERVICES[0]}/ServerReflectionInfo")
    assert set(roles.TABLE) | set(roles.OPEN) == known
    assert set(callers._CHECKS) == set(roles.TABLE)
    operations = location_pb2.TurnsOperation.DESCRIPTOR.oneofs_by_name["operation"].fields
    assert set(roles.TURNS) == {field.name for field in operations}
    targets = location_pb2.ReleaseLocationRequest.DESCRIPTOR.oneofs_by_name["target"].fields
    assert set(roles.RELEASES) == {field.name for field in targets}


async def test_a_method_in_no_table_is_refused_to_everyone(
    plane: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {method: allowed for method, allowed in roles.TABLE.items() if "BeginTurn" not in method}
    monkeypatch.setattr(roles, "TABLE", left)
    for role in Role:
        code, reason = await plane.outcome("BeginTurn", REQUESTS["BeginTurn"], role)
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")
    code, reason = await plane.outcome("Turns", REQUESTS["Turns"], Role.ROUTER)
    assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")


@pytest.mark.parametrize("streamed", [False, True])
async def test_releases_by_target_and_role(plane: Server, streamed: bool) -> None:
    for target, value in RELEASES.items():
        request = location_pb2.ReleaseLocationRequest(**{target: value})
        for role in Role:
            name: str = "ReleaseLocation"
            sent: Any = request
            if streamed and role in roles.TABLE[f"/{roles.LOCATION_SERVICE}/Turns"]:
                name, sent = "Turns", _turn(release=request)
            code, reason = await plane.outcome(name, sent, role)
            assert (reason == "ROLE_NOT_ALLOWED") == (role not in roles.RELEASES[target]), (target, role)
            assert (code is grpc.StatusCode.PERMISSION_DENIED) == (role not in roles.RELEASES[target])


def _turn(**operation: Any) -> location_pb2.TurnsRequest:
    return location_pb2.TurnsRequest(operations=[location_pb2.TurnsOperation(id=1, **operation)])


def _other_tenant() -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(tenant_id="other", model="m", conversation_id="c")


def _changed(name: str, field: str, value: Any) -> Any:
    """Return a method's request with one field changed."""
    request = type(REQUESTS[name])()
    request.CopyFrom(REQUESTS[name])
    *path, last = field.split(".")
    at: Any = request
    for member in path:
        at = getattr(at, member)
    setattr(at, last, value)
    return request


@pytest.mark.parametrize("engine_id", ["d2", "", "D", "xd", "d\n"])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("RegisterEngine", "spec.engine_id"),
        ("RenewEngine", "engine_id"),
        ("DrainEngine", "engine_id"),
        ("DeregisterEngine", "engine_id"),
        ("AttachEngine", "hello.engine_id"),
        ("AnnounceLocation", "engine_id"),
        ("RenewLocations", "engine_id"),
        ("ClaimLocation", "reader_engine_id"),
    ],
)
async def test_an_engine_speaks_for_itself_only(plane: Server, name: str, field: str, engine_id: str) -> None:
    code, reason = await plane.outcome(name, _changed(name, field, engine_id), Role.ENGINE)
    if name == "AttachEngine" and not engine_id:
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    else:
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "ENGINE_NOT_ALLOWED")


async def test_an_engine_withdraws_and_claims_for_itself_on_streams_too(plane: Server) -> None:
    withdraw = location_pb2.WithdrawLocation(engine_id="d2", engine_epoch=1, request_id="q")
    release = location_pb2.ReleaseLocationRequest(withdraw=withdraw)
    claim = _changed("ClaimLocation", "reader_engine_id", "d2")
    for name, request in [
        ("ReleaseLocation", release),
        ("Turns", _turn(release=release)),
        ("Turns", _turn(claim=claim)),
    ]:
        _, reason = await plane.outcome(name, request, Role.ENGINE)
        assert reason == "ENGINE_NOT_ALLOWED", name
    assert await plane.outcome("Turns", _turn(claim=REQUESTS["ClaimLocation"]), Role.ENGINE) == OK
    assert await plane.outcome("Turns", _turn(claim=claim), Role.ROUTER) == OK


async def test_an_operation_of_a_stream_needs_the_role_of_its_own_call(plane: Server) -> None:
    touch = _turn(touch=REQUESTS["TouchConversation"])
    assert (await plane.outcome("Turns", touch, Role.ENGINE))[1] == "ROLE_NOT_ALLOWED"
    assert await plane.outcome("Turns", touch, Role.ROUTER) == OK


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("10.0.0.7", True),
        ("d.kv.example", True),
        ("D.KV.example", True),
        ("10.0.1.7", False),
        ("kv.example", False),
        ("localhost", False),
        ("[fd00::7]", False),
    ],
)
async def test_the_hosts_that_an_engine_may_register(plane: Server, host: str, allowed: bool) -> None:
    request = _changed("RegisterEngine", "spec.endpoint", f"http://{host}:8200")
    _, reason = await plane.outcome("RegisterEngine", request, Role.ENGINE)
    assert reason == ("" if allowed else "ADDRESS_NOT_ALLOWED")
    request = _changed("AnnounceLocation", "announcement.endpoint", f"http://{host}:8200")
    _, reason = await plane.outcome("AnnounceLocation", request, Role.ENGINE)
    assert (reason == "ADDRESS_NOT_ALLOWED") is not allowed


async def test_the_host_to_read_from_is_looked_at_where_it_is_announced(plane: Server) -> None:
    """It is in the params: others connect there and read."""
    elsewhere = PARAMS.replace(b"10.0.0.7", b"203.0.113.9")
    assert elsewhere != PARAMS
    request = _changed("AnnounceLocation", "announcement.kv_transfer_params", elsewhere)
    _, reason = await plane.outcome("AnnounceLocation", request, Role.ENGINE)
    assert reason == "ADDRESS_NOT_ALLOWED"


async def test_what_is_refused_of_a_stream_is_answered_and_the_rest_is_taken(plane: Server) -> None:
    method = next(one for one in _methods() if one.name == "AttachEngine")
    (registered,), _ = await plane.answers(
        next(one for one in _methods() if one.name == "RegisterEngine"),
        REQUESTS["RegisterEngine"],
        Role.ENGINE,
    )
    elsewhere = PARAMS.replace(b"10.0.0.7", b"203.0.113.9")
    message = engine_pb2.AttachEngineRequest(
        sequence=1,
        hello=engine_pb2.EngineHello(engine_id="d", engine_epoch=registered.engine_epoch),
        announcements=[
            announcement(kv_transfer_params=elsewhere),
            announcement(key=_other_tenant()),
            announcement(),
        ],
    )
    came, ended = await plane.answers(method, message, Role.ENGINE)
    assert ended == OK
    results = [result for answer in came for result in answer.announcements]
    refused, accepted = common_pb2.ANNOUNCE_OUTCOME_REFUSED, common_pb2.ANNOUNCE_OUTCOME_ACCEPTED
    assert [result.outcome for result in results] == [refused, refused, accepted]
    assert "203.0.113.9" in results[0].detail


TENANTS = [
    ("BeginTurn", "key.tenant_id", Role.ROUTER),
    ("BeginTurn", "key.tenant_id", Role.ENGINE),
    ("LookupLocation", "key.tenant_id", Role.ADMIN),
    ("ClaimLocation", "key.tenant_id", Role.ROUTER),
    ("ClaimLocation", "key.tenant_id", Role.ENGINE),
    ("TouchConversation", "key.tenant_id", Role.ROUTER),
    ("AnnounceLocation", "announcement.key.tenant_id", Role.ENGINE),
    ("ListLocations", "tenant_id", Role.VIEWER),
    ("WatchLocations", "tenant_id", Role.VIEWER),
]


@pytest.mark.parametrize(("name", "field", "role"), TENANTS)
async def test_nobody_acts_for_another_tenant(plane: Server, name: str, field: str, role: Role) -> None:
    for tenant_id in ("other", "", "T", "xt"):
        code, reason = await plane.outcome(name, _changed(name, field, tenant_id), role)
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_NOT_ALLOWED"), tenant_id
    _, reason = await plane.outcome(name, _changed(name, field, "t-2"), role)
    assert reason not in ("TENANT_NOT_ALLOWED", "ROLE_NOT_ALLOWED")


async def test_nobody_ends_a_conversation_of_another_tenant(plane: Server) -> None:
    end = location_pb2.EndConversation(key=_other_tenant())
    release = location_pb2.ReleaseLocationRequest(end_conversation=end)
    for name, request in [("ReleaseLocation", release), ("Turns", _turn(release=release))]:
        assert (await plane.outcome(name, request, Role.ROUTER))[1] == "TENANT_NOT_ALLOWED"


async def test_streams_look_at_each_operation_of_another_tenant(plane: Server) -> None:
    for kind, name in [
        ("begin_turn", "BeginTurn"),
        ("claim", "ClaimLocation"),
        ("lookup", "LookupLocation"),
        ("touch", "TouchConversation"),
    ]:
        request = _turn(**{kind: _changed(name, "key.tenant_id", "other")})
        assert (await plane.outcome("Turns", request, Role.ROUTER))[1] == "TENANT_NOT_ALLOWED", kind


async def test_who_is_taken_out_of_the_file_is_refused_on_open_streams(plane: Server) -> None:
    """Also in the middle of a stream: what it says next is not done."""
    call: Any = plane.channel.stream_stream(
        f"/{roles.LOCATION_SERVICE}/Turns",
        request_serializer=location_pb2.TurnsRequest.SerializeToString,
        response_deserializer=location_pb2.TurnsResponse.FromString,
    )(metadata=[("authorization", "Bearer token-of-router")], timeout=20)
    await call.write(REQUESTS["Turns"])
    assert (await call.read()).results[0].begin_turn.turn
    left = ACCESS.replace(token_digest("token-of-router"), token_digest("another"))
    await asyncio.to_thread(plane.file.write_text, left)
    await _looked(plane)
    await call.write(REQUESTS["Turns"])
    assert (await call.read()).results[0].error.reason == "UNKNOWN_CALLER"
    call.cancel()
    assert (await plane.outcome("BeginTurn", REQUESTS["BeginTurn"], Role.ROUTER))[1] == "UNKNOWN_CALLER"


async def _looked(plane: Server) -> None:
    assert plane.server._security is not None
    for _ in range(2):  # a file counts once it has stayed the same between two looks
        await plane.server._security.look()


async def test_a_broken_access_file_leaves_the_one_before_in_force(plane: Server) -> None:
    for broken in ("[[identity", "", '[[identity]]\nname = "x"\nrole = "king"\n'):
        await asyncio.to_thread(plane.file.write_text, broken)
        await _looked(plane)
        assert await plane.outcome("BeginTurn", REQUESTS["BeginTurn"], Role.ROUTER) == OK
    await asyncio.to_thread(plane.file.unlink)
    await _looked(plane)
    assert await plane.outcome("BeginTurn", REQUESTS["BeginTurn"], Role.ROUTER) == OK
    assert (await plane.outcome("BeginTurn", REQUESTS["BeginTurn"], None))[1] == "UNKNOWN_CALLER"


async def test_an_engine_that_is_taken_out_is_detached(plane: Server) -> None:
    method = next(one for one in _methods() if one.name == "RegisterEngine")
    (registered,), _ = await plane.answers(method, REQUESTS["RegisterEngine"], Role.ENGINE)
    call: Any = plane.channel.stream_stream(
        f"/{roles.ENGINE_SERVICE}/AttachEngine",
        request_serializer=engine_pb2.AttachEngineRequest.SerializeToString,
        response_deserializer=engine_pb2.AttachEngineResponse.FromString,
    )(metadata=[("authorization", "Bearer token-of-engine")], timeout=20)
    hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=registered.engine_epoch)
    await call.write(engine_pb2.AttachEngineRequest(sequence=1, hello=hello))
    assert (await call.read()).acknowledged_sequence == 1
    await asyncio.to_thread(plane.file.write_text, ACCESS.replace('"d", "d_dp*"', '"e"'))
    await _looked(plane)
    await call.write(engine_pb2.AttachEngineRequest(sequence=2, announcements=[announcement()]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert _reason(refused.value) == "ENGINE_NOT_ALLOWED"
    assert not [item async for item in _locations(plane)]


async def _locations(plane: Server) -> AsyncIterator[Any]:
    method = next(one for one in _methods() if one.name == "ListLocations")
    (answer,), _ = await plane.answers(method, REQUESTS["ListLocations"], Role.VIEWER)
    for location in answer.locations:
        yield location
