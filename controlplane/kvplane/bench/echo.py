"""A bare grpc.aio server: answers each message with as many bytes as the method's name says, and no more.

What it costs is what gRPC itself costs in Python; everything above that is ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import grpc

_UNARY = "/kvplane.bench.Unary/"
_STREAM = "/kvplane.bench.Stream/"


def unary_method(answer_bytes: int) -> str:
    """Return the method that answers a message with so many bytes."""
    return f"{_UNARY}{answer_bytes}"


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


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method.startswith(_UNARY):
            return _unary(bytes(int(method.removeprefix(_UNARY))))
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
