"""The one place where exceptions become gRPC statuses. Handlers contain no `try`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog

from kvplane.controlplane.errors import status_of

log = structlog.get_logger(__name__)

_Context = Any
"""grpc.aio.ServicerContext; its type parameters say nothing here."""


async def _abort(context: _Context, method: str, error: Exception) -> NoReturn:
    request_id = secrets.token_hex(8)
    code, message, reason, details = status_of(error, request_id)
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc_failed", rpc=method, request_id=request_id, exc_info=error)
    elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        log.warning("rpc_refused", rpc=method, reason=reason, request_id=request_id)
    await context.abort(code, message, trailing_metadata=(("grpc-status-details-bin", details),))
    raise AssertionError("abort returned")


def _unary(method: str, behavior: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[..., Any]:
    async def handle(request: Any, context: _Context) -> Any:
        try:
            return await behavior(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return handle


def _stream(method: str, behavior: Callable[[Any, _Context], AsyncIterator[Any]]) -> Callable[..., Any]:
    async def handle(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            async for answer in behavior(request, context):
                yield answer
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return handle


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns every exception of a handler of ours into its status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a kvplane method; others pass."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/kvplane."):
            return handler
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_unary(method, handler.unary_unary), **codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(method, handler.unary_stream), **codec)
        return grpc.stream_stream_rpc_method_handler(_stream(method, handler.stream_stream), **codec)
