"""What engines serve: their models in one list, and their version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from kvplane.router.connections import MAX_LIST_BYTES, read_answer
from kvplane.router.engine import Engine
from kvplane.router.openai import Body, dump, error_body, parse_json
from kvplane.router.openapi import document
from kvplane.router.passing import PASSED
from kvplane.router.pool import EnginePool
from kvplane.router.replies import scrub
from kvplane.router.resources import told
from kvplane.router.tenancy.caller import caller_of

log = structlog.get_logger("kvplane.router")

_ASK_S = 2.0
try:
    _VERSION = version("kvplane")
except PackageNotFoundError:
    _VERSION = "unknown"


class Served:
    """Serves `/v1/models`, `/version` and `/openapi.json`. `session` talks to engines."""

    def __init__(self, *, pool: EnginePool, session: aiohttp.ClientSession) -> None:
        self._pool = pool
        self._session = session
        self._document: bytes | None = None

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_get("/version", self._version)
        router.add_get("/openapi.json", self._openapi)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        found = await self._union(request)
        if isinstance(found, web.Response):
            return found
        return _json({"object": "list", "data": list(found.values())})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        found, name = await self._union(request), request.match_info["model"]
        if isinstance(found, web.Response):
            return found
        if name not in found:
            return _json(error_body(f"The model `{name}` does not exist.", 404, param="model"), 404)
        return _json(found[name])

    async def _union(self, request: web.Request) -> dict[str, Body] | web.Response:
        """Return what all engines say they serve, by name; decode engines' words first. Or why not."""
        engines = sorted((e for e in self._pool.engines if e.up), key=lambda e: not e.decode)
        engines = engines or list(self._pool.engines)
        answers = await asyncio.gather(*(self._ask(engine, "/v1/models", request) for engine in engines))
        found: dict[str, Body] = {}
        refused: web.Response | None = None
        for answer in answers:
            if answer is None:
                continue
            status, body = answer
            data = body.get("data") if isinstance(body, dict) else None
            if status != 200 or not isinstance(data, list):
                refused = refused or _json(body, status if status >= 400 else 502)
                continue
            for entry in data:
                if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                    found.setdefault(entry["id"], entry)
        if found or (refused is None and any(answers)):
            return found
        return refused or _unreachable()

    async def _version(self, request: web.Request) -> web.StreamResponse:
        """Say which version engines are of, as they do, and which one the router is."""
        for engine in sorted(self._pool.engines, key=lambda e: (not e.up, not e.decode))[:3]:
            answer = await self._ask(engine, "/version", request)
            if answer is not None and isinstance(answer[1], dict) and "version" in answer[1]:
                return _json({**answer[1], "kvplane": _VERSION})
        return _json({"version": None, "kvplane": _VERSION})

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        """Tell the router's routes and what belongs to them."""
        if self._document is None:
            self._document = dump(document(_VERSION, PASSED))
        return _json(self._document)

    async def _ask(self, engine: Engine, path: str, request: web.Request) -> tuple[int, Any] | None:
        try:
            async with (
                asyncio.timeout(_ASK_S),
                self._session.get(
                    engine.at(path), headers=_authorization(request, engine), allow_redirects=False
                ) as response,
            ):
                answer = parse_json(await read_answer(response, MAX_LIST_BYTES))
                scrub(answer)
                return response.status, answer
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("engine_not_asked", engine=engine.url, path=path, problem=told(error))
            return None


def _json(body: object, status: int = 200) -> web.Response:
    raw = body if isinstance(body, bytes) else dump(body)
    return web.Response(body=raw, status=status, content_type="application/json")


def _unreachable() -> web.Response:
    answer = _json(error_body("No engine can be reached.", 503), 503)
    answer.headers["Retry-After"] = "1"
    return answer


def _authorization(request: web.Request, engine: Engine) -> Mapping[str, str]:
    """Return the credentials for an engine: the client's own, or where there are tenants the router's."""
    if caller_of() is not None:
        return engine.headers({})
    names = ("Authorization", "x-api-key")
    return {name: request.headers[name] for name in names if name in request.headers}
