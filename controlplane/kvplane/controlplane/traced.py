"""What callers ask for is done under the trace that they are in, so that logs and spans say whose it is.

A caller says so by a `traceparent` in an operation of a Turns stream, or in a call's metadata.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvplane.tracing.context import CURRENT, HEADER, Span, Tracer


async def operation(tracer: Tracer, perform: Callable[[Any], Awaitable[None]], asked: Any) -> None:
    """Perform an operation of a Turns stream under the trace that it gives.

    It may run on its caller's task up to where it first waits, and in a context of its own from there; so
    what was before is set again and not reset, and who starts operations calls `left` after each.
    """
    kind = asked.WhichOneof("operation") or "unknown"
    span = tracer.join(f"LocationService/Turns {kind}", asked.traceparent)
    CURRENT.set(span)
    try:
        await perform(asked)
    finally:
        CURRENT.set(None)
        if span is not None:
            span.end()


def left() -> None:
    """Note that the work at hand is no longer of the trace that an operation was of."""
    CURRENT.set(None)


def unary(tracer: Tracer, method: str, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Return a behavior that is done under the trace that its caller gives."""

    async def traced(request: Any, context: Any) -> Any:
        span = _joined(tracer, method, context)
        if span is None:
            return await behavior(request, context)
        CURRENT.set(span)  # for good: the call's task ends with it
        try:
            answer = await behavior(request, context)
        except BaseException as error:
            span.end(type(error).__name__)
            raise
        span.end()
        return answer

    return traced


def _joined(tracer: Tracer, method: str, context: Any) -> Span | None:
    for name, value in context.invocation_metadata() or ():
        if name == HEADER and isinstance(value, str):
            return tracer.join(method.rpartition(".")[2], value)
    return None
