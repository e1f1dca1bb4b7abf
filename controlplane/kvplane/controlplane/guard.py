"""The one place where exceptions become gRPC statuses. Handlers contain no `try`."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import structlog

from kvplane.controlplane.errors import status_of
from kvplane.controlplane.throttle import Throttle

log = structlog.get_logger(__name__)

_Context = Any
"""grpc.aio.ServicerContext; its type parameters say nothing here."""


_refusals = Throttle()
"""Refused calls, by reason: an outage refuses thousands."""


async def _abort(context: _Context, method: str, error: Exception) -> NoReturn:
    request_id = secrets.token_hex(8)
    code, message, reason, details = status_of(error, request_id)
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc_failed", rpc=method, request_id=request_id, exc_info=error)
    elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        unlogged = _refusals.due(reason)
        if unlogged is not None:
            log.warning("rpc_refused", rpc=method, reason=reason, request_id=request_id, unlogged=unlogged)
    await context.abort(code, message, trailing_metadata=(("grpc-status-details-bin", details),))
    raise AssertionError("abort returned")


def _unary(method: str, behavior: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[..., Any]:
    async def handle(request: Any, context: _Context) -> Any:
        try:
            if isinstance(request, Exception):  # see decoding
                raise request
            return await behavior(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not context.done():  # else the caller has gone, and with it whom to tell
                await _abort(context, method, error)

    return handle


def _stream(method: str, behavior: Callable[[Any, _Context], AsyncIterator[Any]]) -> Callable[..., Any]:
    async def handle(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            if isinstance(request, Exception):
                raise request
            async for answer in behavior(request, context):
                yield answer
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _abort(context, method, error)

    return handle


def guarded(servicer: object, service: str) -> Any:
    """Return a servicer that does the same, and turns every exception into its status.

    `service` is its full name. Done once, where a server interceptor of grpc.aio costs each call about a
    tenth of its time.
    """
    guards = {}
    for name in dir(servicer):
        if name[0].isupper():  # gRPC names its handlers as the protos name their methods
            behavior = getattr(servicer, name)
            guard = _stream if inspect.isasyncgenfunction(behavior) else _unary
            guards[name] = guard(f"/{service}/{name}", behavior)
    return SimpleNamespace(**guards)
