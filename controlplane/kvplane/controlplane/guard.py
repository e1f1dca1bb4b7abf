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

log = structlog.get_logger(__name__)

_Context = Any
"""grpc.aio.ServicerContext; its type parameters say nothing here."""


class _Refusals:
    """Logs refused calls, of each reason at most one a second: an outage refuses thousands."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}  # reason: (when logged, refused since)

    def note(self, method: str, reason: str, request_id: str) -> None:
        """Count a refused call, and log it unless one like it was just logged."""
        now = asyncio.get_running_loop().time()
        logged_at, since = self._last.get(reason, (float("-inf"), 0))
        if now - logged_at < 1.0:
            self._last[reason] = logged_at, since + 1
            return
        self._last[reason] = now, 0
        log.warning("rpc_refused", rpc=method, reason=reason, request_id=request_id, unlogged=since)


_refusals = _Refusals()


async def _abort(context: _Context, method: str, error: Exception) -> NoReturn:
    request_id = secrets.token_hex(8)
    code, message, reason, details = status_of(error, request_id)
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc_failed", rpc=method, request_id=request_id, exc_info=error)
    elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        _refusals.note(method, reason, request_id)
    await context.abort(code, message, trailing_metadata=(("grpc-status-details-bin", details),))
    raise AssertionError("abort returned")


def _unary(method: str, behavior: Callable[[Any, _Context], Awaitable[Any]]) -> Callable[..., Any]:
    async def handle(request: Any, context: _Context) -> Any:
        try:
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
