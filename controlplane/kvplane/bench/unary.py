"""Unary lookup, begin-turn and claim, each against a bare unary call with as many bytes both ways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvplane.bench import echo, payload
from kvplane.bench.engine import Engine
from kvplane.bench.figures import Of, Row, Target, mean_cpu, percentile
from kvplane.bench.process import Server
from kvplane.bench.rig import DEADLINE_S, BenchError, Options, Stretch, measured, served
from kvplane.v1 import location_pb2

_IN_FLIGHT = (1, 64)
_WARM_UP = 256
_SERVICE = "/kvplane.v1.LocationService/"


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    method: str
    request: Callable[[payload.Conversations, int], Any]
    location: Callable[[bytes], Any]


KINDS = (
    _Kind(
        "lookup",
        "LookupLocation",
        payload.Conversations.lookup,
        lambda raw: location_pb2.LookupLocationResponse.FromString(raw).location,
    ),
    _Kind(
        "begin-turn",
        "BeginTurn",
        payload.Conversations.begin,
        lambda raw: location_pb2.BeginTurnResponse.FromString(raw).location,
    ),
    _Kind(
        "claim",
        "ClaimLocation",
        payload.Conversations.claim,
        lambda raw: location_pb2.ClaimLocationResponse.FromString(raw).claim.location,
    ),
)


@dataclass(slots=True)
class _Done:
    stretch: Stretch
    latencies_s: list[float]
    answers: list[bytes]

    def figure(self, in_flight: int) -> float:
        if in_flight == 1:
            return percentile(self.latencies_s, 0.5) * 1000
        return len(self.latencies_s) / self.stretch.elapsed_s


async def _calls(
    server: Server, channel: grpc.aio.Channel, method: str, requests: Sequence[bytes], in_flight: int
) -> _Done:
    """Make all the calls, `in_flight` at once."""
    call: Any = channel.unary_unary(method)
    latencies, answers, clock = list[float](), list[bytes](), time.perf_counter
    left = iter(requests)

    async def work() -> None:
        for request in left:
            began = clock()
            answers.append(await call(request, timeout=DEADLINE_S))
            latencies.append(clock() - began)

    async with measured(server) as stretch:
        if in_flight == 1:
            await work()
        else:
            await asyncio.gather(*(work() for _ in range(in_flight)))
    return _Done(stretch, latencies, answers)


def _check(kind: _Kind, made: payload.Conversations, done: _Done, count: int) -> None:
    """Raise BenchError unless every call was answered with a conversation's location, each once."""
    found = {kind.location(raw).request_id for raw in done.answers}
    if len(found) != count or found != {made.request_id(number) for number in range(count)}:
        raise BenchError(f"{kind.name}: {count - len(found)} of {count} calls were not a hit")


async def run(options: Options, core: int | None) -> list[Row]:
    """Measure median latency with one call in flight, and calls per second with many."""
    async with (
        served(options, "plane", core) as (plane, channel),
        served(options, "echo", core) as (bare, bare_channel),
    ):
        engine = await Engine.attached(channel)
        made = payload.conversations("unary-warm-up", options.blocks)
        await engine.retain(made, range(_WARM_UP))
        sizes, counts = dict[str, int](), dict[int, int]()
        for kind in KINDS:
            requests = [kind.request(made, number).SerializeToString() for number in range(_WARM_UP)]
            done = await _calls(plane, channel, _SERVICE + kind.method, requests, 16)
            sizes[kind.name] = len(done.answers[0])
            for in_flight in _IN_FLIGHT:
                bare_done = await _calls(bare, bare_channel, echo.unary_method(1000), requests, in_flight)
                rate = _WARM_UP / bare_done.stretch.elapsed_s
                counts[in_flight] = max(_IN_FLIGHT[-1], round(rate * options.seconds))
        await engine.free(made.request_id(number) for number in range(_WARM_UP))
        results: dict[tuple[str, int], list[tuple[_Done, _Done]]] = {}
        for number in range(options.rounds):
            for in_flight in _IN_FLIGHT:
                made = payload.conversations(f"unary-{number}-{in_flight}", options.blocks)
                count = counts[in_flight]
                await engine.retain(made, range(count))
                for kind in KINDS:
                    options.progress(
                        f"unary: round {number + 1} of {options.rounds}, {kind.name}, {in_flight} in flight"
                    )
                    requests = [kind.request(made, index).SerializeToString() for index in range(count)]
                    bare_method = echo.unary_method(sizes[kind.name])
                    if number % 2:
                        other = await _calls(bare, bare_channel, bare_method, requests, in_flight)
                    own = await _calls(plane, channel, _SERVICE + kind.method, requests, in_flight)
                    if not number % 2:
                        other = await _calls(bare, bare_channel, bare_method, requests, in_flight)
                    _check(kind, made, own, count)
                    own.answers.clear()
                    other.answers.clear()
                    results.setdefault((kind.name, in_flight), []).append((own, other))
                await engine.free(made.request_id(index) for index in range(count))
        await engine.aclose()
    return [_row(name, in_flight, pairs, sizes[name]) for (name, in_flight), pairs in sorted(results.items())]


def _row(name: str, in_flight: int, pairs: Sequence[tuple[_Done, _Done]], answer_bytes: int) -> Row:
    single = in_flight == 1
    return Row(
        "unary",
        f"{name}: p50, 1 in flight" if single else f"{name}: {in_flight} in flight",
        "ms" if single else "/s",
        tuple(own.figure(in_flight) for own, _ in pairs),
        tuple(other.figure(in_flight) for _, other in pairs),
        Target(1.25, at_most=True, of=Of.RATIO) if single else Target(0.8, at_most=False, of=Of.RATIO),
        mean_cpu([own.stretch.cpu for own, _ in pairs]),
        mean_cpu([other.stretch.cpu for _, other in pairs]),
        f"answers of {answer_bytes} bytes",
    )
