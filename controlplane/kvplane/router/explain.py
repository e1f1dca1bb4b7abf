"""What was decided for each request, why, and what came of it: kept for a while, by request id."""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from kvplane.client.logs import hashed
from kvplane.router import openai
from kvplane.router.admission import TENANT
from kvplane.router.policy import Decision, Rates, TurnFacts
from kvplane.router.tenancy.caller import caller_of
from kvplane.tracing.context import Within

if TYPE_CHECKING:
    from kvplane.client.model import ConversationKey
    from kvplane.router.engine import Engine
    from kvplane.router.pool import EnginePool
    from kvplane.router.turn import Turn

_PREFIX = "/debug/turns/"
_HOST = re.compile(r"(?:\[([^]]+)]|([^:]+))(?::[0-9]*)?")
_MODEL_CHARACTERS = 256
_MOST_CANDIDATES = 16
"""Engines on record per request and role: those of a large fleet say no more."""
_OUTCOMES = {
    "RefusedError": "refused",
    "NeverSentError": "never_sent",
    "LegFailedError": "failed",
    "LegTimeoutError": "timed_out",
    "CancelledError": "cancelled",
}


class Attempt:
    """One leg on one engine. A context manager around it."""

    __slots__ = (
        "_monotonic",
        "_within",
        "at",
        "engine",
        "first_byte_s",
        "leg",
        "outcome",
        "problem",
        "seconds",
    )

    def __init__(self, leg: str, engine: str, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.leg = leg
        self.engine = engine
        self.at = monotonic()
        self.first_byte_s: float | None = None
        self.seconds: float | None = None
        self.outcome = "running"
        self.problem = ""
        self._within = Within(leg, engine=engine)

    def __enter__(self) -> Self:
        self._within.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = self._monotonic() - self.at
        self._within.__exit__(kind, error, trace)
        if kind is not None:
            self.outcome = _OUTCOMES.get(kind.__name__, "broke")
            self.problem = str(getattr(error, "problem", ""))
        elif self.outcome == "running":
            self.outcome = "ok"


class Trail:
    """What happens to one request. Cheap to write; made readable when somebody asks.

    `arrived` and `monotonic` are readings of one clock, in seconds.
    """

    __slots__ = (
        "_monotonic",
        "api",
        "arrived",
        "attempts",
        "candidates",
        "decided_at",
        "decision",
        "ended_at",
        "facts",
        "identity",
        "key",
        "model",
        "path",
        "reason",
        "request_id",
        "reused_tokens",
        "status",
        "turn",
        "turn_number",
    )

    def __init__(self, request_id: str, api: str, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.request_id = request_id
        self.api = api
        self.arrived = monotonic()
        self.attempts: list[Attempt] = []
        self.candidates: list[tuple[Any, ...]] = []
        self.decided_at: float | None = None
        self.decision: Decision | None = None
        self.ended_at: float | None = None
        self.facts: TurnFacts | None = None
        self.key: ConversationKey | None = None
        self.model = self.path = self.reason = self.identity = ""
        self.reused_tokens: int | None = None
        self.status = 0
        self.turn = self.turn_number = 0

    def decided(self, turn: Turn, facts: TurnFacts, pool: EnginePool) -> None:
        """Note a decision, what it was based on, and the engines there were to choose from."""
        self.decided_at = self._monotonic()
        self.decision, self.facts, self.key = turn.decision, facts, turn.key
        self.turn, self.turn_number = turn.turn_index, turn.number
        self.path, self.reason = str(turn.path), turn.reason
        # A client may send a name of any length, and this is kept.
        self.model = turn.model[:_MODEL_CHARACTERS]
        self.identity = turn.identity
        roles = (("prefill", pool.prefill_engines(turn.model)), ("decode", pool.decode_engines(turn.model)))
        self.candidates = [
            (role, e.url, e.outstanding, e.waiting, e.ahead_tokens, _state(e, pool), e is turn.holder)
            for role, engines in roles
            for e in engines[:_MOST_CANDIDATES]
        ]

    def attempt(self, leg: str, engine: Engine) -> Attempt:
        """Note that a leg begins; returns the context manager to run it in."""
        attempt = Attempt(leg, engine.url, self._monotonic)
        self.attempts.append(attempt)
        return attempt

    def first_byte(self) -> None:
        """Note that the running leg's answer begins."""
        if self.attempts:
            self.attempts[-1].first_byte_s = self._monotonic() - self.attempts[-1].at

    def cut(self, problem: str) -> None:
        """Note that the answer was cut short."""
        if self.attempts:
            self.attempts[-1].outcome, self.attempts[-1].problem = "cut", problem

    def ended(self, turn: Turn, status: int) -> None:
        """Note how the request was answered; 499 if its client went away."""
        self.ended_at = self._monotonic()
        self.status, self.path, self.reason = status, str(turn.path), turn.reason
        self.reused_tokens = turn.reused_tokens

    def told(self) -> dict[str, Any]:
        """Return it all as JSON values. Conversations are hashed, tenants left out."""
        now = self._monotonic()
        decision, facts, key = self.decision, self.facts, self.key
        estimated = facts is not None and facts.prompt_tokens > 0
        return {
            "request_id": self.request_id,
            "state": "running" if self.ended_at is None else "answered",
            "age_s": round(now - self.arrived, 3),
            "api": self.api,
            "model": self.model,
            "conversation": hashed(key.tenant_id, key.conversation_id) if key is not None else None,
            "identity": self.identity or None,
            "turn": self.turn,
            "turn_number": self.turn_number,
            "path": self.path,
            "reason": self.reason,
            "status": self.status,
            "tokens": {
                "prompt_estimated": facts.prompt_tokens if estimated and facts is not None else None,
                "held": facts.held_tokens if facts is not None else None,
                "new_expected": decision.new_tokens if estimated and decision is not None else None,
                "reuse_expected": decision.reused_tokens if decision is not None else None,
                "reused": self.reused_tokens,
            },
            "decision": None if decision is None or facts is None else _decision(decision, facts),
            "candidates": [
                {
                    "role": role,
                    "engine": url,
                    "outstanding": outstanding,
                    "waiting": waiting,
                    "ahead_tokens": ahead,
                    "state": state,
                    "holder": holder,
                }
                for role, url, outstanding, waiting, ahead, state, holder in self.candidates
            ],
            "attempts": [
                {
                    "leg": attempt.leg,
                    "engine": attempt.engine,
                    "began_ms": _ms(attempt.at - self.arrived),
                    "first_byte_ms": _ms(attempt.first_byte_s),
                    "took_ms": _ms(attempt.seconds),
                    "outcome": attempt.outcome,
                    "problem": attempt.problem,
                }
                for attempt in self.attempts
            ],
            "timings_ms": {
                "decided": _ms(None if self.decided_at is None else self.decided_at - self.arrived),
                "total": _ms(None if self.ended_at is None else self.ended_at - self.arrived),
            },
        }


def _decision(decision: Decision, facts: TurnFacts) -> dict[str, Any]:
    rates: Rates = facts.rates
    return {
        "path": str(decision.path),
        "reason": decision.reason,
        "mode": str(facts.mode),
        "costs_s": {str(path): round(cost, 4) for path, cost in decision.costs},
        "history_changed": facts.history_changed,
        "holder_usable": facts.holder.usable,
        "prefill_local_tokens": facts.local_tokens,
        "rates_tokens_per_s": {
            name: None if rate is None else round(rate)
            for name, rate in (
                ("prefill", rates.prefill),
                ("decode_prefill", rates.decode_prefill),
                ("transfer", rates.transfer),
                ("receive", rates.receive),
            )
        },
    }


def _state(engine: Engine, pool: EnginePool) -> str:
    return "down" if not engine.up else "ejected" if pool.ejected(engine) else "up"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class Explanations:
    """The trails of the last requests, and where they are read: `GET /debug/turns/{request_id}`.

    At most `capacity` of them; a request id that comes again replaces what was there. Only loopback may
    read, unless `remote`: the addresses of engines are in them.
    """

    def __init__(self, capacity: int, monotonic: Callable[[], float], *, remote: bool = False) -> None:
        self._capacity = capacity
        self._monotonic = monotonic
        self._remote = remote
        self._trails: OrderedDict[tuple[str, str], Trail] = OrderedDict()
        """By tenant and request id: a tenant's ids are its own."""

    def begin(self, request_id: str, api: str, tenant: str = "") -> Trail:
        """Return the trail of a request that has arrived."""
        trail = Trail(request_id, api, self._monotonic)
        if self._capacity:
            self._trails.pop((tenant, request_id), None)
            self._trails[tenant, request_id] = trail
            while len(self._trails) > self._capacity:
                self._trails.popitem(last=False)
        return trail

    def find(self, request_id: str, tenant: str = "") -> Trail | None:
        """Return the trail of a tenant's request, None if it is not on record."""
        return self._trails.get((tenant, request_id))

    def _find_any(self, request_id: str) -> Trail | None:
        """Return the latest trail under a request's id, whoever's it is."""
        return next((self._trails[key] for key in reversed(self._trails) if key[1] == request_id), None)

    def newest(self) -> Iterator[Trail]:
        """Return the trails on record, that of the request which arrived last first."""
        return reversed(self._trails.values())

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to who may not read what is on record; None to who may."""
        caller = caller_of()
        if self._remote or _from_here(request) or (caller is not None and caller.operator):
            return None
        message = "Only loopback may read this; --debug-remote of the router opens it to others."
        return _json(openai.error_body(message, 403), 403)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get(_PREFIX + "{request_id:[^/]+}", self._get)

    async def _get(self, request: web.Request) -> web.Response:
        if (refusal := self.refusal(request)) is not None:
            return refusal
        caller, request_id = caller_of(), request.match_info["request_id"]
        operator = caller is not None and caller.operator
        trail = self._find_any(request_id) if operator else self.find(request_id, TENANT.get())
        if trail is None:
            return _json(
                openai.error_body(
                    f"Request {request.match_info['request_id']} is not on record here: this router process"
                    f" has not served it, or more than {self._capacity} since.",
                    404,
                ),
                404,
            )
        return _json(openai.dump(trail.told()), 200)


def _from_here(request: web.Request) -> bool:
    """Tell whether the client is on this host, and not one that a proxy on this host speaks for."""
    if "forwarded" in request.headers or "x-forwarded-for" in request.headers:
        return False
    # A page from elsewhere can have its own name lead a browser here, and then read what it is answered.
    return _is_loopback(request.remote or "") and _is_here(request.headers.get("Host", ""))


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_here(said: str) -> bool:
    """Tell whether a Host header has an address, or a name that is every host's own; or is not there."""
    found = _HOST.fullmatch(said)
    if found is None:
        return not said
    host = (found[1] or found[2]).lower().rstrip(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return True


def _json(body: bytes, status: int) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
