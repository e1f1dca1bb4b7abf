"""Serving turns: legs in order, failover, and the reply on its way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from kvplane.client.logs import hashed
from kvplane.client.model import Claim
from kvplane.router import automatic, identity, openai
from kvplane.router.admission import Admission, OverloadedError
from kvplane.router.answers import cut_off, error_answer, gave_up, passed_on
from kvplane.router.bodies import Bodies, BodyError
from kvplane.router.choice import PrefillChoice
from kvplane.router.deadline import deadline
from kvplane.router.engine import Engine
from kvplane.router.learned import Memory, RateBook
from kvplane.router.lessons import Lessons
from kvplane.router.metrics import RouterMetrics
from kvplane.router.mistakes import no_decode_answer
from kvplane.router.places import DecodePlaces, line
from kvplane.router.plane import Plane
from kvplane.router.policy import Path, PathMode
from kvplane.router.pool import EnginePool
from kvplane.router.replies import StreamGuard, ToolCallScan, UnreadableEventError
from kvplane.router.sending import ClientStalledError, finish, send
from kvplane.router.settings import RouterSettings
from kvplane.router.turn import Turn, TurnPlanner
from kvplane.router.upstream import (
    LegError,
    LegFailedError,
    LegTimeoutError,
    NeverSentError,
    Prefilled,
    RefusedError,
    Upstream,
    client_headers,
)

log = structlog.get_logger("kvplane.router")


class TurnServer:
    """Serves turns. Shared by all requests of a router."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        pool: EnginePool,
        upstream: Upstream,
        plane: Plane | None,
        metrics: RouterMetrics,
        admission: Admission,
        bodies: Bodies,
        monotonic: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._pool = pool
        self._places = DecodePlaces(pool, admission)
        self._upstream = upstream
        self._plane = plane
        self._metrics = metrics
        self._monotonic = monotonic
        self._memory = Memory()
        self.rates = RateBook()
        self._lessons = Lessons(self._memory, self.rates)
        self._prefills = PrefillChoice(pool, self._memory, self.rates)
        self._planner = TurnPlanner(
            settings,
            pool=pool,
            plane=plane,
            memory=self._memory,
            rates=self.rates,
            prefill=self._prefills,
            bodies=bodies,
            metrics=metrics,
        )

    async def serve(self, turn: Turn) -> web.StreamResponse:
        """Answer a request, whatever happens."""
        status = "499"
        try:
            response = await self._in_time(turn)
            status = str(response.status)
            return response
        except asyncio.CancelledError:
            self._metrics.disconnects.inc()
            raise
        except Exception:
            status = "500"
            log.exception("turn_broke", request_id=turn.request_id)
            if turn.streaming:
                # Too late for an answer: the connection ends without the stream's last chunk.
                raise
            return error_answer(turn, f"The router failed; its log has request {turn.request_id}.", 500)
        finally:
            turn.trail.ended(turn, int(status))
            self._metrics.ended(turn, status)
            decision = turn.decision
            log.info(
                "turn_served",
                request_id=turn.request_id,
                identity=turn.identity,
                conversation=hashed(turn.key.tenant_id, turn.key.conversation_id) if turn.key else None,
                path=str(turn.path),
                reason=turn.reason,
                status=int(status),
                turn=turn.number,
                new_tokens=decision.new_tokens if decision else None,
                expected_reuse=decision.reused_tokens if decision else None,
                reused_tokens=turn.reused_tokens,
                costs_s={str(path): round(cost, 4) for path, cost in decision.costs} if decision else {},
                prefill=turn.prefilled.engine.url if turn.prefilled else None,
                decode=turn.decoder.url if turn.decoder else None,
            )

    async def _in_time(self, turn: Turn) -> web.StreamResponse:
        """Answer a request that can be taken on, within its deadline."""
        limits = deadline(turn.request.headers, self._settings.request_timeout_s)
        turn.whole_s = limits.whole_s
        try:
            async with asyncio.timeout(limits.begin_s) as turn.patience:
                self._admission.check()
                mode = await self._planner.read(turn)
                # Clients that are slow to say what they want take nobody's place.
                async with self._admission:
                    return await self._answer(turn, mode)
        except openai.BadRequestError as error:
            return error_answer(turn, str(error), 400, param=error.param)
        except identity.IdentityError as error:
            return error_answer(turn, str(error), 400, param=error.field)
        except BodyError as error:
            return error_answer(turn, str(error), error.status)
        except OverloadedError as error:
            turn.reason = "overloaded"
            self._metrics.overloaded.labels(str(error.status)).inc()
            return error_answer(turn, str(error), error.status, retry_after_s=error.retry_after_s)
        except TimeoutError:
            if turn.patience is None or not turn.patience.expired():
                raise
            turn.reason = "deadline"
            if turn.out is None or not turn.out.prepared:
                return error_answer(turn, "The request's time is over.", 504)
            if turn.decoder is not None:
                self._cut(turn, turn.decoder, "the request's time is over")
            return turn.out

    async def _answer(self, turn: Turn, mode: PathMode) -> web.StreamResponse:
        await self._planner.decide(turn, mode)
        try:
            return await self._run(turn)
        except RefusedError as refused:
            log.info("engine_refused", engine=refused.engine.url, status=refused.answer.status)
            return passed_on(turn, refused.answer)
        except LegTimeoutError as error:
            log.error("leg_timed_out", engine=error.engine.url, problem=error.problem)
            return error_answer(turn, "An engine did not answer in time.", 504)
        except LegError as error:
            return gave_up(turn, error)

    # Legs

    async def _run(self, turn: Turn) -> web.StreamResponse:
        if turn.path is not Path.DIRECT:
            await self._prefill(turn)
        tried: set[Engine] = set()
        failed: Engine | None = None
        refused: RefusedError | None = None
        retried = False
        while True:
            engine = await self._places.find(turn, tried, failed)
            if engine is None:
                if refused is not None:
                    raise refused
                turn.went_cold("decode_unreachable")
                return error_answer(turn, no_decode_answer(self._pool.engines), 503)
            if turn.path is Path.DIRECT and turn.only_engine is None and engine is not turn.holder:
                turn.leave_holder()
                await self._prefill(turn)
                continue
            turn.decoder = engine
            try:
                with turn.trail.attempt("decode", engine):
                    return await self._decode(turn, engine)
            except NeverSentError as error:
                log.warning("decode_unreachable", engine=engine.url, problem=error.problem)
                self._metrics.retries.labels("decode").inc()
                tried.add(engine)
                failed = None if engine is failed else failed
                if turn.path is Path.DIRECT:
                    turn.went_cold("decode_unreachable")
                    await self._prefill(turn)
                # Else what the prefill engine holds has not been read yet and serves the next one.
            except RefusedError as error:
                if not self._places.others_may(turn, error, tried):
                    raise
                self._metrics.retries.labels("decode").inc()
                tried.add(engine)
                # Refused before it was scheduled: what the prefill engine holds serves the next one.
                refused = error if refused is None or error.answer.status == 429 else refused
            except LegFailedError as error:
                log.warning("decode_failed", engine=engine.url, problem=error.problem, retried=retried)
                if retried:
                    raise
                retried = True
                self._metrics.retries.labels("decode").inc()
                tried.add(engine)
                failed = engine
                # Whether the engine read anything is unknown, so nothing is used twice.
                turn.went_cold("decode_failed")
                await self._prefill(turn)

    async def _prefill(self, turn: Turn) -> None:
        """Run the prefill leg, once more if it fails; without result the decode engine computes alone.

        So it does as well where none is up: the first that is back does not come too late for the request.
        Raises RefusedError, and what an engine raises that others would as well.
        """
        if turn.decode_only is not None:
            return
        if not await self._pool.decode_up(turn.model, turn.only_engine):
            turn.went_cold("decode_unreachable")
            return
        tried: set[Engine] = set()
        failed: Engine | None = None
        busy: RefusedError | None = None
        attempts = 2
        while attempts:
            claim: Claim | None = None
            engine = await self._admission.place(
                line(f"prefill {turn.model}", tried, failed),
                lambda: self._prefiller(turn, tried) or failed,  # noqa: B023
            )
            if engine is None:
                if busy is not None:
                    raise busy
                if turn.reason not in ("prefill_failed", "decode_failed", "decode_unreachable"):
                    turn.went_cold("no_prefill_engine")
                return
            # At once: until then the place is free for the next in line.
            self._pool.begin(engine)
            try:
                if turn.path is Path.PULL:
                    claim = await self._claim(turn, engine)
                turn.prefilled = await self._prefill_leg(turn, engine, claim)
            except RefusedError as error:
                self._give_back(claim)  # refused before it was scheduled
                if not self._places.others_may(turn, error, tried):
                    raise
                self._metrics.retries.labels("prefill").inc()
                busy = error if error.answer.status == 429 else busy
                tried.add(engine)
                turn.went_cold("prefill_failed")
            except (NeverSentError, LegFailedError) as error:
                log.warning("prefill_failed", engine=engine.url, problem=error.problem)
                self._metrics.retries.labels("prefill").inc()
                if isinstance(error, NeverSentError):
                    self._give_back(claim)
                failed = engine if isinstance(error, LegFailedError) and engine.up else None
                tried.add(engine)
                attempts -= 1
                turn.went_cold("prefill_failed")
            except OverloadedError:
                self._give_back(claim)  # never sent, for want of what the router has run out of
                raise
            else:
                self._give_back(claim)
                return
            finally:
                self._pool.end(engine)

    def _give_back(self, claim: Claim | None) -> None:
        """Finish a claim that nobody reads by, or no longer."""
        if claim is not None and self._plane is not None:
            self._plane.finish(claim)

    def _prefiller(self, turn: Turn, tried: set[Engine]) -> Engine | None:
        engines = self._pool.prefill_engines(turn.model)
        if turn.path is Path.PULL:
            able = self._prefills.choose(turn, [e for e in engines if e.up and self._pool.verifies(e)])
            if able is not None:
                return able
            turn.went_cold("prefill_cannot_verify")
        engine = self._prefills.choose(turn, engines, exclude=tried)
        # With a decode engine at hand, one that is down is not worth waiting for.
        return engine if engine is not None and engine.up else None

    async def _claim(self, turn: Turn, engine: Engine) -> Claim | None:
        if self._plane is None or turn.key is None or turn.location is None:
            return None
        answer = await self._plane.claim(turn.location.key, turn.location, self._pool.engine_id(engine))
        if isinstance(answer, Claim):
            if turn.trace is not None:
                automatic.taken(self._plane, answer.location)
            return answer
        if answer is None:
            turn.went_cold("plane_unavailable")
        else:
            turn.went_cold(str(answer) if answer in ("incompatible_engine", "quota") else "claim_lost")
        return None

    async def _prefill_leg(self, turn: Turn, engine: Engine, claim: Claim | None) -> Prefilled:
        # A prefill engine whose request a router has seen does not ask the control plane itself.
        params: dict[str, Any] = {**openai.COLD_PARAMS, "kvplane": {"router": True}}
        if claim is not None:
            location = claim.location
            params = {
                **openai.read_object(location.kv_transfer_params),
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "kvplane": {
                    "router": True,
                    "fingerprint": {
                        "chunk_tokens": location.fingerprint.chunk_tokens,
                        "chain": location.fingerprint.chain.hex(),
                    },
                    "token_count": location.token_count,
                },
            }
        body = openai.dump(turn.api.prefill_body(turn.body, params))
        ahead, before = engine.ahead_tokens, self._prefills.computed_before(turn, engine)
        work = self._prefills.work(turn, engine)
        engine.ahead_tokens += work
        try:
            with turn.trail.attempt("prefill", engine):
                prefilled = await self._upstream.prefill(engine, turn.api, body, turn.headers)
        finally:
            engine.ahead_tokens -= work
        self._lessons.prefilled(turn, prefilled, ahead, before)
        if prefilled.params is None:
            self._metrics.no_prefill_params.inc()
        self._metrics.prefill.labels(turn.path).observe(prefilled.seconds)
        if claim is not None:
            turn.reason = prefilled.reason
            turn.reused_tokens = prefilled.count("reused_tokens") if prefilled.envelope else None
        return prefilled

    def _decode_params(self, turn: Turn, engine: Engine) -> dict[str, Any] | None:
        params: dict[str, Any] | None = None
        if turn.prefilled is not None and turn.prefilled.params is not None:
            params = dict(turn.prefilled.params)
        if turn.key is None or not turn.number or turn.leaves_nothing:
            return params
        params = params if params is not None else dict(openai.DIRECT_PARAMS)
        learned = {
            "turn_index": turn.turn_index or None,
            "idle_s": turn.idle_s,
            "lease_class": turn.lease_class,
        }
        params["kvplane"] = {
            **{name: value for name, value in learned.items() if value is not None},
            "tenant_id": turn.key.tenant_id,
            "model": turn.key.model,
            "adapter": turn.key.adapter,
            "conversation_id": turn.key.conversation_id,
            "turn": turn.number,
            "endpoint": engine.url,
        }
        return params

    async def _decode(self, turn: Turn, engine: Engine) -> web.StreamResponse:
        leg = turn.api.decode_body(turn.body, self._decode_params(turn, engine))
        turn.name_answer(leg, engine.url)
        body = openai.dump(leg)
        headers = turn.headers
        if turn.path is Path.DIRECT and turn.location is not None:
            rank = turn.location.data_parallel_rank
            if rank > 0 or self._pool.shares_endpoint(engine):
                headers = {**headers, "X-data-parallel-rank": str(rank)}
        work = turn.decision.new_tokens if turn.path is Path.DIRECT and turn.decision is not None else 0
        ahead = engine.ahead_tokens
        self._pool.begin(engine)
        sent = self._monotonic()
        try:
            engine.ahead_tokens += work
            try:
                response, first = await self._upstream.open(engine, turn.api, body, headers)
            finally:
                engine.ahead_tokens -= work
            turn.trail.first_byte()
            engine.streams.add(response)
            try:
                if response.content_type == "text/event-stream":
                    self._lessons.began(turn, engine, ahead, self._monotonic() - sent)
                    return await self._relay(turn, engine, response, first)
                return await self._whole(turn, engine, response, first)
            finally:
                # Returns a finished connection to the pool and cuts any other: the engine stops at once.
                response.close()
                engine.streams.discard(response)
        finally:
            self._pool.end(engine)

    async def _relay(
        self, turn: Turn, engine: Engine, response: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        self._metrics.ttft.labels(turn.path).observe(self._monotonic() - turn.arrived)
        self._count_reuse(turn)
        out = web.StreamResponse(headers={**client_headers(response.headers), **turn.answer_headers()})
        turn.streaming, turn.out = True, out
        if turn.patience is not None and not turn.patience.expired():
            limit = turn.whole_s
            turn.patience.reschedule(None if limit is None else turn.arrived + limit)
        calls = ToolCallScan()
        guard = StreamGuard(turn.api, self._cached_in_stream(turn))
        limit_s = self._settings.send_timeout_s
        try:
            await out.prepare(turn.request)
            calls.see(first)
            if passed := guard.passed(first):
                await send(out, turn.request, passed, limit_s)
            async for chunk in response.content.iter_any():
                calls.see(chunk)
                if passed := guard.passed(chunk):
                    await send(out, turn.request, passed, limit_s)
            if passed := guard.rest():
                await send(out, turn.request, passed, limit_s)
            self._lessons.answered(turn, guard.prompt_tokens)
            if calls.found:
                self._await_tools(turn)
            await finish(out, turn.request, limit_s)
        except ClientStalledError as error:
            self._metrics.disconnects.inc()
            self._cut(turn, engine, str(error))
            return out
        except UnreadableEventError as error:
            self._cut(turn, engine, str(error))
            return out
        except (ConnectionError, aiohttp.ClientConnectionResetError):
            if turn.request.transport is None or turn.request.transport.is_closing():
                self._metrics.disconnects.inc()
                return out
            self._cut(turn, engine, "the engine closed its connection")
            return out
        except (aiohttp.ClientError, OSError) as error:
            self._pool.failed(engine, f"{type(error).__name__}: {error}")
            self._cut(turn, engine, f"{type(error).__name__}: {error}")
            return out
        return out

    def _await_tools(self, turn: Turn) -> None:
        """The reply calls tools, so the conversation goes on when they have run: have it kept until then."""
        if self._plane is not None and turn.key is not None and turn.number:
            self._plane.touch_later(turn.key, self._settings.tool_ttl_s, turn.number)

    def _cut(self, turn: Turn, engine: Engine, problem: str) -> None:
        """End a stream that its engine broke off so that the client can tell: without its last chunk."""
        turn.trail.cut(problem)
        log.error("stream_broken", engine=engine.url, request_id=turn.request_id, problem=problem)
        cut_off(turn.request)

    async def _whole(
        self, turn: Turn, engine: Engine, response: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        answer = await self._upstream.whole(engine, turn.api, response, first)
        if turn.api.calls_tools(answer):
            self._await_tools(turn)
        if turn.path is Path.DIRECT:
            turn.reused_tokens = turn.api.cached_tokens(answer)
        elif turn.prefilled is not None and turn.prefilled.params is not None:
            turn.api.set_cached_tokens(answer, self._cached(turn.prefilled))
        self._count_reuse(turn)
        self._lessons.answered(turn, turn.api.prompt_tokens(answer))
        headers = {**client_headers(response.headers), **turn.answer_headers()}
        return web.Response(body=openai.dump(answer), headers=headers)

    def _cached_in_stream(self, turn: Turn) -> int | None:
        if turn.path is Path.DIRECT or turn.prefilled is None or turn.prefilled.params is None:
            return StreamGuard.UNCHANGED
        return self._cached(turn.prefilled)

    def _cached(self, prefilled: Prefilled) -> int | None:
        if prefilled.cached_tokens is not None or not prefilled.envelope:
            return prefilled.cached_tokens
        return prefilled.count("local_tokens") + prefilled.count("reused_tokens")

    def _count_reuse(self, turn: Turn) -> None:
        if turn.reused_tokens:
            self._metrics.reused_tokens.labels(turn.path).inc(turn.reused_tokens)
        self._lessons.remembered(turn)
