"""Routers side by side: what each adds to the first token, how many requests it carries, and at what cost."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from kvplane.bench.figures import Of, Row, Target, percentile
from kvplane.bench.process import cores, pin
from kvplane.bench.rig import BenchError
from kvplane.bench.routing import mock, systems
from kvplane.bench.routing.load import Outcome, Request, chat_request, close_all, hold, load
from kvplane.bench.routing.systems import Running, System

DIRECT = "direct"
"""The decode engine itself, without any router."""
EVENTS = 64
"""Events of a stream."""
IN_FLIGHT = 32
GAP_S = 0.005
_WARM_UP_S = 0.5
_HELD_GAP_S = 600.0
_WORKERS = 2
_WORKERS_IN_FLIGHT = 128
"""Connections are dealt to workers by chance, which evens out over many."""
BENCHES = ("first-token", "rate", "gaps", "memory", "workers")
"""What there is to measure."""
_MESSAGES = 12
_WORDS = 40


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How to measure. Each stretch takes `seconds` and is done `rounds` times, in turn with the others.

    `streams` are held open at once for the memory's figure.
    """

    seconds: float = 3.0
    rounds: int = 5
    streams: int = 1000
    peers: tuple[System, ...] = ()
    progress: Callable[[str], None] = field(default=lambda text: None)


def request_for(port: int) -> Request:
    """Return the requests of a load: a chat of some messages, each of another conversation."""
    run = uuid.uuid4().hex[:12]
    messages = [
        {
            "role": ("user", "assistant")[number % 2],
            "content": " ".join(f"word{number * _WORDS + n}" for n in range(_WORDS)),
        }
        for number in range(_MESSAGES)
    ]
    body = json.dumps({"model": mock.MODEL, "stream": True, "max_tokens": 64, "messages": messages}).encode()
    return lambda number: chat_request(port, body, {"x-conversation-id": f"bench-{run}-{number}"})


@dataclass(slots=True)
class _Subject:
    """A system under measurement; without a process it is the decode engine itself."""

    name: str
    port: int
    process: Running | None
    request: Request
    sent: int = 0

    async def run(self, in_flight: int, seconds: float) -> tuple[Outcome, float]:
        """Put a load on it; returns the outcome and the CPU seconds it took. Raises BenchError."""
        before = await self.process.cpu_s() if self.process is not None else 0.0
        outcome = await load(self.port, self.request, in_flight=in_flight, seconds=seconds, first=self.sent)
        self.sent += outcome.done + len(outcome.failures)
        if outcome.failures or not outcome.done:
            said = outcome.failures[0] if outcome.failures else "no answer"
            raise BenchError(f"{self.name}: {len(outcome.failures)} requests failed, the first: {said}")
        after = await self.process.cpu_s() if self.process is not None else 0.0
        return outcome, after - before


@dataclass(slots=True)
class _Series:
    """One figure per round of each system."""

    by_system: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.by_system.setdefault(name, []).append(value)

    def rows(
        self, bench: str, case: str, unit: str, *, target: Target | None = None, against: str = ""
    ) -> list[Row]:
        """Return a row per system; targets are for ours, and it all is against one system, if it is there."""
        base = tuple(self.by_system.get(against, ()))
        return [
            Row(
                bench,
                f"{name}: {case}",
                unit,
                tuple(values),
                base if name != against else (),
                target if name in (systems.OURS, systems.TOGETHER) else None,
            )
            for name, values in self.by_system.items()
        ]


async def run(names: Sequence[str], options: RoutingOptions) -> list[Row]:
    """Measure what is named, of BENCHES. Raises BenchError."""
    available = cores()
    router_cores, load_cores = (available[:1], available[1:2]) if len(available) > 1 else ((), ())
    pin(*load_cores)
    rows = list[Row]()
    try:
        async with AsyncExitStack() as stack:
            port = systems.free_port()
            serve = [*systems.KVPLANE, "serve", "--grpc-port", str(port)]
            await stack.enter_async_context(systems.process("control plane", serve, port, load_cores))
            rig = _Rig(options, f"127.0.0.1:{port}", tuple(router_cores), tuple(load_cores))
            if "first-token" in names or "rate" in names:
                rows += await rig.without_gaps(names)
            if "gaps" in names:
                rows += await rig.with_gaps()
            if "memory" in names:
                rows += await rig.memory()
            if "workers" in names:
                rows += await rig.workers()
    finally:
        pin(*available)
    return rows


class _Rig:
    """Starts mocks and systems for one kind of measurement after the other."""

    def __init__(
        self, options: RoutingOptions, plane: str, router_cores: tuple[int, ...], load_cores: tuple[int, ...]
    ) -> None:
        self._options = options
        self._systems = (systems.kvplane(plane), systems.together(), systems.BARE_PROXY, *options.peers)
        self._plane = plane
        self._router_cores = router_cores
        self._load_cores = load_cores

    async def _started(
        self, stack: AsyncExitStack, script: mock.Script, which: Sequence[System], on: Sequence[int]
    ) -> list[_Subject]:
        engines = await stack.enter_async_context(mock.running(script, *self._load_cores))
        direct = request_for(engines.decode_port)
        subjects = [_Subject(DIRECT, engines.decode_port, None, direct)]
        for system in which:
            self._options.progress(f"starting {system.name}")
            running = await stack.enter_async_context(systems.running(system, engines, on))
            subjects.append(_Subject(system.name, running.port, running, request_for(running.port)))
        return subjects

    async def _warm(self, subjects: Sequence[_Subject]) -> None:
        for subject in subjects:
            await subject.run(4, _WARM_UP_S)

    async def without_gaps(self, names: Sequence[str]) -> list[Row]:
        """Measure the first token with one request at a time, and the rate and its cost with many."""
        options, first, slow, rate, cost = self._options, _Series(), _Series(), _Series(), _Series()
        async with AsyncExitStack() as stack:
            subjects = await self._started(stack, mock.Script(EVENTS), self._systems, self._router_cores)
            await self._warm(subjects)
            for number in range(options.rounds):
                for subject in subjects:
                    options.progress(f"round {number + 1} of {options.rounds}: {subject.name}")
                    if "first-token" in names:
                        outcome, _ = await subject.run(1, options.seconds)
                        first.add(subject.name, percentile(outcome.first_byte_s, 0.5) * 1000)
                        slow.add(subject.name, percentile(outcome.first_byte_s, 0.99) * 1000)
                    if "rate" in names:
                        outcome, cpu_s = await subject.run(IN_FLIGHT, options.seconds)
                        rate.add(subject.name, outcome.rate)
                        if subject.process is not None:
                            cost.add(subject.name, cpu_s / outcome.done * 1000)
        added = Target(0.6, at_most=True, of=Of.DIFFERENCE)
        return [
            *first.rows("first-token", "p50, 1 at a time", "ms", target=added, against=DIRECT),
            *slow.rows("first-token", "p99, 1 at a time", "ms", against=DIRECT),
            *rate.rows("rate", f"{IN_FLIGHT} at once, no gaps", "/s", against=systems.BARE),
            *cost.rows(
                "rate", "CPU per 1,000 requests", "s", target=Target(1.0, at_most=True), against=systems.BARE
            ),
        ]

    async def with_gaps(self) -> list[Row]:
        """Measure the CPU of streams that trickle, as real ones do."""
        options, cost, per_event = self._options, _Series(), _Series()
        async with AsyncExitStack() as stack:
            script = mock.Script(EVENTS, GAP_S)
            subjects = (await self._started(stack, script, self._systems, self._router_cores))[1:]
            await self._warm(subjects)
            for number in range(options.rounds):
                for subject in subjects:
                    options.progress(f"gaps: round {number + 1} of {options.rounds}: {subject.name}")
                    outcome, cpu_s = await subject.run(IN_FLIGHT, options.seconds)
                    cost.add(subject.name, cpu_s / outcome.done * 1000)
                    per_event.add(subject.name, cpu_s / outcome.done / EVENTS * 1000 * 1000)
        bound = Target(2.8, at_most=True)
        case = f"CPU per 1,000 requests, {GAP_S * 1000:g} ms gaps"
        return [
            *cost.rows("gaps", case, "s", target=bound, against=systems.BARE),
            *per_event.rows("gaps", "CPU per 1,000 events", "ms", against=systems.BARE),
        ]

    async def memory(self) -> list[Row]:
        """Measure resident memory with many streams open."""
        options, held = self._options, _Series()
        for system in self._systems:
            async with AsyncExitStack() as stack:
                script = mock.Script(EVENTS, _HELD_GAP_S)
                subject = (await self._started(stack, script, [system], self._router_cores))[1]
                assert subject.process is not None
                options.progress(f"{options.streams} open streams: {system.name}")
                try:
                    streams = await hold(subject.port, subject.request, streams=options.streams)
                except (OSError, TimeoutError) as error:
                    options.progress(f"{system.name} does not hold {options.streams} streams: {error}")
                    continue
                held.add(system.name, await subject.process.resident_bytes() / 1e6)
                close_all(streams)
        return held.rows(
            "memory", f"{options.streams:,} open streams", "MB", target=Target(150, at_most=True)
        )

    async def workers(self) -> list[Row]:
        """Measure two workers on all cores against one, and what their CPU says of more cores.

        On few cores the load generator and the mocks take what the second worker would. So it is also
        reckoned how much more two workers carry once the busier one has a core for itself, as the only one
        has: by the CPU that a request costs with one and with two, and by the busier one's share of it.
        """
        options, rate, carried = self._options, _Series(), _Series()
        both = [systems.kvplane(self._plane), systems.kvplane(self._plane, _WORKERS)]
        async with AsyncExitStack() as stack:
            subjects = (await self._started(stack, mock.Script(EVENTS), both, ()))[1:]
            await self._warm(subjects)
            for number in range(options.rounds):
                busiest_s = list[float]()
                for subject in subjects:
                    options.progress(f"workers: round {number + 1} of {options.rounds}: {subject.name}")
                    assert subject.process is not None
                    before = await subject.process.cpu_by_process()
                    outcome, _ = await subject.run(_WORKERS_IN_FLIGHT, options.seconds)
                    after = await subject.process.cpu_by_process()
                    busiest = max(used - before.get(pid, 0.0) for pid, used in after.items())
                    busiest_s.append(busiest / outcome.done)
                    rate.add(subject.name, outcome.rate)
                for subject, used_s in zip(subjects, busiest_s, strict=True):
                    # Requests per CPU second of the process that is its limit.
                    carried.add(subject.name, 1 / used_s if used_s else 0.0)
        case = f"{_WORKERS_IN_FLIGHT} at once"
        rows = [
            *rate.rows("workers", f"{case}, no gaps", "/s", against=systems.OURS),
            *carried.rows("workers", f"{case}, by the busiest one's CPU", "/s", against=systems.OURS),
        ]
        target = Target(1.6, at_most=False, of=Of.RATIO)
        by_clock, by_cpu = (row for row in rows if row.against)
        return [
            replace(by_clock, note="the load generator takes part of the cores"),
            replace(by_cpu, target=target, note="where each worker has a core"),
        ]
