"""Legs: one request to one engine, and what its failure means for the next attempt."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvplane.router.api import Api, count
from kvplane.router.connections import read_answer
from kvplane.router.engine import Engine
from kvplane.router.openai import Body, error_code
from kvplane.router.pool import EnginePool
from kvplane.router.replies import holds_private, scrub, scrubbed
from kvplane.router.resources import NOT_CONNECTED, told
from kvplane.tracing.context import CURRENT, HEADER

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_TO_ENGINES = _HOP_BY_HOP | {
    "host",
    "content-length",
    "content-type",
    "content-encoding",
    "accept-encoding",
    "expect",
    "cookie",
    "x-request-id",
    "x_request_id",
    "x-conversation-id",
    # Which rank computes is ours to say.
    "x-data-parallel-rank",
    "x_data_parallel_rank",
    # Of engines to those who choose among them.
    "endpoint-load-metrics-format",
}
_NOT_OF_TENANTS = _NOT_TO_ENGINES | {"authorization", "x-api-key", "x-session-id", "x-vllm-priority"}
"""Credentials are the router's affair then, sessions are the tenant's own, and nobody goes first."""
_OURS = ("x-kvplane-", "x_kvplane_")
_LARGE_BODY = 1 << 20
_EVENTS = "text/event-stream"
_NO_VERDICT = frozenset({401, 403, 404})
"""Refusals that come from in front of what computes, and so do not show that it does."""
_NOT_TO_CLIENTS = _HOP_BY_HOP | {
    "content-length",
    "date",
    "server",
    "x-request-id",
    "x-data-parallel-rank",
    "endpoint-load-metrics",
    # What an engine says of itself holds for itself only.
    "alt-svc",
    "content-location",
    "location",
    "set-cookie",
}

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What aiohttp reads in a header's value from an engine, and refuses to write."""

_PULL_DETAILS = frozenset({"peer_breaker", "queued_too_long", "reset"})
"""Details that say more than their outcome, "cold"."""
_PULL_OUTCOMES = _PULL_DETAILS | {
    "pulled",
    "mismatch",
    "local_hit",
    "below_threshold",
    "no_fingerprint",
    "cold",
    "failed",
}


class LegError(Exception):
    """A leg failed. `problem` is one line for the log; `status` the engine's, if it answered."""

    def __init__(self, engine: Engine, problem: str, status: int | None = None) -> None:
        super().__init__(f"{engine.url}: {problem}")
        self.engine = engine
        self.problem = problem
        self.status = status


class NeverSentError(LegError):
    """The engine could not be connected to: it has seen nothing of the request."""


class LegFailedError(LegError):
    """The engine failed, and may have done part of the work. `answer` is what it said, if anything."""

    def __init__(
        self, engine: Engine, problem: str, status: int | None = None, answer: EngineAnswer | None = None
    ) -> None:
        super().__init__(engine, problem, status)
        self.answer = answer


class LegTimeoutError(LegError):
    """The engine did not answer in time; trying again would take as long."""


class RefusedError(Exception):
    """The engine refused the request as the client's mistake, or for now; passed on as it is."""

    def __init__(self, engine: Engine, answer: EngineAnswer) -> None:
        super().__init__(f"{engine.url} answered {answer.status}")
        self.engine = engine
        self.answer = answer


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A whole answer of an engine."""

    status: int
    headers: dict[str, str]
    body: bytes

    def lacks(self, model: str) -> bool:
        """Tell whether it says that the engine does not serve a model."""
        if self.status != 404:
            return False
        try:
            answer = json.loads(self.body)
            error = answer["error"]
            return error.get("param") == "model" or f"`{model}`" in error["message"]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return False


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill leg left behind. `params` None: nothing to read, the decode engine computes."""

    engine: Engine
    params: Mapping[str, Any] | None
    envelope: Mapping[str, Any]
    cached_tokens: int | None
    prompt_tokens: int | None
    seconds: float

    @property
    def outcome(self) -> str:
        """What the engine's connector says it did; "" from an engine without our connector."""
        value = self.envelope.get("outcome")
        return value if isinstance(value, str) else ""

    @property
    def detail(self) -> str:
        """Why, in a word; "" if it does not say."""
        value = self.envelope.get("detail")
        return value if isinstance(value, str) else ""

    @property
    def reason(self) -> str:
        """What the two say of a pull, in a word that routers give as their reason."""
        said = self.detail if self.detail in _PULL_DETAILS else self.outcome
        return said if said in _PULL_OUTCOMES else "pulled"

    def count(self, name: str) -> int:
        """Return a count of the envelope, 0 if absent."""
        return count(self.envelope, name) or 0


def engine_headers(
    headers: Iterable[tuple[str, str]], request_id: str, *, of_tenant: bool = False
) -> dict[str, str]:
    """Return the headers of a client's request that go on to engines.

    `of_tenant`: the router itself knows whose it is, so what else says so stays here.
    """
    dropped = _NOT_OF_TENANTS if of_tenant else _NOT_TO_ENGINES
    if CURRENT.get() is not None:
        dropped = dropped | {HEADER}  # each leg has its own
    kept = {
        name: value
        for name, value in headers
        if (lower := name.lower()) not in dropped and not lower.startswith(_OURS)
    }
    kept["Content-Type"] = "application/json"
    # Bytes pass through untouched, and replies that are read must be readable.
    kept["Accept-Encoding"] = "identity"
    kept["X-Request-Id"] = request_id
    return kept


def client_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an engine's answer that go on to the client."""
    return {
        name: value
        for name, value in headers.items()
        if (lower := name.lower()) not in _NOT_TO_CLIENTS
        and not lower.startswith(_OURS)
        and name.isprintable()
        and (value.isprintable() or _CONTROL.search(value) is None)
    }


def unusable(response: aiohttp.ClientResponse) -> str | None:
    """Return why an engine's answer is of no use to a client, whatever is in it; None if it may be."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        return f"answered in {encoding}, which it was not asked for"
    if 300 <= response.status < 400:
        return f"answered {response.status}: a client cannot be sent to an engine"
    return None


class Upstream:
    """Sends legs. Connection failures take the engine out of rotation at once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pool: EnginePool,
        *,
        prefill_timeout_s: float,
        first_byte_timeout_s: float,
    ) -> None:
        self._session = session
        self._pool = pool
        self._prefill_timeout_s = prefill_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s

    async def _send(
        self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        # aiohttp wants large bodies as a file, to send them piecewise.
        data = body if len(body) < _LARGE_BODY else io.BytesIO(body)
        if (span := CURRENT.get()) is not None and not span.made_up:
            headers = {**headers, HEADER: span.traceparent}
        try:
            return await self._session.post(
                engine.at(path), data=data, headers=engine.headers(headers), allow_redirects=False
            )
        except NOT_CONNECTED as error:
            self._pool.unreachable(engine, error)
            raise NeverSentError(engine, told(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broke(engine, error) from error

    def _broke(self, engine: Engine, error: Exception) -> LegFailedError:
        # Perhaps only a connection that lay idle too long: the probe, due at once, tells.
        problem = f"{type(error).__name__}: {error}"
        if not isinstance(error, TimeoutError):
            self._pool.failed(engine, problem)
        return LegFailedError(engine, problem)

    @asynccontextmanager
    async def _waiting(self, engine: Engine, seconds: float) -> AsyncIterator[None]:
        """Wait for an engine's answer; not longer than the pool has patience with it, if others could help.

        Raises LegTimeoutError, or LegFailedError for an engine that was taken out of rotation meanwhile.
        """
        try:
            async with asyncio.timeout(seconds) as patience:
                engine.waits.add(patience)
                try:
                    yield
                finally:
                    engine.waits.discard(patience)
        except TimeoutError:
            if not engine.up:
                raise LegFailedError(engine, "went silent") from None
            raise LegTimeoutError(engine, f"no answer within {seconds:g} s") from None

    async def prefill(self, engine: Engine, api: Api, body: bytes, headers: Mapping[str, str]) -> Prefilled:
        """Run a prefill leg, which the caller has counted as outstanding on the engine.

        Raises RefusedError, NeverSentError, LegFailedError or LegTimeoutError.
        """
        started = asyncio.get_running_loop().time()
        try:
            async with self._waiting(engine, self._prefill_timeout_s):
                response = await self._send(engine, api.path, body, headers)
                answer = await self._whole(engine, response)
            seconds = asyncio.get_running_loop().time() - started
            prefilled = self._prefilled(engine, api, answer, seconds)
        except (LegFailedError, LegTimeoutError, RefusedError) as error:
            self._note(engine, error)
            raise
        self._pool.answered(engine)
        return prefilled

    def _prefilled(self, engine: Engine, api: Api, answer: EngineAnswer, seconds: float) -> Prefilled:
        problem = f"answered {answer.status} with what is not a completion"
        try:
            parsed = json.loads(answer.body)
        except (ValueError, RecursionError):
            raise LegFailedError(engine, problem) from None
        params = parsed.get("kv_transfer_params") if isinstance(parsed, dict) else ""
        if not isinstance(parsed, dict) or not isinstance(params, dict | None) or not api.is_answer(parsed):
            raise LegFailedError(engine, problem)
        envelope = params.pop("kvplane", None) if params is not None else None
        if params is not None:
            engine.verifies = isinstance(envelope, dict)
            learned = params.get("remote_engine_id")
            engine.learned_id = learned if isinstance(learned, str) else ""
        return Prefilled(
            engine,
            params or None,
            envelope if isinstance(envelope, dict) else {},
            api.cached_tokens(parsed),
            api.prompt_tokens(parsed),
            seconds,
        )

    async def open(
        self, engine: Engine, api: Api, body: bytes, headers: Mapping[str, str]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send a decode leg; returns the response and its first bytes, at least one unless it is empty.

        The caller closes the response. Raises RefusedError, NeverSentError, LegFailedError (also for a
        stream that begins with an error, or with nothing) or LegTimeoutError.
        """
        try:
            response, first = await self._open(engine, api, body, headers)
        except (LegFailedError, LegTimeoutError, RefusedError) as error:
            self._note(engine, error)
            raise
        if response.content_type == _EVENTS:
            self._pool.answered(engine)
        return response, first

    def _note(self, engine: Engine, error: LegError | RefusedError) -> None:
        """Note what an attempt that failed says of the engine."""
        if isinstance(error, LegError):
            self._pool.erred(engine, error.problem)
        elif error.answer.status == 429:
            self._pool.erred(engine, "answered 429")
        elif error.answer.status not in _NO_VERDICT:
            # A mistake of the client's, which takes an engine that is well to be found.
            self._pool.answered(engine)
        else:
            self._pool.untold(engine)

    async def _open(
        self, engine: Engine, api: Api, body: bytes, headers: Mapping[str, str]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        try:
            async with self._waiting(engine, self._first_byte_timeout_s):
                response = await self._send(engine, api.path, body, headers)
                try:
                    if response.status != 200:
                        # Raises unless it is another kind of success.
                        answer = await self._whole(engine, response)
                        raise LegFailedError(engine, f"answered {answer.status}", answer.status, answer)
                    if problem := unusable(response):
                        raise LegFailedError(engine, problem)
                    first, begun = await response.content.readany(), True
                    if response.content_type == _EVENTS:
                        while not (begun := api.begun(first)) and (more := await response.content.readany()):
                            first += more
                except BaseException:
                    response.close()
                    raise
        except (aiohttp.ClientError, OSError) as error:
            raise self._broke(engine, error) from error
        if response.content_type == _EVENTS:
            error_body = api.stream_error(first)
            if error_body is not None or not begun:
                response.close()
            if error_body is not None and (status := error_code(error_body)):
                # Its head was sent before it was found out: the client's mistake all the same.
                answer = EngineAnswer(status, {"Content-Type": "application/json"}, scrubbed(error_body))
                raise RefusedError(engine, answer)
            if error_body is not None or not begun:
                said = "with an error" if first else "with nothing"
                raise LegFailedError(engine, f"began its stream {said}", 500)
        return response, first

    async def whole(self, engine: Engine, api: Api, response: aiohttp.ClientResponse, first: bytes) -> Body:
        """Return an answer that is not streamed, without what is not for clients. Raises LegFailedError."""
        try:
            try:
                raw = await read_answer(response, first=first)
            except (aiohttp.ClientError, OSError) as error:
                raise self._broke(engine, error) from error
            try:
                answer = json.loads(raw)
            except (ValueError, RecursionError):
                answer = None
            if not isinstance(answer, dict) or not api.is_answer(answer):
                raise LegFailedError(engine, "answered 200 with what is not a completion")
        except LegFailedError as error:
            self._note(engine, error)
            raise
        self._pool.answered(engine)
        if holds_private(raw):
            scrub(answer)
        return answer

    async def _whole(self, engine: Engine, response: aiohttp.ClientResponse) -> EngineAnswer:
        try:
            body = await read_answer(response)
        except (aiohttp.ClientError, OSError) as error:
            response.close()
            raise self._broke(engine, error) from error
        if problem := unusable(response):
            raise LegFailedError(engine, problem)
        if response.status == 200:
            return EngineAnswer(response.status, {}, body)
        answer = EngineAnswer(response.status, client_headers(response.headers), scrubbed(body))
        if 400 <= response.status < 500:
            raise RefusedError(engine, answer)
        raise LegFailedError(engine, f"answered {response.status}", response.status, answer)
