"""Requests that generate nothing, or nothing that KV moves for: passed to an engine that serves the model.

Only what clients use. What changes an engine (sleep, reset_prefix_cache, load_lora_adapter, ...) is not
reachable through a router: it would reach one engine of many.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import structlog
from aiohttp import web
from yarl import URL

from kvplane.router.admission import Admission, OverloadedError
from kvplane.router.answers import cut_off
from kvplane.router.bodies import Bodies, BodyError
from kvplane.router.connections import read_answer
from kvplane.router.deadline import check_timeout, deadline
from kvplane.router.engine import Engine
from kvplane.router.forms import check_urlencoded, form_model
from kvplane.router.metrics import RouterMetrics
from kvplane.router.openai import BadRequestError, drop_params, dump, is_harmless_id, parse_json
from kvplane.router.places import MOST_ASKED, line
from kvplane.router.pool import EnginePool
from kvplane.router.replies import StreamGuard, UnreadableEventError, scrubbed
from kvplane.router.resources import NOT_CONNECTED
from kvplane.router.response_id import engine_tag, read_response_id
from kvplane.router.responses import Responses
from kvplane.router.sending import ClientStalledError, finish, send
from kvplane.router.settings import RouterSettings
from kvplane.router.shapes import path_error
from kvplane.router.tenancy.caller import Caller, caller_of, not_found
from kvplane.router.upstream import EngineAnswer, client_headers, engine_headers, unusable

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
_LARGE_BODY = 1 << 20
_NOT_NOW = frozenset({502, 503, 504})
"""Answers of engines that are not there at present, or of what is in front of them."""
_RESPONSES = Responses()


@dataclass(slots=True)
class _Call:
    """State of one request."""

    request: web.Request
    arrived: float
    whole_s: float | None
    """Seconds from its arrival that it may take in all; None without a limit."""
    patience: asyncio.Timeout | None = None
    """Ends it when its time is over."""
    raw: bytes | None = None
    """Its body, as it goes on."""
    model: str = ""
    """The model that it names, "" if none."""
    out: web.StreamResponse | None = None
    """A stream that the client has been sent the beginning of."""


class Passing:
    """Serves them, within the same limits as requests that generate. `session` talks to engines."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        pool: EnginePool,
        session: aiohttp.ClientSession,
        bodies: Bodies,
        admission: Admission,
        metrics: RouterMetrics,
    ) -> None:
        self._bodies = bodies
        self._settings = settings
        self._pool = pool
        self._session = session
        self._admission = admission
        self._metrics = metrics
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_s,
            sock_read=min(settings.first_byte_timeout_s, settings.idle_timeout_s),
        )

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        for path in PASSED:
            router.add_post(path, self._pass)
        router.add_get(_STORED, self._stored)
        router.add_post(f"{_STORED}/cancel", self._stored)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        return await self._in_time(request, self._passed)

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        return await self._in_time(request, self._where_it_is)

    async def _in_time(
        self, request: web.Request, serve: Callable[[_Call], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request that can be taken on, within its deadline."""
        limits = deadline(request.headers, self._settings.request_timeout_s)
        call = _Call(request, asyncio.get_running_loop().time(), limits.whole_s)
        try:
            check_timeout(request.headers)
            async with asyncio.timeout(limits.begin_s) as call.patience:
                self._admission.check()
                if request.method == "POST" and request.can_read_body:
                    call.raw = await self._bodies.read(request)
                # Clients that are slow to say what they want take nobody's place.
                async with self._admission:
                    return await serve(call)
        except OverloadedError as error:
            self._metrics.overloaded.labels(str(error.status)).inc()
            return _error(request, str(error), error.status, retry_after_s=error.retry_after_s)
        except BodyError as error:
            return _error(request, str(error), error.status)
        except BadRequestError as error:
            return _error(request, str(error), 400, param=error.param)
        except TimeoutError:
            if call.patience is None or not call.patience.expired():
                raise
            if call.out is None or not call.out.prepared:
                return _error(request, "The request's time is over.", 504)
            log.warning("answer_broken", path=request.path, problem="the request's time is over")
            cut_off(request)
            return call.out
        finally:
            self._bodies.done(request)

    async def _passed(self, call: _Call) -> web.StreamResponse:
        call.model, call.raw = _model_of(call.request, call.raw or b"", caller_of())
        return await self._to_one_of(call, f"passed {call.model}", lambda: self._fit(call.model))

    def _fit(self, model: str) -> list[Engine]:
        """Return the engines that serve a model; all if none is known to, so that one says so."""
        engines = [e for e in self._pool.engines if not e.draining]
        fit = self._pool.may_serve(engines, model) if model else engines
        known = [e for e in fit if model in e.models]
        return (known if any(e.up for e in known) else fit) or engines

    async def _where_it_is(self, call: _Call) -> web.StreamResponse:
        """Ask the engine that made a response; where its id does not tell, one after another."""
        response_id = call.request.match_info["response_id"]
        caller = caller_of()
        if caller is not None and not caller.owns(response_id):
            return _error(call.request, str(not_found(response_id)), 404)
        _, call.raw = _model_of(call.request, call.raw, caller) if call.raw else ("", None)
        known = read_response_id(response_id)
        engines = [e for e in self._pool.engines if e.decode]
        if known is not None:
            engines = [e for e in engines if engine_tag(e.url) == known.engine_tag]
        # What could lead to another path of the engine's is the id of nothing.
        if response_id in (".", "..") or "/" in response_id or (known is not None and not engines):
            return _error(call.request, f"Response with id '{response_id}' not found.", 404)
        kind = engines[0].url if known is not None else "stored"
        return await self._to_one_of(call, kind, lambda: engines, on_404=known is None)

    async def _to_one_of(
        self, call: _Call, kind: str, engines: Callable[[], list[Engine]], *, on_404: bool = False
    ) -> web.StreamResponse:
        """Pass a request to one of some engines, and to another if that cannot be reached.

        Such requests change nothing, so an engine that breaks off, falls silent or is not there at present is
        replaced as well; once, since the request may be why. Where one is busy, or does not serve the
        model, the next is asked, MOST_ASKED at most; the first such answer is passed on where none
        is left. `on_404` goes on to the next also where one does not know what is asked for; nobody does if
        none failed to say. `kind` names those engines.
        """
        tried: set[Engine] = set()
        broke = False
        refused: web.Response | None = None
        while True:
            engine = await self._admission.place(
                line(kind, tried, None), lambda: self._pool.choose(engines(), exclude=tried)
            )
            if engine is None:
                return refused or (_broke_off if broke else _unreachable)(call.request)
            tried.add(engine)
            self._pool.begin(engine)
            try:
                response, body = await self._ask(call, engine)
                try:
                    if on_404 and response.status == 404 and not tried.issuperset(engines()):
                        continue
                    if problem := unusable(response):
                        log.warning("answer_unusable", engine=engine.url, problem=problem)
                        return _error(call.request, "The engine gave an answer that is of no use.", 502)
                    headers = client_headers(response.headers)
                    if body is not None:
                        answer = web.Response(body=body, status=response.status, headers=headers)
                        if response.status in (429, 503):
                            answer.headers.setdefault("Retry-After", "1")
                        if response.status in _NOT_NOW and not broke:
                            broke, refused = True, refused or answer
                            continue
                        said = EngineAnswer(response.status, headers, body)
                        if not self._others_may(call, tried, engine, said):
                            if on_404 and said.status == 404 and (refused or broke):
                                return refused or _broke_off(call.request)
                            return answer
                        refused = refused or answer
                        continue
                    return await self._relay(call, engine, response, headers)
                finally:
                    response.close()
            except _NeverSentError:
                continue
            except _BrokeOffError:
                if broke:
                    return _broke_off(call.request)
                broke = True
            except TimeoutError:
                return _error(call.request, "An engine did not answer in time.", 504)
            finally:
                self._pool.untold(engine)
                self._pool.end(engine)

    def _others_may(self, call: _Call, tried: set[Engine], engine: Engine, answer: EngineAnswer) -> bool:
        """Tell whether a refusal is one engine's only: it is busy, or no longer serves the model."""
        one_more = len(tried) < MOST_ASKED
        if answer.status == 429:
            return one_more
        return answer.lacks(call.model) and self._pool.lacks_model(engine, call.model) and one_more

    async def _ask(self, call: _Call, engine: Engine) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Return an engine's answer and its body, None for one that is streamed or unusable.

        Raises _NeverSentError, _BrokeOffError or TimeoutError.
        """
        request = call.request
        given = request.headers.get("x-request-id", "")
        headers = engine_headers(
            request.headers.items(),
            given if is_harmless_id(given) else "",
            of_tenant=caller_of() is not None,
        )
        if kind := request.headers.get("Content-Type"):
            headers["Content-Type"] = kind
        if not headers["X-Request-Id"]:
            del headers["X-Request-Id"]
        raw = call.raw
        patience = asyncio.timeout(None)
        try:
            async with patience:
                # The pool ends the wait for an engine that it finds silent.
                engine.waits.add(patience)
                response = await self._session.request(
                    request.method,
                    URL(engine.url + request.rel_url.raw_path_qs),
                    # aiohttp wants large bodies as a file, to send them piecewise.
                    data=raw if raw is None or len(raw) < _LARGE_BODY else io.BytesIO(raw),
                    headers=engine.headers(headers),
                    allow_redirects=False,
                    timeout=self._timeout,
                )
                if response.content_type == "text/event-stream" or unusable(response):
                    return response, None
                try:
                    return response, scrubbed(await read_answer(response))
                except BaseException:
                    response.close()
                    raise
        except NOT_CONNECTED as error:
            self._pool.unreachable(engine, error)
            raise _NeverSentError from error
        except TimeoutError as error:
            if not patience.expired():
                raise
            log.warning("answer_broken", engine=engine.url, path=request.path, problem="went silent")
            raise _BrokeOffError from error
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
            log.warning("answer_broken", engine=engine.url, path=request.path, problem=problem)
            self._pool.failed(engine, problem)
            raise _BrokeOffError from error
        finally:
            engine.waits.discard(patience)

    async def _relay(
        self, call: _Call, engine: Engine, response: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        call.out = out = web.StreamResponse(status=response.status, headers=headers)
        if call.patience is not None and not call.patience.expired():
            limit = call.whole_s
            call.patience.reschedule(None if limit is None else call.arrived + limit)
        try:
            await out.prepare(call.request)
            guard, limit_s = StreamGuard(_RESPONSES), self._settings.send_timeout_s
            async for chunk in response.content.iter_any():
                if passed := guard.passed(chunk):
                    await send(out, call.request, passed, limit_s)
            if passed := guard.rest():
                await send(out, call.request, passed, limit_s)
            await finish(out, call.request, limit_s)
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            UnreadableEventError,
            ClientStalledError,
        ) as error:
            problem = f"{type(error).__name__}: {error}"
            log.warning("answer_broken", engine=engine.url, path=call.request.path, problem=problem)
            cut_off(call.request)
        return out


class _NeverSentError(Exception):
    """The engine could not be connected to."""


class _BrokeOffError(Exception):
    """The engine ended the connection, or has fallen silent, before its answer or in the middle of it."""


def _model_of(request: web.Request, raw: bytes, caller: Caller | None) -> tuple[str, bytes]:
    """Return the model that a request names, "" if none, and its body without what steers KV transfers.

    And made its caller's own. Raises BadRequestError, or OverloadedError.
    """
    kind = request.content_type
    if kind.startswith("multipart/") or kind == "application/x-www-form-urlencoded":
        if caller is not None:
            caller.mark_passed(request.path, None, len(raw))
        if kind.startswith("multipart/"):
            return form_model(raw), raw
        check_urlencoded(raw)
        return "", raw
    try:
        body = parse_json(raw)
    except BadRequestError:
        raise
    except ValueError:
        return "", raw  # The engine says what is wrong with it.
    model = body.get("model") if isinstance(body, dict) else None
    # A client can write a name in many ways, so it is the values that are looked through.
    changed = drop_params(body)
    if caller is not None:
        changed = caller.mark_passed(request.path, body, len(raw)) or changed
    return (model if isinstance(model, str) else ""), dump(body) if changed else raw


def _error(
    request: web.Request, message: str, status: int, *, param: str | None = None, retry_after_s: int = 1
) -> web.Response:
    body = path_error(request.path, message, status, param=param)
    headers = {"Retry-After": str(retry_after_s)} if status in (429, 503) else {}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _unreachable(request: web.Request) -> web.Response:
    return _error(request, "No engine can be reached.", 503)


def _broke_off(request: web.Request) -> web.Response:
    return _error(request, "The engine broke off its answer.", 502)
