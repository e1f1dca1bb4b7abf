"""Errors that no request has come far enough for: in the shape of the API that the path belongs to."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvplane.router.messages import messages_error
from kvplane.router.openai import error_body, is_harmless_id

_HERE = " The API is under /v1, as GET /v1/models; the status page is /ui."
_EXPECT = "Only `Expect: 100-continue` is supported."


def path_error(path: str, message: str, status: int, *, param: str | None = None) -> bytes:
    """Return an error as clients of a path expect it: Anthropic's under /v1/messages, else OpenAI's."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return messages_error(message, status)
    return error_body(message, status, param=param)


def request_id(request: web.BaseRequest) -> str:
    """Return the client's request id if it is harmless, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if is_harmless_id(given) else uuid.uuid4().hex


Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def guarded(handle: Handle) -> Handle:
    """Return a server's handler that does the same, and answers what it cannot in the API's shape.

    aiohttp fails with an Expect that is no text, and answers a fault of ours in words of its own.
    """

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        expected = request.headers.get("Expect")
        if expected is not None and expected.lower() != "100-continue":
            return _own(request, _EXPECT, 417)
        return await handle(request)

    return guard


def _own(request: web.BaseRequest, message: str, status: int) -> web.Response:
    body = path_error(request.path, message, status)
    headers = {"x-request-id": request_id(request)}
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def reshape(request: web.Request, response: web.StreamResponse) -> None:
    """Before it is sent, give an answer of the server's own (404, 405, 417) the API's shape."""
    if not isinstance(response, web.HTTPException):
        return
    said = {
        404: f"There is no {request.path} here.{_HERE if request.path == '/' else ''}",
        405: f"{request.method} is not allowed on {request.path}.",
        417: _EXPECT,
    }.get(response.status, response.reason)
    response.body = body = path_error(request.path, said, response.status)
    response.headers["Content-Type"] = "application/json"
    response.headers["x-request-id"] = request_id(request)
    if "Content-Length" in response.headers:
        response.headers["Content-Length"] = str(len(body))
