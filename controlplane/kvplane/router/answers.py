"""Answers that are no completion: the router's errors, engines' in the shape of the API, cut streams."""

from __future__ import annotations

import socket
import struct

import structlog
from aiohttp import HttpVersion11, web

from kvplane.router.turn import Turn
from kvplane.router.upstream import EngineAnswer, LegError, LegFailedError

log = structlog.get_logger("kvplane.router")


def error_answer(
    turn: Turn, message: str, status: int, *, param: str | None = None, retry_after_s: int = 1
) -> web.StreamResponse:
    """Return an error of the router's; `retry_after_s` goes with 429 and 503."""
    headers = turn.answer_headers()
    if status in (429, 503):
        headers["Retry-After"] = str(retry_after_s)
    headers["Content-Type"] = "application/json"
    return web.Response(
        body=turn.api.error_body(message, status, param=param), status=status, headers=headers
    )


def passed_on(turn: Turn, answer: EngineAnswer) -> web.StreamResponse:
    """Return what an engine answered, which is no completion."""
    if answer.lacks(turn.model):
        turn.went_cold("model_not_served")
    headers = {**answer.headers, **turn.answer_headers()}
    if answer.status in (429, 503) and not any(name.lower() == "retry-after" for name in headers):
        headers["Retry-After"] = "1"
    body = turn.api.engine_error(answer.body, answer.status)
    if body is not answer.body:
        of_the_body = ("content-type", "content-encoding")
        headers = {name: value for name, value in headers.items() if name.lower() not in of_the_body}
        headers["Content-Type"] = "application/json"
    return web.Response(body=body, status=answer.status, headers=headers)


def cut_off(request: web.Request) -> None:
    """End a stream that broke off so that its client can tell: without the last chunk.

    To HTTP/1.0, which has no chunks, any end is a whole stream's, except for a reset.
    """
    transport = request.transport
    if transport is None:
        return
    if request.version >= HttpVersion11:
        transport.close()
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def gave_up(turn: Turn, error: LegError) -> web.StreamResponse:
    """Return what a client is told when the last attempt has failed."""
    log.error("engine_failed", engine=error.engine.url, problem=error.problem, request_id=turn.request_id)
    if isinstance(error, LegFailedError) and error.answer is not None and error.status == 503:
        return passed_on(turn, error.answer)
    said = f" (it answered {error.status})" if error.status else ""
    message = f"The decode engine failed{said}; the router's log has request {turn.request_id}."
    return error_answer(turn, message, 502)
