"""Unary lookup, begin-turn and claim, each against bare unary calls with as many bytes both ways.

Against an echo of bytes, which shows all that is above gRPC; and against an echo of messages, which reads and
writes protobuf as every server must, and so shows what the control plane itself takes.
"""

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
SERVICE = "/kvplane.v1.LocationService/"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call: its requests, and what of an answer is the location."""

    name: str
    method: str
    request: Callable[[payload.Conversations, int], Any]
    location: Callable[[bytes], Any]


KINDS = (
    Kind(
        "lookup",
        "LookupLocation",
        payload.Conversations.lookup,
        lambda raw: location_pb2.LookupLocationResponse.FromString(raw).location,
    ),
    Kind(
        "begin-turn",
        "BeginTurn",
        payload.Conversations.begin,
        lambda raw: location_pb2.BeginTurnResponse.FromString(raw).location,
    ),
    Kind(
        "claim",
        "ClaimLocation",
        payload.Conversations.claim,
        lambda raw: location_pb2.ClaimLocationResponse.FromString(raw).claim.location,
    ),
)


@dataclass(slots=True)
class Done:
    """Calls that were made."""

    stretch: Stretch
    latencies_s: list[float]
    answers: list[bytes]

    def figure(self, in_flight: int) -> float:
        """Return the median in milliseconds of one in flight, else calls per second."""
        if in_flight == 1:
            return percentile(self.latencies_s, 0.5) * 1000
        return len(self.latencies_s) / self.stretch.elapsed_s


_Compared = tuple[Done, Done, Done]
"""By the control plane, by an echo of bytes, by an echo of messages."""
_End = tuple[Server, grpc.aio.Channel]


async def calls(
    server: Server, channel: grpc.aio.Channel, method: str, requests: Sequence[bytes], in_flight: int
) -> Done:
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
    return Done(stretch, latencies, answers)


def check(kind: Kind, made: payload.Conversations, done: Done, count: int) -> None:
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
        ends = (plane, channel), (bare, bare_channel)
        engine = await Engine.attached(channel)
        made = payload.conversations("unary-warm-up", options.blocks)
        await engine.retain(made, range(_WARM_UP))
        sizes, counts = dict[str, int](), dict[int, int]()
        for kind in KINDS:
            requests = [kind.request(made, number).SerializeToString() for number in range(_WARM_UP)]
            done = await calls(plane, channel, SERVICE + kind.method, requests, 16)
            sizes[kind.name] = len(done.answers[0])
            for in_flight in _IN_FLIGHT:
                bare_done = await calls(bare, bare_channel, echo.unary_method(1000), requests, in_flight)
                rate = _WARM_UP / bare_done.stretch.elapsed_s
                counts[in_flight] = max(_IN_FLIGHT[-1], round(rate * options.seconds))
        await engine.free(made.request_id(number) for number in range(_WARM_UP))
        results: dict[tuple[str, int], list[_Compared]] = {}
        for number in range(options.rounds):
            for in_flight in _IN_FLIGHT:
                made = payload.conversations(f"unary-{number}-{in_flight}", options.blocks)
                count = counts[in_flight]
                await engine.retain(made, range(count))
                for kind in KINDS:
                    options.progress(
                        f"unary: round {number + 1} of {options.rounds}, {kind.name}, {in_flight} in flight"
                    )
                    results.setdefault((kind.name, in_flight), []).append(
                        await _compared(kind, made, count, in_flight, sizes[kind.name], ends, first=number)
                    )
                await engine.free(made.request_id(index) for index in range(count))
        await engine.aclose()
    return [
        _row(name, in_flight, done, sizes[name], against)
        for (name, in_flight), done in sorted(results.items())
        for against in (1, 2)
    ]


async def _compared(
    kind: Kind,
    made: payload.Conversations,
    count: int,
    in_flight: int,
    answer_bytes: int,
    ends: tuple[_End, _End],
    *,
    first: int,
) -> _Compared:
    """Make the same calls to the control plane and to both echoes, beginning with the `first` of these."""
    requests = [kind.request(made, index).SerializeToString() for index in range(count)]
    plane, bare = ends
    ways = [
        (plane, SERVICE + kind.method),
        (bare, echo.unary_method(answer_bytes)),
        (bare, echo.messages_method(kind.method, answer_bytes)),
    ]
    done: dict[int, Done] = {}
    for turn in range(3):
        which = (first + turn) % 3
        end, method = ways[which]
        done[which] = await calls(*end, method, requests, in_flight)
    check(kind, made, done[0], count)
    for each in done.values():
        each.answers.clear()
    return done[0], done[1], done[2]


def _row(name: str, in_flight: int, done: Sequence[_Compared], answer_bytes: int, against: int) -> Row:
    single = in_flight == 1
    what = f"{name}: p50, 1 in flight" if single else f"{name}: {in_flight} in flight"
    return Row(
        "unary",
        f"{what}, over an echo of {'bytes' if against == 1 else 'messages'}",
        "ms" if single else "/s",
        tuple(each[0].figure(in_flight) for each in done),
        tuple(each[against].figure(in_flight) for each in done),
        Target(1.25, at_most=True, of=Of.RATIO) if single else Target(0.8, at_most=False, of=Of.RATIO),
        mean_cpu([each[0].stretch.cpu for each in done]),
        mean_cpu([each[against].stretch.cpu for each in done]),
        f"answers of {answer_bytes} bytes",
    )
