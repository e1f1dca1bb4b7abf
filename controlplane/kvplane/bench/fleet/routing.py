"""A router: its planner, pool, choices and what it learns are the real ones; HTTP is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, cast

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvplane.bench.fleet.asking import PlaneClient
from kvplane.bench.fleet.decode import Decode, DecodeEngine, LoadFailedError
from kvplane.bench.fleet.engines import MODEL, EngineGoneError, SimulatedEngine
from kvplane.bench.fleet.oracle import Oracle
from kvplane.bench.fleet.planes import Planes
from kvplane.bench.fleet.prefill import PrefillEngine, Prompt
from kvplane.bench.fleet.simulation import Simulation
from kvplane.client.model import Claim, ConversationKey
from kvplane.connector.envelope import Envelope
from kvplane.controlplane import model as m
from kvplane.router import openai
from kvplane.router.admission import Admission, AdmissionLimits
from kvplane.router.api import Api
from kvplane.router.bodies import Bodies
from kvplane.router.choice import PrefillChoice
from kvplane.router.discovery import Roles
from kvplane.router.engine import Engine
from kvplane.router.explain import Trail
from kvplane.router.learned import Memory, RateBook
from kvplane.router.lessons import Lessons
from kvplane.router.metrics import RouterMetrics
from kvplane.router.places import DecodePlaces, line
from kvplane.router.plane import Plane
from kvplane.router.policy import Path, PathMode, Thresholds
from kvplane.router.pool import EnginePool
from kvplane.router.settings import RouterSettings
from kvplane.router.turn import Turn, TurnPlanner
from kvplane.router.upstream import Prefilled

_HTTP_S = 0.001
"""A request on its way to an engine, or its answer back."""
_PLANE_S = 0.001
"""A question to the control plane and its answer."""
_POLL_S = 2.0
_PROBE_S = 1.0


class Ending(StrEnum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    BROKEN = "broken"
    """After its beginning had been sent."""
    REFUSED = "refused"
    """With an error."""


@dataclass(slots=True)
class Request:
    """What a client asks."""

    key: ConversationKey
    prompt: Prompt
    parts: tuple[tuple[int, int], ...]
    """Hash and characters of each message."""
    reply_tokens: int
    calls_tools: bool


@dataclass(slots=True)
class Answer:
    """What came of it.

    Attributes:
        ending: for the client.
        path: by which it was served in the end.
        reason: as the router gives it.
        ttft_s: until the first token; None without one.
        reused: tokens that were not computed, since a location was known of: pulled, or there on the direct
            path.
        local: tokens that the engine that computed the prompt had in its own cache besides.
        retries: legs that were tried again.
    """

    ending: Ending = Ending.REFUSED
    path: str = "cold"
    reason: str = ""
    ttft_s: float | None = None
    reused: int = 0
    local: int = 0
    retries: int = 0


class _Trail(Trail):
    """Keeps nothing: nobody looks at a single turn."""

    __slots__ = ()

    def __init__(self, clock: Callable[[], float]) -> None:
        self._monotonic = clock
        self.arrived = 0.0

    def decided(self, turn: Turn, facts: object, pool: EnginePool) -> None:
        """See Trail."""


class _Api:
    """What the planner asks of a request's form: how long its messages are."""

    def __init__(self, text: openai.PromptText) -> None:
        self._text = text

    def prompt_text(self, body: object) -> openai.PromptText:
        """See Api."""
        return self._text


class SimulatedRouter:
    """One router process. `fleet` finds engines by their base URLs."""

    def __init__(
        self,
        simulation: Simulation,
        planes: Planes | None,
        fleet: Mapping[str, SimulatedEngine],
        oracle: Oracle,
        *,
        name: str,
        seed: int,
        mode: PathMode = PathMode.AUTO,
        thresholds: Thresholds | None = None,
    ) -> None:
        self._simulation = simulation
        self._fleet = fleet
        self._oracle = oracle
        self._mode = mode
        self._monotonic = monotonic = simulation.clock.monotonic
        settings = RouterSettings(
            decode_urls=("http://10.255.255.254:1",), thresholds=thresholds or Thresholds(), path=mode
        )
        self._settings = settings
        metrics = RouterMetrics(CollectorRegistry())
        # No engine takes so many that one has to wait here: engines have queues of their own.
        admission = Admission(AdmissionLimits(max_requests=0, max_engine_requests=0), monotonic)
        self.pool = EnginePool(
            cast(aiohttp.ClientSession, None),
            prefill_urls=(),
            decode_urls=(),
            probe_interval_s=settings.probe_interval_s,
            monotonic=monotonic,
            chance=Random(seed),
        )
        self.plane: Plane | None = None
        if planes is not None:
            client = PlaneClient(simulation, planes)
            self.plane = Plane(
                client,
                client,
                owner=name,
                timeout_s=settings.plane_timeout_s,
                wait_s=settings.turn_wait_s,
                poll_interval_s=settings.poll_interval_s,
                metrics=metrics,
                monotonic=monotonic,
            )
        self._admission = admission
        self._places = DecodePlaces(self.pool, admission)
        self._memory = Memory()
        self._rates = RateBook()
        self._lessons = Lessons(self._memory, self._rates)
        self._prefills = PrefillChoice(self.pool, self._memory, self._rates)
        self._planner = TurnPlanner(
            settings,
            pool=self.pool,
            plane=self.plane,
            memory=self._memory,
            rates=self._rates,
            prefill=self._prefills,
            bodies=cast(Bodies, None),
            metrics=metrics,
        )
        self._trail = _Trail(monotonic)
        self._unplaned = planes is None

    async def start(self, *, first: float) -> None:
        """Begin to follow the registry, and to probe the engines that are down."""
        await self.pool.probe_all()  # of none: those to come are newcomers
        self._simulation.every(_POLL_S, self._poll, first=first)
        self._simulation.every(_PROBE_S, self._probe, first=first + _PROBE_S)

    def _poll(self) -> None:
        if self._unplaned:
            found = {e.url: e for e in self._fleet.values() if e.alive and not e.draining}
            if set(found) != {engine.url for engine in self.pool.engines}:
                roles = {url: _roles(engine) for url, engine in found.items()}
                self.pool.found("dns", roles)
        else:
            self._simulation.start(self._ask_registry())

    async def _ask_registry(self) -> None:
        assert self.plane is not None
        engines = await self.plane.poll()
        if engines is not None:
            self.pool.merge(engines)

    def _probe(self) -> None:
        """As Prober does with one that answers again."""
        for engine in self.pool.engines:
            if not engine.up and self._is_there(engine):
                engine.up = True
                engine.health.came_back(self._monotonic())

    def _is_there(self, engine: Engine) -> bool:
        there = self._fleet.get(engine.url)
        return there is not None and there.alive

    def end(self, key: ConversationKey) -> None:
        """The client says that a conversation is over."""
        if self.plane is not None:
            self.plane.end_later(key)

    async def serve(self, request: Request) -> Answer:
        """Answer a request, as TurnServer does."""
        answer, arrived = Answer(), self._simulation.now
        await self._simulation.sleep(_HTTP_S + (_PLANE_S if self.plane is not None else 0.0))
        text = openai.PromptText(request.parts, 0)
        turn = Turn(
            cast(web.Request, None),
            cast(Api, _Api(text)),
            "",
            self._monotonic(),
            self._trail,
            body={"model": MODEL},
            key=request.key,
        )
        await self._planner.decide(turn, self._mode)

        def first_token() -> None:
            answer.ttft_s = self._simulation.now + _HTTP_S - arrived

        try:
            await self._run(turn, request, answer, first_token)
            answer.ending = Ending.ANSWERED
        except (EngineGoneError, LoadFailedError):
            answer.ending = Ending.REFUSED if answer.ttft_s is None else Ending.BROKEN
        answer.path, answer.reason = str(turn.path), turn.reason
        if (
            answer.ending is Ending.ANSWERED
            and request.calls_tools
            and turn.number
            and self.plane is not None
        ):
            assert turn.key is not None
            self.plane.touch_later(turn.key, self._settings.tool_ttl_s, turn.number)
        return answer

    # Legs, in the order in which TurnServer has them.

    async def _run(
        self, turn: Turn, request: Request, answer: Answer, first_token: Callable[[], None]
    ) -> None:
        if turn.path is not Path.DIRECT:
            await self._prefill(turn, request, answer)
        tried: set[Engine] = set()
        failed: Engine | None = None
        retried = False
        while True:
            engine = await self._places.find(turn, tried, failed)
            if engine is None:
                turn.went_cold("decode_unreachable")
                raise EngineGoneError("no decode engine")
            if turn.path is Path.DIRECT and engine is not turn.holder:
                turn.path, turn.reason = Path.PULL, "holder_full"
                await self._prefill(turn, request, answer)
                continue
            turn.decoder = engine
            await self._simulation.sleep(_HTTP_S)
            if not self._is_there(engine):
                self.pool.failed(engine, "connection refused")
                answer.retries += 1
                tried.add(engine)
                failed = None if engine is failed else failed
                if turn.path is Path.DIRECT:
                    turn.went_cold("decode_unreachable")
                    await self._prefill(turn, request, answer)
                continue
            try:
                return await self._decode(turn, request, answer, engine, first_token)
            except (EngineGoneError, LoadFailedError) as error:
                if isinstance(error, EngineGoneError):
                    self.pool.failed(engine, "connection reset")
                else:
                    self.pool.erred(engine, "load failed")
                if retried or answer.ttft_s is not None:
                    raise
                retried = True
                answer.retries += 1
                tried.add(engine)
                failed = engine
                turn.went_cold("decode_failed")
                await self._prefill(turn, request, answer)

    async def _prefill(self, turn: Turn, request: Request, answer: Answer) -> None:
        tried: set[Engine] = set()
        failed: Engine | None = None
        attempts = 2
        answer.reused = answer.local = 0
        while attempts:
            engine = await self._admission.place(
                line("prefill", tried, failed),
                lambda: self._prefiller(turn, tried) or failed,  # noqa: B023
            )
            if engine is None:
                if turn.reason not in ("prefill_failed", "decode_failed", "decode_unreachable"):
                    turn.went_cold("no_prefill_engine")
                return
            claim: Claim | None = None
            self.pool.begin(engine)
            try:
                if turn.path is Path.PULL:
                    claim = await self._claim(turn, engine)
                turn.prefilled = await self._prefill_leg(turn, request, answer, engine, claim)
            except EngineGoneError as error:
                self.pool.failed(engine, str(error))
                answer.retries += 1
                failed = engine if engine.up else None
                tried.add(engine)
                attempts -= 1
                turn.went_cold("prefill_failed")
                if claim is not None and str(error) == "connection refused":
                    self._finish(claim)
            else:
                if claim is not None:
                    self._finish(claim)
                return
            finally:
                self.pool.end(engine)

    def _finish(self, claim: Claim) -> None:
        if self.plane is not None:
            self.plane.finish(claim)

    def _prefiller(self, turn: Turn, tried: set[Engine]) -> Engine | None:
        engines = self.pool.prefill_engines(turn.model)
        if turn.path is Path.PULL:
            able = self._prefills.choose(turn, [e for e in engines if e.up and self.pool.verifies(e)])
            if able is not None:
                return able
            turn.went_cold("prefill_cannot_verify")
        engine = self._prefills.choose(turn, engines, exclude=tried)
        return engine if engine is not None and engine.up else None

    async def _claim(self, turn: Turn, engine: Engine) -> Claim | None:
        if self.plane is None or turn.location is None:
            return None
        await self._simulation.sleep(_PLANE_S)
        answer = await self.plane.claim(turn.location.key, turn.location, self.pool.engine_id(engine))
        if isinstance(answer, Claim):
            of = answer.location
            self._oracle.claimed((of.engine_id, of.engine_epoch, of.request_id))
            return answer
        if answer is None:
            turn.went_cold("plane_unavailable")
        else:
            turn.went_cold(str(answer) if answer in ("incompatible_engine", "quota") else "claim_lost")
        self._oracle.counts[f"claims_lost:{turn.reason if answer is None else answer}"] += 1
        return None

    async def _prefill_leg(
        self, turn: Turn, request: Request, answer: Answer, engine: Engine, claim: Claim | None
    ) -> Prefilled:
        there = self._fleet.get(engine.url)
        params: dict[str, Any] = {}
        holder: DecodeEngine | None = None
        process = 0
        if claim is not None:
            location = claim.location
            fingerprint = location.fingerprint
            promise = {"chunk_tokens": fingerprint.chunk_tokens, "chain": fingerprint.chain.hex()}
            params = {
                **openai.parse_body(location.kv_transfer_params),
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "kvplane": {"fingerprint": promise, "token_count": location.token_count},
            }
            holding = self._fleet.get(location.endpoint)
            if isinstance(holding, DecodeEngine):
                holder = holding
                # What a reader is told of an incarnation that is over names one that nobody answers for.
                is_current = holding.epoch == location.engine_epoch
                process = holding.process if is_current else -1
        ahead, before = engine.ahead_tokens, self._prefills.computed_before(turn, engine)
        work = self._prefills.work(turn, engine)
        engine.ahead_tokens += work
        sent = self._simulation.now
        try:
            await self._simulation.sleep(_HTTP_S)
            if not isinstance(there, PrefillEngine) or not there.alive:
                raise EngineGoneError("connection refused")
            source_process = there.process
            done = await there.prefill(request.prompt, params, holder, process)
        finally:
            engine.ahead_tokens -= work
        prefilled = Prefilled(
            engine,
            {"process": source_process},
            done.envelope,
            None,
            request.prompt.tokens,
            self._simulation.now - sent,
        )
        self.pool.answered(engine)
        self._lessons.prefilled(turn, prefilled, ahead, before)
        answer.reused, answer.local = done.pulled, done.local
        if claim is not None:
            turn.reason = prefilled.reason
            turn.reused_tokens = prefilled.count("reused_tokens")
        return prefilled

    async def _decode(
        self,
        turn: Turn,
        request: Request,
        answer: Answer,
        engine: Engine,
        first_token: Callable[[], None],
    ) -> None:
        there = self._fleet[engine.url]
        assert isinstance(there, DecodeEngine)
        envelope: Envelope | None = None
        if turn.key is not None and turn.number:
            envelope = Envelope(
                turn.key,
                turn.number,
                engine.url,
                turn.turn_index or None,
                turn.idle_s,
                turn.lease_class,
            )
        job = Decode(request.prompt, request.reply_tokens, envelope)
        if turn.path is not Path.DIRECT and turn.prefilled is not None:
            source = self._fleet.get(turn.prefilled.engine.url)
            if isinstance(source, PrefillEngine) and turn.prefilled.params is not None:
                job.source, job.source_process = source, turn.prefilled.params["process"]
        work = turn.decision.new_tokens if turn.path is Path.DIRECT and turn.decision is not None else 0
        ahead, sent = engine.ahead_tokens, self._simulation.now
        engine.ahead_tokens += work
        self.pool.begin(engine)
        begun = False

        def on_first_token() -> None:
            nonlocal begun
            begun = True
            engine.ahead_tokens -= work
            self.pool.answered(engine)
            self._lessons.began(turn, engine, ahead, self._simulation.now - sent)
            if turn.path is Path.DIRECT:
                answer.reused = job.local
            if turn.key is not None and turn.prefilled is None:
                self._memory.remember(turn.key, turn.text, None, before=turn.before)
            first_token()

        job.on_first_token = on_first_token
        try:
            await there.generate(job)
        finally:
            if not begun:
                engine.ahead_tokens -= work
            self.pool.end(engine)


def _roles(engine: SimulatedEngine) -> Roles:
    return Roles(engine.role is m.EngineRole.PREFILL, engine.role is m.EngineRole.DECODE)
