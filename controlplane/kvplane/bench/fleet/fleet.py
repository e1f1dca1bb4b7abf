"""A fleet in simulated time: engines, routers, control planes, clients, and what happens to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvplane.bench.fleet.decode import DecodeEngine, Keeping
from kvplane.bench.fleet.engines import MODEL, SimulatedEngine, Speeds, World
from kvplane.bench.fleet.history import History
from kvplane.bench.fleet.oracle import Oracle
from kvplane.bench.fleet.planes import CountingStore, Planes
from kvplane.bench.fleet.prefill import PrefillEngine, Prompt
from kvplane.bench.fleet.recorder import Recorder, Sample
from kvplane.bench.fleet.routing import Answer, Ending, Request, SimulatedRouter
from kvplane.bench.fleet.scenario import Happening
from kvplane.bench.fleet.simulation import Simulation
from kvplane.bench.fleet.workload import Conversation, Step, Workload
from kvplane.client.model import ConversationKey
from kvplane.controlplane import model as m
from kvplane.controlplane.quotas import TenantLimits
from kvplane.router.policy import PathMode, Thresholds

_ATTEMPTS = 4
"""Of a client, before it gives a turn up."""
_AGAIN_S = 1.0
_CHARACTERS_PER_TOKEN = 4
_WATCH_S = 0.01
"""How late replicas learn of what others wrote."""
_NETWORKS = {"prefill": 1, "decode": 2}
_WEIGH_EVERY = 10
"""Samples for each whose records are weighed: that takes its time."""
_ENTRY_BYTES = 200
"""What a record takes besides itself: its places in dictionaries, in the order of keys, and in a heap."""
_LATEST_S = 7200.0
"""The longest a run goes on after the last conversation began."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is simulated. Blocks are per engine."""

    prefill: int = 2
    decode: int = 4
    routers: int = 2
    replicas: int = 1
    prefill_blocks: int = 8192
    decode_blocks: int = 8192
    block_tokens: int = 64
    workload: Workload = field(default_factory=Workload)
    steps: tuple[tuple[Step, ...], ...] = ()
    """Conversations to draw from, instead of made ones."""
    speeds: Speeds = field(default_factory=Speeds)
    keeping: Keeping = field(default_factory=Keeping)
    settings: m.Settings = field(default_factory=m.Settings)
    limits: TenantLimits | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    path: PathMode = PathMode.AUTO
    events: tuple[Happening, ...] = ()
    report_s: float = 1.0
    """How often an engine tells its load: as the connector does."""
    without_plane: bool = False
    """Nothing is retained and known of: what it is compared with."""


class Fleet:
    """Runs a plan, once. `told` is called with the conversations that ended since the last call."""

    def __init__(self, plan: Plan, told: Callable[[int], None] = lambda _: None) -> None:
        self.plan = plan
        self._told = told
        self.simulation = Simulation(quantum_s=_WATCH_S if plan.replicas > 1 else 0.0)
        self.oracle = Oracle()
        self.recorder = Recorder()
        self.planes: Planes | None = None
        if not plan.without_plane:
            self.planes = Planes(
                self.simulation, replicas=plan.replicas, settings=plan.settings, limits=plan.limits
            )
        self._world = World(
            self.simulation,
            self.planes,
            plan.settings,
            self.oracle,
            plan.speeds,
            plan.block_tokens,
            plan.report_s,
        )
        self.engines: dict[str, SimulatedEngine] = {}
        self._made = {"prefill": 0, "decode": 0}
        self._random = Random(plan.workload.seed + 1)
        self._routers: list[SimulatedRouter] = []
        self._conversations: Iterator[Conversation] = iter(())
        self._left = plan.workload.conversations
        self._bases = plan.workload.tenants
        self._last = (0.0, 0, 0, 0, 0.0)

    async def run(self) -> None:
        """Run until all conversations are over."""
        plan, simulation = self.plan, self.simulation
        if self.planes is not None:
            await self.planes.start()
        try:
            for role in ("prefill", "decode"):
                for _ in range(getattr(plan, role)):
                    self._add(role).start(beat_after=self._random.random() * plan.report_s)
            for number in range(plan.routers):
                router = SimulatedRouter(
                    simulation,
                    self.planes,
                    self.engines,
                    self.oracle,
                    name=f"router-{number}",
                    seed=plan.workload.seed * 1000 + number,
                    mode=plan.path,
                    thresholds=plan.thresholds,
                )
                self._routers.append(router)
                await router.start(first=0.5 + number * 0.01)
            self._conversations = plan.workload.all(plan.steps)
            # Engines have registered by then, and routers know of them.
            simulation.at(2.0, self._next)
            for happening in plan.events:
                simulation.at(2.0 + happening.at, partial(self._happen, happening))
            span_s = plan.workload.hours * 3600
            simulation.every(max(1.0, span_s / 200), self._sample, first=2.0)
            await simulation.run(lambda: not self._left, horizon_s=span_s + _LATEST_S)
            self._sample()
        finally:
            if self.planes is not None:
                await self.planes.aclose()

    # Engines.

    def _add(self, role: str) -> SimulatedEngine:
        number = self._made[role]
        self._made[role] += 1
        url = f"http://10.{_NETWORKS[role]}.{number // 250}.{number % 250 + 1}:8000"
        name = f"{role[0]}{number}"
        engine: SimulatedEngine
        if role == "prefill":
            engine = PrefillEngine(self._world, name, url, self.plan.prefill_blocks)
        else:
            keeping = self.plan.keeping
            engine = DecodeEngine(self._world, name, url, self.plan.decode_blocks, keeping)
        self.engines[url] = engine
        return engine

    def of(self, role: str) -> list[SimulatedEngine]:
        """Return the engines of a role that live."""
        kind = PrefillEngine if role == "prefill" else DecodeEngine
        return [engine for engine in self.engines.values() if isinstance(engine, kind) and engine.alive]

    # Clients.

    def _next(self) -> None:
        """Begin the next conversation, and have the one after it begin in its time."""
        conversation = next(self._conversations, None)
        if conversation is None:
            return
        self.simulation.at(2.0 + conversation.arrival_s, lambda: self._begin(conversation))

    def _begin(self, conversation: Conversation) -> None:
        self._next()
        self.simulation.start(self._live(conversation))

    async def _live(self, conversation: Conversation) -> None:
        """Ask turn after turn, as a client does."""
        workload, simulation, recorder = self.plan.workload, self.simulation, self.recorder
        number, tenant = conversation.number, conversation.tenant
        history = History(tenant + 1, workload.system_tokens(tenant), self._base())
        router = self._routers[number % len(self._routers)]
        key = ConversationKey(f"tenant-{tenant}", MODEL, f"c{number}")
        parts: tuple[tuple[int, int], ...] = ((tenant, history.tokens * _CHARACTERS_PER_TOKEN),)
        last_reply = 0
        for place, step in enumerate(conversation.steps):
            if step.pause_s:
                await simulation.sleep(step.pause_s)
            if step.changed:
                base = self._base()
                history.change(history.tokens - last_reply, base)
                parts = (*parts[:-1], (base, parts[-1][1]))
            history.tokens += step.new_tokens
            parts = (*parts, (place, step.new_tokens * _CHARACTERS_PER_TOKEN))
            prompt = Prompt(number, history.stretches, history.tokens)
            request = Request(key, prompt, parts, step.reply_tokens, step.calls_tools)
            recorder.begun += 1
            began = simulation.now
            answer = await self._ask(router, request)
            if answer is None:
                recorder.given_up += 1
                break
            ttft_s = simulation.now - began if answer.ttft_s is None else answer.ttft_s
            recorder.turn(answer, is_first=not place, prompt_tokens=history.tokens, ttft_s=ttft_s)
            history.tokens += step.reply_tokens
            last_reply = step.reply_tokens
            parts = (*parts, (place, step.reply_tokens * _CHARACTERS_PER_TOKEN))
        if conversation.ends:
            router.end(key)
        self._left -= 1
        self._told(1)

    async def _ask(self, router: SimulatedRouter, request: Request) -> Answer | None:
        """Return the answer, of a later attempt if need be: then its time counts from the first."""
        began = self.simulation.now
        for attempt in range(_ATTEMPTS):
            if attempt:
                await self.simulation.sleep(_AGAIN_S * 2 ** (attempt - 1))
            waited = self.simulation.now - began
            answer = await router.serve(request)
            self.recorder.request(answer)
            if answer.ending is Ending.ANSWERED:
                if answer.ttft_s is not None:
                    answer.ttft_s += waited
                return answer
        return None

    def _base(self) -> int:
        self._bases += 1
        return self._bases

    # What happens.

    def _happen(self, event: Happening) -> None:
        if event.do == "stop-plane":
            self.simulation.start(self._stop_plane(event))
        elif event.do == "scale-up":
            for _ in range(event.count):
                self._add(event.role).start(beat_after=self._random.random() * self.plan.report_s)
        else:
            engines = [engine for engine in self.of(event.role) if not engine.draining]
            count = min(event.count or len(engines), len(engines))
            if event.do == "kill":
                for engine in self._random.sample(engines, count):
                    self._kill(engine, event.down)
            elif event.do == "scale-down":
                for engine in engines[len(engines) - count :]:
                    self.simulation.start(self._leave(engine, event.drain, None))
            else:
                self.simulation.start(self._roll(engines[:count], event))

    async def _stop_plane(self, event: Happening) -> None:
        if self.planes is None:
            return
        await self.planes.stop_replica(event.replica)
        if event.down:
            await self.simulation.sleep(event.down)
            self.planes.start_replica(event.replica)

    def _kill(self, engine: SimulatedEngine, down_s: float) -> None:
        engine.kill()
        if down_s:
            self.simulation.after(down_s, engine.start)

    async def _roll(self, engines: Sequence[SimulatedEngine], event: Happening) -> None:
        for engine in engines:
            self.simulation.start(self._leave(engine, event.drain, event.down))
            await self.simulation.sleep(event.every)

    async def _leave(self, engine: SimulatedEngine, drain_s: float, down_s: float | None) -> None:
        """Drain an engine, end it, and have it come back after `down_s`, if that is given."""
        if not engine.alive:
            return
        engine.draining, process = True, engine.process
        if self.planes is not None and engine.epoch:
            await self.planes.measured("drain", self.planes.choose().plane.engines.drain(engine.name))
        ends = self.simulation.now + drain_s
        await self.simulation.sleep(min(5.0, drain_s))
        while self.simulation.now < ends and engine.busy and engine.alive:
            await self.simulation.sleep(1.0)
        if not engine.alive or engine.process != process:
            return
        session = engine.session
        engine.alive = False  # its connections end; what runs is broken off
        await session.leave()
        engine.alive = True
        engine.kill()
        if down_s is None:
            del self.engines[engine.url]
        else:
            self.simulation.after(down_s, engine.start)

    # Samples.

    def _sample(self) -> None:
        now, planes = self.simulation.now, self.planes
        decoders = [engine for engine in self.of("decode") if isinstance(engine, DecodeEngine)]
        prefillers = [engine for engine in self.of("prefill") if isinstance(engine, PrefillEngine)]
        total = sum(engine.total_blocks for engine in decoders) or 1
        retained = sum(engine.keeper.retention.held_blocks for engine in decoders)
        free = sum(engine.pool.free for engine in decoders)
        sample = Sample(
            now,
            retained_share=retained / total,
            retained_conversations=sum(len(engine.keeper.retention) for engine in decoders),
            used_share=max(0.0, (total - free - retained) / total),
            running=sum(engine.running for engine in decoders),
            waiting=sum(engine.waiting for engine in decoders),
            prefill_engines=len(prefillers),
            decode_engines=len(decoders),
        )
        before, operations, transactions, written, busy = self._last
        span = now - before
        busy_s = sum(e.busy_s for e in self.engines.values() if isinstance(e, PrefillEngine))
        counts = (0, 0, 0)
        if planes is not None:
            stores = planes.stores()
            counts = (
                sum(planes.operations.values()),
                sum(store.transactions for store in stores),
                sum(store.written_bytes for store in stores),
            )
            before_this = self.recorder.samples[-1] if self.recorder.samples else sample
            sample.records, sample.record_bytes = len(planes.store), before_this.record_bytes
            if not len(self.recorder.samples) % _WEIGH_EVERY:
                sample.record_bytes = _weight(planes.store)
        if span > 0:
            sample.operations_per_s = (counts[0] - operations) / span
            sample.transactions_per_s = (counts[1] - transactions) / span
            sample.written_bytes_per_s = (counts[2] - written) / span
            sample.prefill_busy = (busy_s - busy) / span / max(1, len(prefillers))
        self._last = (now, *counts, busy_s)
        self.recorder.sample(sample)


def _weight(store: CountingStore) -> int:
    """Return about how many bytes of memory a replica's records take. O(records)."""
    return sum(
        sys.getsizeof(item) + sys.getsizeof(item.key) + sys.getsizeof(item.value) + _ENTRY_BYTES
        for item in store.records()
    )
