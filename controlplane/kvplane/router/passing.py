"""Requests that generate nothing, or nothing that KV moves for: passed to an engine that serves the model.

Only what clients use. What changes an engine (sleep, reset_prefix_cache, load_lora_adapter, ...) is not
reachable through a router: it would reach one engine of many.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from yarl import URL

from kvplane.router.admission import OverloadedError
from kvplane.router.answers import cut_off
from kvplane.router.bodies import Bodies
from kvplane.router.engine import Engine
from kvplane.router.messages import messages_error
from kvplane.router.openai import BETWEEN_ENGINES, Body, dump, error_body
from kvplane.router.pool import EnginePool
from kvplane.router.replies import StreamGuard, UnreadableEventError, scrub, scrubbed
from kvplane.router.response_id import engine_tag, read_response_id
from kvplane.router.responses import Responses
from kvplane.router.settings import RouterSettings
from kvplane.router.upstream import client_headers, engine_headers, unusable

log = structlog.get_logger("kvplane.router")

PASSED = (
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Paths of POST requests; their bodies name a model, or leave it to the engine."""
_STORED = "/v1/responses/{response_id:[^/]+}"
_FORM_MODEL = re.compile(rb'name="model"(?:\r\n[^\r\n]{1,256}){0,4}\r\n\r\n([^\r\n]{1,256})\r\n')
_ASK_S = 2.0
try:
    _VERSION = version("kvplane")
except PackageNotFoundError:
    _VERSION = "unknown"
_LARGE_BODY = 1 << 20
_RESPONSES = Responses()


class Passing:
    """Serves them. `session` talks to engines."""

    def __init__(
        self, settings: RouterSettings, *, pool: EnginePool, session: aiohttp.ClientSession, bodies: Bodies
    ) -> None:
        self._bodies = bodies
        self._settings = settings
        self._pool = pool
        self._session = session
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_s,
            sock_read=min(settings.first_byte_timeout_s, settings.idle_timeout_s),
        )

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        for path in PASSED:
            router.add_post(path, self._pass)
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_get("/version", self._version)
        router.add_get(_STORED, self._stored)
        router.add_post(f"{_STORED}/cancel", self._stored)

    # What engines serve

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
            return _error(request, f"The model `{name}` does not exist.", 404, param="model")
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
        return refused or _unreachable(request)

    async def _version(self, request: web.Request) -> web.StreamResponse:
        """Say which version engines are of, as they do, and which one the router is."""
        for engine in sorted(self._pool.engines, key=lambda e: (not e.up, not e.decode))[:3]:
            answer = await self._ask(engine, "/version", request)
            if answer is not None and isinstance(answer[1], dict) and "version" in answer[1]:
                return _json({**answer[1], "kvplane": _VERSION})
        return _json({"version": None, "kvplane": _VERSION})

    async def _ask(self, engine: Engine, path: str, request: web.Request) -> tuple[int, Any] | None:
        try:
            async with (
                asyncio.timeout(_ASK_S),
                self._session.get(engine.at(path), headers=_authorization(request)) as response,
            ):
                return response.status, await response.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("engine_not_asked", engine=engine.url, path=path, problem=str(error))
            return None

    # What goes to one of them

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._passed(request)
        finally:
            self._bodies.done(request)

    async def _passed(self, request: web.Request) -> web.StreamResponse:
        try:
            raw = await self._bodies.read(request)
        except OverloadedError as error:
            return _error(request, str(error), error.status)
        except web.HTTPRequestTimeout:
            return _error(request, "The request body did not come in time.", 408)
        except web.HTTPRequestEntityTooLarge:
            limit = self._settings.max_body_bytes
            return _error(request, f"The request body is larger than {limit} bytes.", 413)
        except web.RequestPayloadError:
            return _error(request, "The request body cannot be decoded.", 400)
        model, raw = _model_of(request, raw)
        return await self._to_one_of(request, self._fit(model), raw)

    def _fit(self, model: str) -> list[Engine]:
        """Return the engines that serve a model; all if none is known to, so that one says so."""
        engines = [e for e in self._pool.engines if not e.draining]
        return [e for e in engines if not model or not e.models or model in e.models] or engines

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        """Ask the engine that made a response; where its id does not tell, one after another."""
        response_id = request.match_info["response_id"]
        known = read_response_id(response_id)
        engines = [e for e in self._pool.engines if e.decode]
        if known is not None:
            engines = [e for e in engines if engine_tag(e.url) == known.engine_tag]
            if not engines:
                return _error(request, f"Response with id '{response_id}' not found.", 404)
        return await self._to_one_of(request, engines, None, on_404=known is None)

    async def _to_one_of(
        self, request: web.Request, engines: list[Engine], raw: bytes | None, *, on_404: bool = False
    ) -> web.StreamResponse:
        """Pass a request to one of some engines, to another only if the first has seen nothing of it.

        `on_404` goes on to the next as well where one does not know what is asked for.
        """
        headers = engine_headers(request.headers.items(), request.headers.get("x-request-id", ""))
        if kind := request.headers.get("Content-Type"):
            headers["Content-Type"] = kind
        if not headers["X-Request-Id"]:
            del headers["X-Request-Id"]
        tried: set[Engine] = set()
        while engine := self._pool.choose(engines, exclude=tried):
            tried.add(engine)
            self._pool.begin(engine)
            try:
                response = await self._session.request(
                    request.method,
                    URL(engine.url + request.rel_url.raw_path_qs),
                    # aiohttp wants large bodies as a file, to send them piecewise.
                    data=raw if raw is None or len(raw) < _LARGE_BODY else io.BytesIO(raw),
                    headers=headers,
                    allow_redirects=False,
                    timeout=self._timeout,
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                self._pool.failed(engine, str(error))
                continue
            except TimeoutError:
                return _error(request, "An engine did not answer in time.", 504)
            except (aiohttp.ClientError, OSError) as error:
                self._pool.failed(engine, f"{type(error).__name__}: {error}")
                return _error(request, "The engine broke off its answer.", 502)
            finally:
                self._pool.end(engine)
            if on_404 and response.status == 404 and len(tried) < len(engines):
                response.close()
                continue
            return await self._answer(request, engine, response)
        return _unreachable(request)

    async def _answer(
        self, request: web.Request, engine: Engine, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        if problem := unusable(response):
            log.warning("answer_unusable", engine=engine.url, problem=problem)
            response.close()
            return _error(request, "The engine gave an answer that is of no use.", 502)
        headers = client_headers(response.headers)
        self._pool.begin(engine)
        try:
            if response.content_type != "text/event-stream":
                body = scrubbed(await response.read())
                return web.Response(body=body, status=response.status, headers=headers)
            out = web.StreamResponse(status=response.status, headers=headers)
            await out.prepare(request)
            guard = StreamGuard(_RESPONSES)
            async for chunk in response.content.iter_any():
                if passed := guard.passed(chunk):
                    await out.write(passed)
            if passed := guard.rest():
                await out.write(passed)
            await out.write_eof()
            return out
        except UnreadableEventError as error:
            log.warning("answer_broken", engine=engine.url, problem=str(error))
            cut_off(request)
            return out
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("answer_broken", engine=engine.url, problem=f"{type(error).__name__}: {error}")
            if response.content_type != "text/event-stream":
                return _error(request, "The engine broke off its answer.", 502)
            cut_off(request)
            return out
        finally:
            self._pool.end(engine)
            response.close()


def _model_of(request: web.Request, raw: bytes) -> tuple[str, bytes]:
    """Return the model that a request names, "" if none, and its body without what steers KV transfers."""
    if request.content_type.startswith("multipart/"):
        found = _FORM_MODEL.search(raw)
        return (found[1].decode(errors="replace") if found else ""), raw
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return "", raw  # The engine says what is wrong with it.
    model = body.get("model") if isinstance(body, dict) else None
    # A client can write a name in many ways, so it is the values that are looked through.
    return (model if isinstance(model, str) else ""), _scrubbed(body, raw)


def _scrubbed(value: Any, raw: bytes) -> bytes:
    """Return JSON without what steers KV transfers in each object at its top; else its bytes as they are."""
    changed = False
    for item in _objects(value):
        if any(name in item for name in BETWEEN_ENGINES):
            scrub(item)
            changed = True
    return dump(value) if changed else raw


def _objects(value: Any) -> Iterator[Body]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=dump(body), status=status, content_type="application/json")


def _error(request: web.Request, message: str, status: int, *, param: str | None = None) -> web.Response:
    anthropic = request.path.startswith("/v1/messages")
    body = messages_error(message, status) if anthropic else error_body(message, status, param=param)
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _unreachable(request: web.Request) -> web.Response:
    return _error(request, "No engine can be reached.", 503)


def _authorization(request: web.Request) -> dict[str, str]:
    names = ("Authorization", "x-api-key")
    return {name: request.headers[name] for name in names if name in request.headers}
