"""A bare grpc.aio server: answers each message with as many bytes as the method's name says, and no more.

What it costs is what gRPC itself costs in Python. Asked for messages, it also reads each request as protobuf
and writes its answer as such, always the same one: what any server costs that does nothing. Everything above
that is ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import grpc

from kvplane.bench import payload
from kvplane.v1 import location_pb2

_UNARY = "/kvplane.bench.Unary/"
_STREAM = "/kvplane.bench.Stream/"
_MESSAGES = "/kvplane.bench.Messages/"
_TYPES: dict[str, tuple[Any, Any]] = {
    "LookupLocation": (location_pb2.LookupLocationRequest, location_pb2.LookupLocationResponse),
    "BeginTurn": (location_pb2.BeginTurnRequest, location_pb2.BeginTurnResponse),
    "ClaimLocation": (location_pb2.ClaimLocationRequest, location_pb2.ClaimLocationResponse),
}


def unary_method(answer_bytes: int) -> str:
    """Return the method that answers a message with so many bytes."""
    return f"{_UNARY}{answer_bytes}"


def messages_method(method: str, answer_bytes: int) -> str:
    """Return the method that reads the requests of one of LocationService's and answers like it."""
    return f"{_MESSAGES}{method}.{answer_bytes}"


def stream_method(answer_bytes: int) -> str:
    """Return the method that answers each message of a stream with so many bytes."""
    return f"{_STREAM}{answer_bytes}"


@cache
def _unary(answer: bytes) -> Any:
    async def handle(request: bytes, context: Any) -> bytes:
        return answer

    return grpc.unary_unary_rpc_method_handler(handle)


@cache
def _stream(answer: bytes) -> Any:
    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield answer

    return grpc.stream_stream_rpc_method_handler(handle)


def ready_answer(method: str, answer_bytes: int) -> Any:
    """Return a hit as LocationService's method gives it, of so many bytes (some 300 or more)."""
    answer = _TYPES[method][1]()
    if method == "ClaimLocation":
        answer.claim.claim_id, answer.claim.owner = "claim", payload.OWNER
    location = answer.claim.location if method == "ClaimLocation" else answer.location
    announced = payload.conversations("echo", 1).announcement(0)
    location.key.CopyFrom(announced.key)
    location.fingerprint.CopyFrom(announced.fingerprint)
    location.remaining.CopyFrom(announced.ttl)
    location.engine_id, location.engine_epoch = payload.ENGINE_ID, announced.turn
    location.request_id, location.turn, location.revision = announced.request_id, announced.turn, 1
    location.token_count, location.block_count = announced.token_count, announced.block_count
    while (missing := answer_bytes - answer.ByteSize()) > 0:
        location.kv_transfer_params += bytes(max(1, missing - 8))  # lengths grow too: the last few singly
    return answer


@cache
def _messages(method: str, answer_bytes: int) -> Any:
    request, response = _TYPES[method]
    answer = ready_answer(method, answer_bytes)

    async def handle(request: Any, context: Any) -> Any:
        return answer

    return grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method.startswith(_UNARY):
            return _unary(bytes(int(method.removeprefix(_UNARY))))
        if method.startswith(_MESSAGES):
            name, _, answer_bytes = method.removeprefix(_MESSAGES).partition(".")
            return _messages(name, int(answer_bytes))
        return _stream(bytes(int(method.removeprefix(_STREAM))))


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """Serve on a free port of the loopback address; gives the port."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
