"""The engines a router knows: where from, in what state, and which one gets the next request."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence

import aiohttp
import structlog

from kvplane.client.model import Engine as RegisteredEngine
from kvplane.client.model import EngineId, EngineRole, Location
from kvplane.router.admission import OverloadedError
from kvplane.router.discovery import Found, Roles, merged
from kvplane.router.engine import Engine
from kvplane.router.health import Circuit, HealthLimits
from kvplane.router.keys import EngineKeys
from kvplane.router.lacking import Lacking
from kvplane.router.mistakes import no_common_model, refused_key, wrong_roles
from kvplane.router.probes import Prober
from kvplane.router.reach import Reach
from kvplane.router.resources import exhausted, told
from kvplane.router.settings import SettingsError, engine_url

log = structlog.get_logger("kvplane.router")

_SILENT_STREAM_S = 30.0
"""After so long without an answer to a probe, an engine is not coming back with the rest of its streams."""


_COME_BACK_S = 30.0
"""How long engines that answer have to come back to a control plane that has begun anew."""


class EnginePool:
    """Keeps the engines' state; `run` probes them until cancelled.

    `session` makes the probes, `monotonic` reads seconds, `chance` draws among engines. `on_free` is called
    when an engine may take another request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        probe_interval_s: float,
        monotonic: Callable[[], float],
        health: HealthLimits | None = None,
        max_engine_requests: int = 0,
        on_free: Callable[[], None] = lambda: None,
        chance: random.Random | None = None,
        keys: EngineKeys | None = None,
        reach: Reach | None = None,
    ) -> None:
        self._limits = health or HealthLimits()
        self._reach = reach or Reach()
        self._most = max_engine_requests
        self._on_free = on_free
        self._chance = chance or random.Random()
        self._monotonic = monotonic
        self._engines: dict[str, Engine] = {}
        self._leaving: set[Engine] = set()
        self._registered: list[RegisteredEngine] = []
        self._epochs: set[tuple[EngineId, int]] = set()
        self._anew_at = -math.inf
        """When the registry last had none of the registrations of before."""
        self._told: set[str] = set()
        self._lacking = Lacking(monotonic)
        self._refused: frozenset[str] = frozenset()
        self._prober = Prober(
            session,
            self._probed,
            keys=keys or EngineKeys(None),
            interval_s=probe_interval_s,
            monotonic=monotonic,
            on_up=on_free,
            on_down=self._went_down,
            on_models=self._warn,
        )
        self._choices = 0
        self._settled = False
        self._warned: frozenset[str] = frozenset()
        self._found: dict[str, Found] = {}
        self.found(
            "flags",
            merged(
                [
                    dict.fromkeys(prefill_urls, Roles(True, False)),
                    dict.fromkeys(decode_urls, Roles(False, True)),
                ]
            ),
        )

    def _add(self, url: str, *, prefill: bool, decode: bool, static: bool) -> Engine:
        engine = self._engines[url] = Engine(url, prefill, decode, static)
        if self._settled:
            # A newcomer has nothing to do, and would get everything at once.
            engine.health.came_back(self._monotonic())
        self._prober.wake()
        return engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines."""
        return tuple(self._engines.values())

    def found(self, source: str, engines: Found) -> None:
        """Take over the engines that a source (flags, DNS, Kubernetes) names at present, with their roles.

        Those it no longer names go, unless another source or the registry knows them. What runs on them
        goes on.
        """
        self._found[source] = engines
        named = merged(self._found.values())
        for url, roles in named.items():
            engine = self._engines.get(url) or self._add(url, prefill=False, decode=False, static=True)
            engine.static, engine.prefill, engine.decode = True, roles.prefill, roles.decode
        for engine in self.engines:
            if engine.static and engine.url not in named:
                engine.static = False
                if not engine.engine_ids:
                    self._remove(engine)
                    log.info("engine_left", engine=engine.url, source=source)
        self._on_free()

    def _remove(self, engine: Engine) -> None:
        # What runs on it may end well, or hang if it is dead: only its probes tell.
        del self._engines[engine.url]
        self._leaving.add(engine)

    def _probed(self) -> tuple[Engine, ...]:
        """Return the engines to probe: all, and those that left with requests of ours under way."""
        self._leaving = {engine for engine in self._leaving if engine.outstanding}
        return (*self.engines, *self._leaving)

    # What the control plane says

    @property
    def registered(self) -> tuple[RegisteredEngine, ...]:
        """The registry as it was last read."""
        return tuple(self._registered)

    def merge(self, registered: Sequence[RegisteredEngine]) -> None:
        """Take over the registry as it is now; engines only known from it go when they are gone there.

        A control plane that keeps its state in memory knows none when it has been started again. Those that
        answer and were not draining have a while, then, to come back to it.
        """
        epochs = {(entry.spec.engine_id, entry.engine_epoch) for entry in registered}
        if self._epochs and self._epochs.isdisjoint(epochs):
            self._anew_at = self._monotonic()
        self._epochs = epochs
        self._registered = list(registered)
        seen = self._placed(registered)
        for url, entries in seen.items():
            roles = {entry.spec.role for entry in entries}
            engine = self._engines.get(url) or self._add(url, prefill=False, decode=False, static=False)
            if not engine.static:
                engine.prefill = bool(roles & {EngineRole.PREFILL, EngineRole.BOTH})
                engine.decode = bool(roles & {EngineRole.DECODE, EngineRole.BOTH})
            engine.engine_ids = tuple(entry.spec.engine_id for entry in entries)
            engine.draining = all(entry.draining for entry in entries)
            engine.waiting = sum(entry.load.waiting_requests for entry in entries if entry.load is not None)
            if not engine.models:  # what it answers itself is more: adapters are not registered
                engine.models = frozenset(model for entry in entries for model in entry.spec.served_models)
        draining = {entry.spec.engine_id for entry in registered if entry.draining}
        ids = {entry.spec.engine_id for entry in registered}
        for engine in self.engines:
            if engine.url in seen:
                continue
            if not engine.static and self._has_left(engine, ids):
                self._remove(engine)
            engine.engine_ids, engine.waiting = (), 0
            engine.draining = engine.learned_id in draining
        self.misplaced()
        self._on_free()

    def _has_left(self, engine: Engine, ids: Collection[str]) -> bool:
        """Tell whether an engine that the registry lacks is to go; `ids` are those that it has."""
        if not engine.up or engine.draining or any(known in ids for known in engine.engine_ids):
            return True
        return self._monotonic() - self._anew_at >= _COME_BACK_S

    def _placed(self, registered: Sequence[RegisteredEngine]) -> dict[str, list[RegisteredEngine]]:
        """Return registered engines by where they say they are, without those that are not to be called."""
        seen: dict[str, list[RegisteredEngine]] = {}
        refused = set[str]()
        for entry in registered:
            if not entry.spec.endpoint:
                continue
            try:
                url = engine_url(entry.spec.endpoint)
                known = self._engines.get(url)
                why = None if known is not None and known.static else self._reach.refusal(url)
                problem = f"{url} {why}" if why is not None else ""
            except SettingsError as error:
                problem = str(error)
            if not problem:
                seen.setdefault(url, []).append(entry)
                continue
            refused.add(line := f"{entry.spec.engine_id}: {problem}")
            if line not in self._refused:
                log.warning("engine_endpoint_refused", engine_id=entry.spec.engine_id, problem=problem)
        self._refused = frozenset(refused)
        return seen

    @property
    def refused(self) -> list[str]:
        """A line for each engine whose registered endpoint is not called."""
        return sorted(self._refused)

    def misplaced(self) -> list[str]:
        """Return a line for each engine that is used in a role other than the one it registered."""
        lines = wrong_roles(self.engines, self._registered, self.engine_id)
        for line in lines:
            if line not in self._told:
                log.warning("engine_in_wrong_role", problem=line)
        self._told = set(lines)
        return lines

    def holder(self, location: Location) -> Engine | None:
        """Return the decode engine that holds a location. Only engines of the pool are ever talked to."""
        try:
            engine = self._engines.get(engine_url(location.endpoint)) if location.endpoint else None
        except SettingsError:
            engine = None
        if engine is not None and not engine.engine_ids:
            engine.learned_id = location.engine_id
        if engine is None:
            engine = next((e for e in self.engines if location.engine_id in e.engine_ids), None)
        return engine if engine is not None and engine.decode else None

    def engine_id(self, engine: Engine) -> str:
        """Return the registered id of an engine, "" if it is not known to be registered."""
        if engine.engine_ids:
            return engine.engine_ids[0]
        known = {entry.spec.engine_id for entry in self._registered}
        return engine.learned_id if engine.learned_id in known else ""

    def shares_endpoint(self, engine: Engine) -> bool:
        """Tell whether several ranks answer at an engine's URL."""
        return len(engine.engine_ids) > 1

    def verifies(self, engine: Engine) -> bool:
        """Tell whether a prefill engine checks what it is told to pull: only our connector does.

        Before its first answer an engine is trusted if it is registered, or if as many prefill engines as
        there are unknown ones are registered without saying where they are.
        """
        if engine.verifies is not None:
            return engine.verifies
        if engine.engine_ids:
            return True
        unplaced = [
            entry
            for entry in self._registered
            if not entry.spec.endpoint and entry.spec.role is not EngineRole.DECODE
        ]
        unknown = [e for e in self.engines if e.prefill and not e.engine_ids and e.verifies is None]
        return 0 < len(unknown) <= len(unplaced)

    # Choosing

    def prefill_engines(self, model: str = "") -> list[Engine]:
        """Return the prefill engines that may be asked for a model."""
        return self._fit((e for e in self.engines if e.prefill), model, strict=True)

    def only_model(self) -> str | None:
        """Return the model that all decode engines serve, None if there is none or more than one."""
        served = {model for engine in self.decode_engines() for model in engine.models}
        return served.pop() if len(served) == 1 else None

    def decode_engines(self, model: str = "") -> list[Engine]:
        """Return the decode engines to ask for a model; all if none serves it, so that one says so."""
        return self._fit((e for e in self.engines if e.decode), model, strict=False)

    async def decode_up(self, model: str, only: Engine | None = None) -> bool:
        """Tell whether a decode engine for a model is up, or `only` is; who has just failed is asked."""
        if only is None:
            for e in self._engines.values():  # there may be hundreds, and mostly the first one is
                if e.up and e.decode and not e.draining and (not e.models or model in e.models):
                    return True
        engines = self.decode_engines(model) if only is None else [only]
        if not any(e.up for e in engines):
            await self._prober.settle(engines)
        return any(e.up for e in engines)

    def may_serve(self, engines: Iterable[Engine], model: str) -> list[Engine]:
        """Return those of some engines that serve a model, or have not said that they do not."""
        return self._lacking.fit(engines, model)

    def lacks_model(self, engine: Engine, model: str) -> bool:
        """Note that an engine says it does not serve a model; tells whether another may.

        What it serves is asked anew if it was thought to.
        """
        if model in engine.models:
            log.warning("engine_lacks_model", engine=engine.url, model=model)
            engine.models, engine.models_at, engine.probe_at = frozenset(), 0.0, 0.0
            self._prober.wake()
        self._lacking.note(engine, model)
        others = (e for e in self.engines if e is not engine)
        return bool(model) and bool(self._fit(others, model, strict=True))

    def _fit(self, engines: Iterable[Engine], model: str, *, strict: bool) -> list[Engine]:
        candidates = [e for e in engines if not e.draining]
        if not model:
            return candidates
        fit = self._lacking.fit(candidates, model)
        known = [e for e in fit if e.models]
        if any(e.up for e in known):
            return known  # What others serve, they have not said.
        return fit if fit or strict else candidates

    def choose(
        self,
        engines: Sequence[Engine],
        *,
        exclude: Collection[Engine] = (),
        prefer: Engine | None = None,
        cost: Callable[[Engine], float] | None = None,
        draw_too: Engine | None = None,
    ) -> Engine | None:
        """Take the engine with the least load, in turn among equals.

        Load is what this router has sent it and not got back, over its weight in slow start. Where engines
        report requests that wait, which are of all routers and some time old, it is the better of two drawn
        at random: all routers going for the one that was idle a second ago would make it the busiest.

        An ejected engine gets one request to try it when that is due, and else, like one that is down, only
        what no other can take: an attempt costs less than a refusal. One without a place for more comes
        after all that have one. `prefer` wins while its load is at most two requests above the best.
        `cost` says what counts instead of the load; `draw_too` is among those drawn.
        """
        # There may be hundreds: what is done for each is little.
        left = [e for e in engines if e not in exclude] if exclude else engines
        up = [e for e in left if e.up]
        now = self._monotonic()
        candidates: Sequence[Engine] = up
        if any(e.health.opened for e in up):
            # One that has no place would have the request wait for it, whoever else is idle.
            due = next((e for e in up if e.health.trial_due(now) and self._has_place(e)), None)
            if due is not None:
                return self._took(due, now)
            candidates = [e for e in up if e.health.circuit(now) is Circuit.CLOSED]
        candidates = candidates or up or left
        if self._most:
            candidates = [e for e in candidates if e.outstanding < self._most] or candidates
        if not candidates:
            return None
        drawn = candidates
        if len(candidates) > 2 and any(e.waiting for e in candidates):
            drawn = self._chance.sample(candidates, 2)
            if draw_too in candidates and draw_too is not None:
                drawn.append(draw_too)
        if cost is not None:
            limits = self._limits
            key = [(cost(e) / e.health.weight(now, limits), e.outstanding, e.chosen_at) for e in drawn]
            return self._took(drawn[key.index(min(key))], now)
        loads = [self._load(e, now) for e in drawn]
        least = min(loads)
        best = min(
            [e for e, load in zip(drawn, loads, strict=True) if load == least], key=lambda e: e.chosen_at
        )
        if (
            prefer is not None
            and prefer in candidates
            and self._load(prefer, now) <= self._load(best, now) + 2
        ):
            best = prefer
        return self._took(best, now)

    def _has_place(self, engine: Engine) -> bool:
        return not self._most or engine.outstanding < self._most

    def _load(self, engine: Engine, now: float) -> float:
        return (engine.outstanding + engine.waiting + 1) / engine.health.weight(now, self._limits)

    def _took(self, engine: Engine, now: float) -> Engine:
        engine.health.taken(now, self._limits)
        self._choices += 1
        engine.chosen_at = self._choices
        return engine

    # Requests

    def begin(self, engine: Engine) -> None:
        """Count a request that goes to an engine; `end` takes it back."""
        engine.outstanding += 1

    def end(self, engine: Engine) -> None:
        """Note that an engine is done with a request, however it ended."""
        engine.outstanding -= 1
        self._on_free()

    def ejected(self, engine: Engine) -> bool:
        """Tell whether an engine's answers have taken it out of rotation."""
        return engine.health.circuit(self._monotonic()) is not Circuit.CLOSED

    def answered(self, engine: Engine) -> None:
        """Note that an engine did what it was asked, or began to."""
        if engine.health.succeeded(self._monotonic(), self._limits):
            log.info("engine_readmitted", engine=engine.url)
            self._on_free()

    def untold(self, engine: Engine) -> None:
        """Note that an answer does not tell whether an engine is well: if it was to, the next one shall."""
        engine.health.untold()

    def erred(self, engine: Engine, problem: str) -> None:
        """Note that an engine answered a request with an error of its own, or not at all."""
        if not engine.up:
            return
        pools = [
            [
                e.health
                for e in self.engines
                if e is not engine and e.up and getattr(e, role) and e.serves_like(engine)
            ]
            for role in ("prefill", "decode")
            if getattr(engine, role)
        ]
        why = engine.health.failed(self._monotonic(), self._limits, pools)
        if why:
            log.warning("engine_ejected", engine=engine.url, reason=why, problem=problem)

    # Health

    def failed(self, engine: Engine, problem: str) -> None:
        """Take an engine out of rotation at once; a probe, due at once, brings it back."""
        if engine.up:
            log.warning("engine_went_down", engine=engine.url, problem=problem)
            engine.down_since = self._monotonic()
        engine.up = False
        engine.verifies = None
        engine.probe_at = 0.0
        self._prober.wake()
        self._on_free()

    def unreachable(self, engine: Engine, error: Exception) -> None:
        """Take an engine that could not be connected to out of rotation.

        Raises OverloadedError where that is not its fault, but for want of what the router has run out of.
        """
        if exhausted(error):
            why = getattr(error, "strerror", None) or "connections"
            message = f"The router has run out of resources ({why}); try again later."
            raise OverloadedError(message, 503, 1) from error
        self.failed(engine, told(error))

    async def run(self) -> None:
        """Probe until cancelled."""
        await self._prober.run()

    async def probe_all(self) -> None:
        """Probe every engine once, now. Those that come later are newcomers, and begin slowly."""
        await asyncio.gather(*(self._prober.probe(engine) for engine in self.engines))
        self._settled = True

    def _went_down(self, engine: Engine) -> None:
        """Have requests that wait for a silent engine try another one, if there is one.

        Streams that it has begun are given up when it has been down for long.
        """
        others = [other for other in self.engines if other is not engine and other.up]
        if any(other.decode if engine.decode else other.prefill or other.decode for other in others):
            engine.leave_waits(asyncio.get_running_loop().time())
        if engine.streams and self._monotonic() - engine.down_since >= _SILENT_STREAM_S:
            log.error("streams_given_up", engine=engine.url, streams=len(engine.streams))
            engine.cut_streams()

    def refused_keys(self) -> list[str]:
        """Return a line for each engine that does not say what it serves since it wants an API key."""
        return [line for engine in self.engines if engine.up and (line := refused_key(engine)) is not None]

    def mismatch(self) -> str | None:
        """Return what is wrong if prefill and decode engines serve no model in common."""
        return no_common_model(self.engines)

    def _warn(self) -> None:
        problem = self.mismatch()
        seen = frozenset({problem}) if problem else frozenset[str]()
        if problem and seen != self._warned:
            log.warning("engines_serve_different_models", problem=problem)
        self._warned = seen
