"""The one place where exceptions become gRPC statuses. Handlers contain no `try`."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import grpc
import structlog

from kvplane.controlplane import traced
from kvplane.controlplane.callers import CURRENT, Access, Caller
from kvplane.controlplane.errors import REASON_KEY, UnknownCallerError, status_of
from kvplane.controlplane.tally import CallTally, Tally
from kvplane.controlplane.throttle import Throttle
from kvplane.tracing.context import Tracer

log = structlog.get_logger(__name__)

_Context = Any
"""grpc.aio.ServicerContext; its type parameters say nothing here."""


_OK, _CANCELLED = grpc.StatusCode.OK.name, grpc.StatusCode.CANCELLED.name
_DENIALS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
_LOGGED = _DENIALS | {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_refusals = Throttle()
"""Refused calls, by reason: an outage refuses thousands."""


class Counted(NamedTuple):
    """Where a service's calls are counted."""

    tally: Tally
    calls: Mapping[str, CallTally]
    """By the name of the method."""


async def _abort(
    context: _Context, method: str, error: Exception, counted: Counted | None, calls: CallTally | None
) -> NoReturn:
    request_id = secrets.token_hex(8)
    code, message, reason, details = status_of(error, request_id)
    if counted is not None:
        counted.tally.refused(reason)
    if calls is not None:
        calls.ended(code.name)
    if code is grpc.StatusCode.INTERNAL:
        log.error("rpc_failed", rpc=method, request_id=request_id, exc_info=error)
    elif code in _LOGGED:
        unlogged = _refusals.due(reason)
        if unlogged is not None:
            more = {"problem": message, "peer": context.peer()} if code in _DENIALS else {}
            log.warning(
                "rpc_refused", rpc=method, reason=reason, request_id=request_id, unlogged=unlogged, **more
            )
    trailers = (("grpc-status-details-bin", details), (REASON_KEY, reason))
    await context.abort(code, message, trailing_metadata=trailers)
    raise AssertionError("abort returned")


def _unary(
    method: str, behavior: Callable[[Any, _Context], Awaitable[Any]], counted: Counted | None
) -> Callable[..., Any]:
    calls = None if counted is None else counted.calls[_name(method)]

    async def handle(request: Any, context: _Context) -> Any:
        began = 0.0 if calls is None else calls.begin()
        try:
            answer = await behavior(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            if calls is not None:
                calls.ended(_CANCELLED)
            raise
        except Exception as error:
            if not context.done():  # else the caller has gone, and with it whom to tell
                await _abort(context, method, error, counted, calls)
            if calls is not None:
                calls.ended(_CANCELLED)
            return None
        if calls is not None:
            calls.done(began)
        return answer

    return handle


def _stream(
    method: str, behavior: Callable[[Any, _Context], AsyncIterator[Any]], counted: Counted | None
) -> Callable[..., Any]:
    calls = None if counted is None else counted.calls[_name(method)]

    async def handle(request: Any, context: _Context) -> AsyncIterator[Any]:
        if calls is not None:
            calls.begin()
        try:
            async for answer in behavior(request, context):
                yield answer
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            if calls is not None:
                calls.ended(_CANCELLED)
            raise
        except Exception as error:
            await _abort(context, method, error, counted, calls)
        else:
            if calls is not None:
                calls.ended(_OK)

    return handle


def _name(method: str) -> str:
    return method.rpartition("/")[2]


def _of_callers(method: str, behavior: Callable[..., Any], access: Access, *, streams: bool) -> Any:
    """Return a behavior that first sees whether its caller may. `streams`: requests come one by one.

    They are then looked at where they are read. What answers many times looks again before each answer.
    """

    answers_many = inspect.isasyncgenfunction(behavior)

    def check(caller: Caller, request: Any) -> None:
        caller.require_role(method)
        if isinstance(request, Exception):  # for its caller to know, and nobody else
            raise request
        if not streams:
            caller.require(method, request)

    def admit(request: Any, context: _Context) -> Caller:
        caller = access.caller(context)
        check(caller, request)
        if streams or answers_many:
            CURRENT.set(caller)
        return caller

    async def once(request: Any, context: _Context) -> Any:
        admit(request, context)
        return await behavior(request, context)

    async def many(request: Any, context: _Context) -> AsyncIterator[Any]:
        caller = admit(request, context)
        async with aclosing(behavior(request, context)) as answers:
            async for answer in answers:
                check(caller, request)
                yield answer

    return many if answers_many else once


def _readable(behavior: Callable[..., Any]) -> Callable[..., Any]:
    """Return a behavior that raises what came in place of a message, see decoding."""

    def look(request: Any, context: _Context) -> Any:
        if isinstance(request, Exception):
            raise request
        return behavior(request, context)

    return look


def refusing(method: str, access: Access, counted: Counted | None) -> Callable[..., Any]:
    """Return a handler for callers without anybody's token, which reads nothing of what they send."""

    async def refuse(_requests: Any, context: _Context) -> NoReturn:
        caller = access.caller(context)
        raise UnknownCallerError(caller.problem)

    return _unary(method, refuse, counted)


def guarded(
    servicer: object,
    service: str,
    counted: Counted | None = None,
    *,
    access: Access | None = None,
    streams: Container[str] = (),
    tracer: Tracer | None = None,
) -> Any:
    """Return a servicer that does the same, and turns every exception into its status.

    Done once, where a server interceptor of grpc.aio costs each call about a tenth of its time.

    Args:
        servicer: with one member a method, named as the protos name it.
        service: its full name.
        counted: where its calls are counted.
        access: who may call what; None: everyone everything.
        streams: methods whose requests come one by one.
        tracer: of unary calls that give a trace; None: none is looked for.
    """
    guards = {}
    for name in dir(servicer):
        if name[0].isupper():  # gRPC names its handlers as the protos name their methods
            behavior = getattr(servicer, name)
            method, answers_many = f"/{service}/{name}", inspect.isasyncgenfunction(behavior)
            if access is not None:
                behavior = _of_callers(method, behavior, access, streams=name in streams)
            elif name not in streams:
                behavior = _readable(behavior)
            if tracer is not None and not answers_many and name not in streams:
                behavior = traced.unary(tracer, method, behavior)
            guards[name] = (_stream if answers_many else _unary)(method, behavior, counted)
    return SimpleNamespace(**guards)
