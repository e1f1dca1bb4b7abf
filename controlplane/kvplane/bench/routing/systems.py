"""The routers that are compared, each as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from kvplane.bench.process import pin
from kvplane.bench.rig import BenchError
from kvplane.bench.routing.mock import Engines

_START_S = 60.0
_LOG_LINES = 12

OURS, TOGETHER, BARE = "kvplane", "kvplane up", "bare proxy"
KVPLANE = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")


@dataclass(frozen=True, slots=True)
class System:
    """A router: its name, and its command line with {port}, {prefill}, {decode}, {prefill_port}, ..."""

    name: str
    command: tuple[str, ...]

    def filled(self, port: int, engines: Engines) -> list[str]:
        """Return the command line for one run. Raises BenchError for an unknown placeholder."""
        values = {
            "port": port,
            "prefill": engines.prefill_url,
            "decode": engines.decode_url,
            "prefill_port": engines.prefill_port,
            "decode_port": engines.decode_port,
        }
        try:
            return [part.format(**values) for part in self.command]
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            known = ", ".join(f"{{{name}}}" for name in values)
            raise BenchError(f"--peer {self.name}: cannot fill in {error}; known are {known}") from None


def kvplane(plane: str, workers: int = 1) -> System:
    """Return our router, with a control plane and all else that it has by default."""
    name = OURS if workers == 1 else f"{OURS} --workers {workers}"
    more = ("--workers", str(workers)) if workers > 1 else ()
    legs = ("--prefill", "{prefill}", "--decode", "{decode}")
    return System(name, (*KVPLANE, "route", "--port", "{port}", "--plane", plane, *legs, *more))


def together() -> System:
    """Return our router with the control plane in its process."""
    ports = ("--port", "{port}", "--grpc-port", str(free_port()))
    return System(TOGETHER, (*KVPLANE, "up", *ports, "--prefill", "{prefill}", "--decode", "{decode}"))


BARE_PROXY = System(
    BARE, (sys.executable, str(Path(__file__).with_name("proxy.py")), "{port}", "{prefill}", "{decode}")
)


def peer(text: str) -> System:
    """Return the router that NAME=COMMAND describes. Raises BenchError."""
    name, separator, command = text.partition("=")
    try:
        parts = tuple(shlex.split(command))
    except ValueError as error:
        raise BenchError(f"--peer {text}: {str(error).lower()}") from None
    if not separator or not name.strip() or not parts:
        raise BenchError(
            f"--peer {text}: write it as NAME=COMMAND, with {{port}}, {{prefill}} and {{decode}}"
        )
    if not any("{port}" in part for part in parts):
        raise BenchError(f"--peer {text}: the command does not say {{port}}, where it is to listen")
    return System(name.strip(), parts)


class Running:
    """A router that runs. CPU and memory are those of its process and all below it."""

    def __init__(self, process: psutil.Popen, port: int) -> None:
        self._process = process
        self.port = port

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    async def cpu_s(self) -> float:
        """Return the CPU seconds used so far."""
        return await asyncio.to_thread(self._cpu_s)

    async def cpu_by_process(self) -> dict[int, float]:
        """Return the CPU seconds that each of its processes has used so far, by process id."""
        return await asyncio.to_thread(self._cpu_by_process)

    def _cpu_s(self) -> float:
        return sum(self._cpu_by_process().values())

    def _cpu_by_process(self) -> dict[int, float]:
        used = dict[int, float]()
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
        return used

    async def resident_bytes(self) -> int:
        """Return the memory that is resident now; what processes share is counted once for each."""
        return await asyncio.to_thread(self._resident_bytes)

    def _resident_bytes(self) -> int:
        total = 0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@asynccontextmanager
async def running(system: System, engines: Engines, cores: Sequence[int]) -> AsyncIterator[Running]:
    """Run a router on some cores. Raises BenchError with the end of what it printed if it does not start."""
    port = free_port()
    async with process(system.name, system.filled(port, engines), port, cores) as router:
        yield router


@asynccontextmanager
async def process(
    name: str, command: Sequence[str], port: int, cores: Sequence[int]
) -> AsyncIterator[Running]:
    """Run a command: into the block once its port answers, ended with it. Raises BenchError."""
    with tempfile.TemporaryFile(prefix="kvplane-bench-") as log:
        started = await asyncio.to_thread(_start, name, command, cores, log)
        router = Running(started, port)
        try:
            await _answering(name, router, log)
            yield router
        finally:
            await asyncio.to_thread(_stop, started)


def _start(name: str, command: Sequence[str], cores: Sequence[int], log: IO[bytes]) -> psutil.Popen:
    try:
        return psutil.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: pin(*cores),  # before the program begins, which may start threads
        )
    except OSError as error:
        raise BenchError(f"{name}: cannot run {command[0]}: {error.strerror}") from None


async def _answering(name: str, router: Running, log: IO[bytes]) -> None:
    deadline = asyncio.get_running_loop().time() + _START_S
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.close()
            return
        if router.ended or asyncio.get_running_loop().time() > deadline:
            said = await asyncio.to_thread(_end_of, log)
            raise BenchError(f"{name}: did not start; the end of what it said:\n{said}")
        await asyncio.sleep(0.1)


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LOG_LINES:])


def _stop(process: psutil.Popen) -> None:
    family = process.children(recursive=True) if process.poll() is None else []
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
    try:
        process.wait(10)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(10)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
