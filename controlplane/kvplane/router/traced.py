"""Requests served under the trace that their client is in, or a new one."""

from __future__ import annotations

from collections.abc import Awaitable

from aiohttp import web

from kvplane.router.turn import Turn
from kvplane.tracing.context import CURRENT, HEADER, Tracer


async def served(tracer: Tracer, turn: Turn, serving: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """Serve a turn. Its span ends with the answer, and says how it was served."""
    request = turn.request
    span = tracer.begin(
        f"{request.method} {request.path}", request.headers.get(HEADER, ""), request_id=turn.request_id
    )
    CURRENT.set(span)
    problem = "broke"
    try:
        response = await serving
        problem = f"status {response.status}" if response.status >= 500 else ""
        return response
    finally:
        CURRENT.set(None)  # the connection's next request has the same task
        span.tell(
            path=str(turn.path) if turn.reason else None,
            reason=turn.reason or None,
            model=turn.model or None,
            turn=turn.number or None,
            reused_tokens=turn.reused_tokens,
        )
        span.end(problem)
