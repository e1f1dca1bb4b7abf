"""One request: what it asks, what is known about it, and what was decided."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from aiohttp import web

from kvplane.client.model import BegunTurn, ConversationKey, Location
from kvplane.router import automatic, identity, openai
from kvplane.router.api import Api
from kvplane.router.bodies import Bodies
from kvplane.router.choice import PrefillChoice
from kvplane.router.deadline import check_timeout
from kvplane.router.engine import Engine
from kvplane.router.explain import Trail
from kvplane.router.history import Trace, trace
from kvplane.router.learned import Memory, RateBook
from kvplane.router.metrics import RouterMetrics
from kvplane.router.openai import Body
from kvplane.router.plane import Plane
from kvplane.router.policy import Decision, Holder, Path, PathMode, TurnFacts, decide
from kvplane.router.pool import EnginePool
from kvplane.router.response_id import engine_tag, read_response_id
from kvplane.router.settings import RouterSettings
from kvplane.router.tenancy.caller import Caller, caller_of, credentials
from kvplane.router.upstream import Prefilled, engine_headers


@dataclass(slots=True)
class Turn:
    """State of one request."""

    request: web.Request
    api: Api
    request_id: str
    arrived: float
    trail: Trail
    caller: Caller | None = None
    """Who sent it, where there are tenants."""
    body: Body = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    text: openai.PromptText = openai.NO_TEXT
    key: ConversationKey | None = None
    """Of which conversation the turn is, and under which it is announced."""
    identity: str = ""
    """The source of that; "" if there is none."""
    trace: Trace | None = None
    """What the history says of it, where that is the source."""
    before: ConversationKey | None = None
    """Under which the turn before was announced, where each turn has a name of its own."""
    borrowed: bool = False
    """The location is another's who said the same: to be used where it is, not to be taken away."""
    only_engine: Engine | None = None
    """The decode engine that has what the request goes on with."""
    number: int = 0
    """From the control plane; 0 without one, and then the decode engine keeps nothing."""
    turn_index: int = 0
    idle_s: float | None = None
    lease_class: int | None = None
    """Of the turns before, see BegunTurn: for the engine that runs this one."""
    prompt_tokens: int = 0
    """Estimated; 0 while unknown."""
    history_changed: bool = False
    """The prompt is known not to begin with the conversation's last one."""
    location: Location | None = None
    holder: Engine | None = None
    decode_only: str | None = None
    """Why the request cannot be split between engines."""
    path: Path = Path.COLD
    reason: str = ""
    decision: Decision | None = None
    reused_tokens: int | None = None
    prefilled: Prefilled | None = None
    decoder: Engine | None = None
    streaming: bool = False
    """The client has been sent the beginning of an answer."""
    out: web.StreamResponse | None = None
    """That answer."""
    patience: asyncio.Timeout | None = None
    """Ends the request when its time is over."""
    whole_s: float | None = None
    """Seconds from its arrival that it may take in all; None without a limit."""

    @property
    def known_key(self) -> ConversationKey | None:
        """Under which the conversation's last prompt is remembered; this one will be under `key`."""
        return self.before or self.key

    @property
    def held_before(self) -> int:
        """Tokens of the turn before that are held; 0 where none are, or those of the same turn said again."""
        if self.location is None:
            return 0
        own = self.trace.own if self.trace is not None and self.trace.own != self.trace.before else None
        again = own is not None and own in self.location.key.conversation_id
        return 0 if again else self.location.token_count

    @property
    def leaves_nothing(self) -> bool:
        """Whether the request leaves no KV that could be used again."""
        return self.decode_only not in (None, "stored_response")

    @property
    def root(self) -> str:
        """What an id of the answer says of its conversation: what the one before said, or its trace."""
        earlier = read_response_id(self.body.get("previous_response_id"))
        if earlier is not None:
            return earlier.root
        return self.trace.own if self.trace is not None else ""

    @property
    def model(self) -> str:
        """The model asked for, "" if none or unusable."""
        model = self.body.get("model")
        return model if isinstance(model, str) else ""

    def answer_headers(self) -> dict[str, str]:
        """Return the headers that say what was done."""
        headers = {"x-request-id": self.request_id}
        if self.reason:
            headers["x-kvplane-path"] = self.path
            headers["x-kvplane-reason"] = self.reason
        if self.reused_tokens is not None:
            headers["x-kvplane-reused-tokens"] = str(self.reused_tokens)
        if self.decision is not None and self.prompt_tokens:
            headers["x-kvplane-expected-tokens"] = str(self.decision.reused_tokens)
            headers["x-kvplane-new-tokens"] = str(self.decision.new_tokens)
        if self.turn_index:
            headers["x-kvplane-turn"] = str(self.turn_index)
        if self.prefilled is not None:
            headers["x-kvplane-prefill-ms"] = f"{self.prefilled.seconds * 1000:.1f}"
        return headers

    def name_answer(self, leg: Body, engine_url: str) -> None:
        """Set the id of the answer in a decode leg's body, where that says where and of what it is."""
        self.api.name_answer(leg, engine_url, self.root)
        if self.caller is not None:
            self.caller.sign(self.api.path, leg)

    def went_cold(self, reason: str) -> None:
        """Note that the turn is served cold after all."""
        self.path, self.reason, self.reused_tokens, self.prefilled = Path.COLD, reason, 0, None

    def leave_holder(self) -> None:
        """Have it run elsewhere as its holder has no place, on what a prefill engine reads from that."""
        if self.decode_only is None and not self.borrowed:
            self.path, self.reason = Path.PULL, "holder_full"
        else:
            self.went_cold("holder_full")


class TurnPlanner:
    """Finds out what a request asks and what is known, and chooses its path."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        pool: EnginePool,
        plane: Plane | None,
        memory: Memory,
        rates: RateBook,
        prefill: PrefillChoice,
        bodies: Bodies,
        metrics: RouterMetrics,
    ) -> None:
        self._metrics = metrics
        self._prefill = prefill
        self._bodies = bodies
        self._settings = settings
        self._pool = pool
        self._plane = plane
        self._memory = memory
        self._rates = rates

    async def read(self, turn: Turn) -> PathMode:
        """Read the request into `turn`; returns the path that is asked for.

        Raises BadRequestError, IdentityError, or what Bodies.read raises.
        """
        request = turn.request
        check_timeout(request.headers)
        raw = await self._bodies.read(request)
        turn.body = body = openai.parse_body(raw)
        if (caller := caller_of()) is not None:
            turn.caller = caller
            caller.check(body)
        turn.headers = engine_headers(request.headers.items(), turn.request_id, of_tenant=caller is not None)
        mode = self._settings.path
        forced = request.headers.get("x-kvplane-path")
        if forced is not None and self._settings.allow_path_header:
            try:
                mode = PathMode(forced.strip().lower())
            except ValueError:
                raise openai.BadRequestError(
                    "header x-kvplane-path must be auto, cold, pull or direct", "x-kvplane-path"
                ) from None
        sources = self._settings.identity_sources
        conversation, turn.identity = identity.conversation_id(body, request.headers, sources)
        if turn.identity == identity.AUTOMATIC:
            try:
                turn.trace = trace(turn.api.history(body), body, credentials(request.headers))
            except RecursionError:
                raise openai.BadRequestError("The request body is nested too deeply.") from None
            conversation = Trace.at(turn.trace.own, 0) if turn.trace is not None else None
        turn.decode_only = turn.api.decode_only_reason(body)
        turn.only_engine = self._only_engine(turn)
        if conversation is None:
            turn.reason = "no_conversation_id"
        elif (model := self._model(turn)) is None:
            turn.reason = "model_unknown"
        else:
            tenant = identity.tenant_of(caller, self._settings.tenant_id)
            turn.key = ConversationKey(tenant, model, conversation)
            if turn.trace is not None and turn.trace.before is not None:
                turn.before = replace(turn.key, conversation_id=Trace.at(turn.trace.before, 0))
        if caller is not None:
            caller.mark(body, len(raw), turn.api.limits)
        return mode

    def _only_engine(self, turn: Turn) -> Engine | None:
        tag = turn.api.names_engine(turn.body)
        if tag is None:
            return None
        return next((e for e in self._pool.engines if e.decode and engine_tag(e.url) == tag), None)

    def _model(self, turn: Turn) -> str | None:
        """Return the model that names the conversation; that of the engines where the client names none."""
        if turn.body.get("model") is not None:
            return turn.model if identity.usable_id(turn.model) else None
        return self._pool.only_model()

    async def decide(self, turn: Turn, mode: PathMode) -> None:
        """Begin the turn at the control plane and choose its path."""
        miss = turn.reason
        if turn.key is not None:
            turn.text = turn.api.prompt_text(turn.body)
            miss = await self._ask_plane(turn, turn.key)
            # Only now is it known at which of its places the turn before is.
            known = turn.known_key or turn.key
            self._memory.located(known, turn.text, turn.held_before)
            turn.prompt_tokens = self._memory.estimate(known, turn.text, turn.held_before)
            turn.history_changed = self._memory.history_changed(known, turn.text)
        facts = self._facts(turn, mode, miss)
        turn.decision = decision = decide(facts, self._settings.thresholds)
        turn.path, turn.reason = decision.path, decision.reason
        if turn.decode_only is not None:
            direct = turn.holder is not None and mode is not PathMode.COLD
            direct = direct and turn.only_engine in (None, turn.holder)
            turn.path, turn.reason = Path.DIRECT if direct else Path.COLD, turn.decode_only
        elif turn.borrowed and turn.path is Path.PULL:
            turn.path, turn.reason = Path.COLD, "same_prompt"
        turn.reused_tokens = 0 if turn.path is Path.COLD else None
        turn.trail.decided(turn, facts, self._pool)

    async def _ask_plane(self, turn: Turn, key: ConversationKey) -> str:
        """Fill in what the control plane knows, which is counted once; returns why nothing is known."""
        if self._plane is None:
            return "no_control_plane"
        miss = await self._learn(turn, key, self._plane)
        self._metrics.looked_up("hit" if turn.location is not None else miss)
        return miss

    async def _learn(self, turn: Turn, key: ConversationKey, plane: Plane) -> str:
        if turn.leaves_nothing:
            # So it gets no number that others would wait for.
            if turn.trace is not None:
                answer = await automatic.look_up(plane, key, turn.trace)
            else:
                answer = await plane.lookup(key)
            if answer is None:
                return "plane_unavailable"
            turn.location = answer if isinstance(answer, Location) else None
            miss = "" if isinstance(answer, Location) else str(answer)
        else:
            begun = await self._begin(plane, turn, key)
            if begun is None:
                return "plane_unavailable"
            turn.number, turn.location = begun.turn, begun.location
            turn.turn_index, turn.idle_s, turn.lease_class = begun.turn_index, begun.idle_s, begun.lease_class
            miss = str(begun.miss) if begun.miss is not None else ""
        if turn.location is not None:
            holder = self._pool.holder(turn.location)
            if holder is not None and holder.up and not holder.draining and not self._pool.ejected(holder):
                turn.holder = holder
        return miss or "unknown_conversation"

    async def _begin(self, plane: Plane, turn: Turn, key: ConversationKey) -> BegunTurn | None:
        if turn.trace is None:
            return await plane.begin_turn(key)
        found = await automatic.begin(plane, key, turn.trace, self._settings.turn_wait_s)
        if found is None:
            return None
        turn.key, turn.borrowed = found.begun.key, found.borrowed
        turn.before = found.before or turn.before
        return found.begun

    def _facts(self, turn: Turn, mode: PathMode, miss: str) -> TurnFacts:
        if turn.key is None:
            return TurnFacts(0, miss=miss, mode=mode)
        if turn.location is None:
            return TurnFacts(turn.prompt_tokens, miss=miss, mode=mode)
        prefill = [e for e in self._pool.prefill_engines(turn.model) if e.up]
        likely = self._prefill.likely(turn, prefill)
        holder = turn.holder
        return TurnFacts(
            turn.prompt_tokens,
            held_tokens=turn.location.token_count,
            history_changed=turn.history_changed,
            holder=Holder(True, holder.outstanding, holder.waiting, holder.ahead_tokens)
            if holder
            else Holder(False),
            prefill_available=bool(prefill),
            prefill_verifies=any(self._pool.verifies(e) for e in prefill),
            prefill_ahead_tokens=likely.ahead_tokens if likely else 0,
            local_tokens=self._prefill.local_tokens(turn, likely) if likely else 0,
            mode=mode,
            rates=self._rates.rates(likely.url if likely else None, holder.url if holder else None),
        )
