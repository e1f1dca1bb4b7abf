"""The measured server in a process of its own, on a core of its own."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import logging
import multiprocessing
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import structlog
import uvloop

from kvplane.bench import echo
from kvplane.bench.ungrouped import UngroupedEtcdStore
from kvplane.controlplane.collector import spare_the_old
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.model import Settings
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.base import Store
from kvplane.store.clock import Clock, SystemClock
from kvplane.store.etcd import EtcdSettings, EtcdStore
from kvplane.store.url import open_store

_START_S = 60.0
_ANSWER_S = 120.0
_PATIENT_S = 7200.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to run. `core` is where to pin it (None: nowhere), `profile` where its cProfile dump goes.

    Without `grouped` a store on etcd commits each transaction by itself. `seen`: with metrics and logs, of
    which the lines are made and thrown away.
    """

    kind: Literal["plane", "echo"] = "plane"
    store: str | EtcdSettings = "memory://"
    grouped: bool = True
    core: int | None = None
    profile: Path | None = None
    max_conversations: int = 2_000_000
    seen: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used so far: CPU seconds, and resident bytes now."""

    cpu_s: float
    resident_bytes: int


class ServerDiedError(Exception):
    """The measured server did not start, or ended."""


def cores() -> list[int]:
    """Return the cores this process may run on; empty where the platform does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def pin(*on: int) -> None:
    """Keep this process, and threads started later, on some cores, where the platform can; none: anywhere."""
    if on and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, on)


def cpu_s() -> float:
    """Return the CPU seconds that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _usage() -> Usage:
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resident = most * (1 if sys.platform == "darwin" else 1024)
    return Usage(cpu_s(), resident)


class Server:
    """A server that runs in another process. Ends with this process, however that ends."""

    def __init__(self, process: Any, pipe: Connection, port: int) -> None:
        self._process = process
        self._pipe = pipe
        self.address = f"127.0.0.1:{port}"

    async def usage(self) -> Usage:
        """Return what it has used so far."""
        used = await asyncio.to_thread(self._ask, "usage")
        assert isinstance(used, Usage)
        return used

    async def profile(self, on: bool) -> None:
        """Switch its profiler on or off, if it has one."""
        await asyncio.to_thread(self._ask, "profile" if on else "pause")

    def stop(self) -> None:
        """End it, after its profile is written. Idempotent."""
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send("stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _ask(self, question: str) -> object:
        try:
            self._pipe.send(question)
            if not self._pipe.poll(_ANSWER_S):
                raise ServerDiedError("the measured server does not answer")
            return self._pipe.recv()
        except (OSError, EOFError) as error:
            raise ServerDiedError("the measured server has ended; its error is above") from error


@asynccontextmanager
async def running(spec: ServerSpec) -> AsyncIterator[Server]:
    """Run a server. Raises ServerDiedError."""
    server = await asyncio.to_thread(_start, spec)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


def _start(spec: ServerSpec) -> Server:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(spec, theirs), daemon=True, name=f"bench-{spec.kind}")
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise ServerDiedError(f"the {spec.kind} server did not start in {_START_S:g} s")
        port = ours.recv()
    except (EOFError, ServerDiedError) as error:
        process.kill()
        process.join()
        raise ServerDiedError(f"the {spec.kind} server did not start") from error
    if isinstance(port, str):
        process.join()
        raise ServerDiedError(port)
    return Server(process, ours, port)


def _main(spec: ServerSpec, pipe: Connection) -> None:
    """Be the server."""
    pin(*() if spec.core is None else (spec.core,))
    _configure_logs(seen=spec.seen)
    profiler = cProfile.Profile() if spec.profile is not None else None
    with contextlib.suppress(KeyboardInterrupt):
        spare_the_old()
        uvloop.run(_serve(spec, pipe, profiler))
    if profiler is not None and spec.profile is not None:
        profiler.disable()
        profiler.dump_stats(spec.profile)


def _configure_logs(*, seen: bool) -> None:
    if seen:
        structlog.configure_once(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.PrintLoggerFactory(open(os.devnull, "w")),  # noqa: SIM115
            cache_logger_on_first_use=True,
        )
        return
    structlog.configure_once(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


async def _serve(spec: ServerSpec, pipe: Connection, profiler: cProfile.Profile | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_question() -> None:
        try:
            question = pipe.recv()
        except (OSError, EOFError):
            question = "stop"
        if question == "usage":
            pipe.send(_usage())
        elif question == "stop":
            loop.remove_reader(pipe.fileno())
            stopped.set()
        else:
            if profiler is not None and question == "profile":
                profiler.enable()
            elif profiler is not None:
                profiler.disable()
            pipe.send(None)

    async with _listening(spec) as port:
        loop.add_reader(pipe.fileno(), on_question)
        pipe.send(port)
        await stopped.wait()


@asynccontextmanager
async def _listening(spec: ServerSpec) -> AsyncIterator[int]:
    if spec.kind == "echo":
        async with echo.listening() as port:
            yield port
        return
    settings = Settings(
        max_location_ttl_s=_PATIENT_S,
        claim_timeout_s=_PATIENT_S / 4,  # less than locations live: else each begin-turn asks for more life
        engine_lease_s=_PATIENT_S,
        max_conversations=spec.max_conversations,
    )
    clock = SystemClock()
    meter = Meter(clock) if spec.seen else None
    async with (
        _opened(spec, clock) as opened,
        ControlPlaneServer(
            opened if meter is None else meter.instrument(opened), clock, settings, meter=meter
        ) as server,
    ):
        yield await server.start("127.0.0.1:0")


def _opened(spec: ServerSpec, clock: Clock) -> Store:
    if isinstance(spec.store, str):
        return open_store(spec.store, clock)
    return (EtcdStore if spec.grouped else UngroupedEtcdStore)(spec.store, clock)
