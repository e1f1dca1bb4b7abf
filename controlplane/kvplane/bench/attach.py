"""Announcements through an engine's stream, against a bare stream that carries the same messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc

from kvplane.bench import echo, payload
from kvplane.bench.engine import BATCH, WINDOW, Engine, check_accepted, pump
from kvplane.bench.figures import Row, Target, mean_cpu
from kvplane.bench.rig import Options, Stretch, measured, served

_WARM_UP = 2048
_MOST = 200_000


async def run(options: Options, core: int | None) -> list[Row]:
    """Measure announcements per second, and the same messages through a bare stream."""
    async with (
        served(options, "plane", core) as (plane, plane_channel),
        served(options, "echo", core) as (bare, bare_channel),
    ):
        engine = await Engine.attached(plane_channel)
        ack_bytes, rate = await _warm_up(engine, options)
        count = max(BATCH, min(_MOST, round(rate * options.seconds)) // BATCH * BATCH)
        own, other = list[Stretch](), list[Stretch]()
        for number in range(options.rounds):
            options.progress(f"attach: round {number + 1} of {options.rounds}, {count} announcements")
            made = payload.conversations(f"attach-{number}", options.blocks)
            messages = engine.announcements(made.announcement(index) for index in range(count))
            async with measured(plane) as stretch:
                acks = await engine.send(messages)
            own.append(stretch)
            check_accepted(acks, count)
            async with measured(bare) as stretch:
                await _echoed(bare_channel, messages, ack_bytes)
            other.append(stretch)
            await engine.free(made.request_id(index) for index in range(count))
        await engine.aclose()
    size = sum(map(len, messages)) // count
    return [
        Row(
            "attach",
            f"announcements, {BATCH} a message, {WINDOW} messages in flight",
            "/s",
            tuple(count / stretch.elapsed_s for stretch in own),
            tuple(count / stretch.elapsed_s for stretch in other),
            Target(50_000, at_most=False),
            mean_cpu([stretch.cpu for stretch in own]),
            mean_cpu([stretch.cpu for stretch in other]),
            f"{size} bytes each",
        )
    ]


async def _warm_up(engine: Engine, options: Options) -> tuple[int, float]:
    """Return the size of an acknowledgement, and announcements per second."""
    made = payload.conversations("attach-warm-up", options.blocks)
    messages = engine.announcements(made.announcement(index) for index in range(_WARM_UP))
    began = time.perf_counter()
    acks = await engine.send(messages)
    elapsed_s = time.perf_counter() - began
    check_accepted(acks, _WARM_UP)
    await engine.free(made.request_id(index) for index in range(_WARM_UP))
    return len(acks[0]), _WARM_UP / elapsed_s


async def _echoed(channel: grpc.aio.Channel, messages: Sequence[bytes], answer_bytes: int) -> None:
    call: Any = channel.stream_stream(echo.stream_method(answer_bytes))()
    answered = asyncio.Semaphore(0)

    async def read() -> None:
        for _ in messages:
            await call.read()
            answered.release()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        await pump(call, messages, WINDOW, answered)
    await call.done_writing()
