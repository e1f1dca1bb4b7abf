"""begin-turn and claim through the Turns stream: each conversation claimed once, every answer checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from kvplane.bench import echo, payload
from kvplane.bench.engine import Engine
from kvplane.bench.figures import Row, Target, mean_cpu, percentile
from kvplane.bench.operations import METHOD, Work, at_once, check, one_by_one, work
from kvplane.bench.process import Server
from kvplane.bench.rig import Options, Stretch, measured, served

IN_FLIGHT = 512
_WARM_UP = 1024
_MOST = 100_000


class TurnsBench:
    """Does rounds of pairs against one control plane."""

    def __init__(self, engine: Engine, channel: grpc.aio.Channel, name: str, options: Options) -> None:
        self._engine = engine
        self._channel = channel
        self._name = name
        self._options = options
        self._rounds = 0

    async def round(
        self, server: Server, count: int, in_flight: int, streams: int = 1
    ) -> tuple[Stretch, Work]:
        """Retain `count` conversations, begin and claim each, check, forget them."""
        self._rounds += 1
        made = payload.conversations(f"{self._name}-{self._rounds}", self._options.blocks)
        await self._engine.retain(made, range(count))
        todo = work([(made, number) for number in range(count)], "begin_turn", "claim")
        calls: list[Any] = [self._channel.stream_stream(METHOD)() for _ in range(streams)]
        async with measured(server) as stretch:
            if in_flight == 1:
                await one_by_one(calls[0], todo)
            else:
                await at_once(calls, todo, in_flight)
        check(todo)
        for call in calls:
            await call.done_writing()
        await self._engine.free(made.request_id(number) for number in range(count))
        return stretch, todo


async def run(options: Options, core: int | None) -> list[Row]:
    """Measure one operation in flight against a bare stream, and many in flight over one and two streams."""
    async with (
        served(options, "plane", core) as (plane, channel),
        served(options, "echo", core) as (bare, bare_channel),
    ):
        engine = await Engine.attached(channel)
        bench = TurnsBench(engine, channel, "turns", options)
        options.progress("turns: warming up")
        warm, _ = await bench.round(plane, _WARM_UP, IN_FLIGHT, 2)
        count = max(32, min(_MOST, round(_WARM_UP / warm.elapsed_s * options.seconds)))
        few = max(32, min(count, round(1000 * options.seconds)))
        single, bare_single = list[tuple[Stretch, float]](), list[tuple[Stretch, float]]()
        many: dict[int, list[tuple[Stretch, Work]]] = {1: [], 2: []}
        for number in range(options.rounds):
            options.progress(f"turns: round {number + 1} of {options.rounds}, {count} pairs")
            stretch, todo = await bench.round(plane, few, 1)
            single.append((stretch, percentile(todo.latencies_s, 0.5) * 1000))
            answer_bytes = sum(map(len, todo.answers)) // len(todo.answers)
            again = todo.anew()
            call: Any = bare_channel.stream_stream(echo.stream_method(answer_bytes))()
            async with measured(bare) as stretch:
                await one_by_one(call, again)
            await call.done_writing()
            bare_single.append((stretch, percentile(again.latencies_s, 0.5) * 1000))
            for streams, rounds in many.items():
                rounds.append(await bench.round(plane, count, IN_FLIGHT, streams))
        await engine.aclose()
    rows = [
        Row(
            "turns",
            "begin-turn, claim by turns: p50, 1 in flight",
            "ms",
            tuple(value for _, value in single),
            tuple(value for _, value in bare_single),
            Target(0.3, at_most=True),
            mean_cpu([stretch.cpu for stretch, _ in single]),
            mean_cpu([stretch.cpu for stretch, _ in bare_single]),
            f"answers of {answer_bytes} bytes",
        )
    ]
    for streams, done in many.items():
        rows += _rates(done, count, streams)
    return rows


def _rates(done: Sequence[tuple[Stretch, Work]], count: int, streams: int) -> list[Row]:
    cpu = mean_cpu([stretch.cpu for stretch, _ in done])
    over = f"{IN_FLIGHT} in flight over {streams} stream{'s' if streams > 1 else ''}"
    per_message = sum(2 * count / len(todo.answers) for _, todo in done) / len(done)
    return [
        Row(
            "turns",
            f"operations, {over}",
            "/s",
            tuple(2 * count / stretch.elapsed_s for stretch, _ in done),
            target=Target(40_000, at_most=False),
            cpu=cpu,
            note=f"{per_message:.0f} answers a message",
        ),
        Row(
            "turns",
            f"pairs of begin-turn and claim, {over}",
            "/s",
            tuple(count / stretch.elapsed_s for stretch, _ in done),
            cpu=cpu,
        ),
        Row(
            "turns",
            f"one operation: p99, {over}",
            "ms",
            tuple(percentile(todo.latencies_s, 0.99) * 1000 for _, todo in done),
            cpu=cpu,
        ),
    ]
