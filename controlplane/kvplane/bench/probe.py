"""A prober in a process of its own: the same lookup every few milliseconds, come what may."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from kvplane.bench.process import pin
from kvplane.bench.rig import DEADLINE_S, BenchError
from kvplane.v1 import location_pb2

_ANSWER_S = 60.0
_METHOD = "/kvplane.v1.LocationService/LookupLocation"


@dataclass(slots=True)
class Probes:
    """One entry per lookup: when it was due (time.monotonic), and seconds from then to the answer.

    `misses` counts those that were no hit, `late_s` is by how much the prober itself was late, at most.
    """

    due: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    misses: int = 0
    late_s: float = 0.0


@asynccontextmanager
async def probing(address: str, request: bytes, every_s: float, core: int | None) -> AsyncIterator[Probes]:
    """Look up all the time that this lasts; what came of it is filled in at the end. Raises BenchError."""
    probes = Probes()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, address, request, every_s, core)
    process = context.Process(target=_main, args=arguments, daemon=True, name="bench-probe")
    await asyncio.to_thread(process.start)
    theirs.close()
    try:
        if (
            not await asyncio.to_thread(ours.poll, _ANSWER_S)
            or await asyncio.to_thread(ours.recv) is not None
        ):
            raise BenchError("the prober did not start")
        yield probes
        await asyncio.to_thread(ours.send, None)
        if not await asyncio.to_thread(ours.poll, _ANSWER_S):
            raise BenchError("the prober does not answer")
        found = await asyncio.to_thread(ours.recv)
        probes.due, probes.waited_s = found.due, found.waited_s
        probes.misses, probes.late_s = found.misses, found.late_s
    except EOFError:
        raise BenchError("the prober has ended; its error is above") from None
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        ours.close()


def _main(pipe: Connection, address: str, request: bytes, every_s: float, core: int | None) -> None:
    pin(*() if core is None else (core,))
    uvloop.run(_probe(pipe, address, request, every_s))


async def _probe(pipe: Connection, address: str, request: bytes, every_s: float) -> None:
    probes, stopped = Probes(), asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stopped.set)
    async with grpc.aio.insecure_channel(address) as channel:
        parse = location_pb2.LookupLocationResponse.FromString
        call: Any = channel.unary_unary(_METHOD)
        await call(request, timeout=DEADLINE_S)
        pipe.send(None)

        async def once(due: float) -> None:
            answer = await call(request, timeout=DEADLINE_S)
            probes.due.append(due)
            probes.waited_s.append(time.monotonic() - due)
            probes.misses += not parse(answer).HasField("location")

        next_due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while not stopped.is_set():
                next_due += every_s
                await asyncio.sleep(next_due - time.monotonic())
                probes.late_s = max(probes.late_s, time.monotonic() - next_due)
                tasks.create_task(once(next_due))
    pipe.send(probes)
