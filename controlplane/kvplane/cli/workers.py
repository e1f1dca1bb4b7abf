"""Several router processes behind one port: started, restarted when they die, drained together."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from kvplane.cli.config import Config, environment_with
from kvplane.router.app import RouterNotNowError, RouterStartError
from kvplane.router.siblings import Siblings, forget_gauges

log = structlog.get_logger(__name__)

WORKER = (sys.executable, "-P", "-m", "kvplane.cli.worker")
_TOLD_WRONG = 2
"""A worker's exit status where its options or files are wrong."""
_START_S = 60.0
_STOP_S = 10.0
"""After the drain time: to close what is open."""
BEAT_S = 2.0
"""How often a worker says that it lives."""
_SILENT_S = 15.0
"""A worker that has not said so for that long is stuck, with its part of the port's connections."""
_FIRST_BACKOFF_S = 0.5
_MOST_BACKOFF_S = 30.0
_PROVEN_S = 30.0
"""A worker that lived so long had no trouble starting."""


async def _lives(reader: asyncio.StreamReader) -> bool:
    """Wait until a worker drains or ends; False if it falls silent before."""
    while True:
        try:
            async with asyncio.timeout(_SILENT_S):
                if not await reader.readline():
                    return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True


def share(limit: int, workers: int) -> int:
    """Return one worker's part of a limit of the router's, rounded up; 0, no limit, stays."""
    return -(-limit // workers)


async def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that keeps a port for processes to share, not listening. Raises RouterStartError."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise RouterStartError("--workers: this system cannot share a port between processes; use 1")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        # Sharing works with strangers too, so first see that nobody else listens there.
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            taken = alone.getsockname()
        shared = socket.socket(family, socket.SOCK_STREAM)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(taken)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RouterNotNowError(f"port {port} on {host} is taken: choose another with --port") from error
        raise RouterNotNowError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return shared


class Workers:
    """`config.workers` routers on one port. `async with` starts them and drains them at the end.

    They share nothing but the port and the files of their metrics; limits on requests are split evenly.
    A worker that dies is started again, after a wait that doubles up to 30 s while it keeps dying.
    """

    def __init__(self, config: Config, plane_address: str | None, command: Sequence[str] = WORKER) -> None:
        self._config = config
        self._plane_address = plane_address
        self._command = command
        self._directory = Path()
        self._port: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self.port = 0
        """The port they listen on, once started."""

    async def __aenter__(self) -> Self:
        config = self._config
        self._port = await reserve(config.host, config.port)
        self.port = self._port.getsockname()[1]
        self._directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="kvplane-router-"))
        loop = asyncio.get_running_loop()
        ready = [loop.create_future() for _ in range(config.workers)]
        self._tasks = [
            asyncio.create_task(self._keep(number, future), name=f"worker {number}")
            for number, future in enumerate(ready)
        ]
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self._stop()
            raise
        log.info("workers_started", workers=config.workers, host=config.host, port=self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def metrics_page(self) -> bytes:
        """Return the metrics of all workers together, in Prometheus' text format."""
        return await asyncio.to_thread(Siblings(self._directory, -1).metrics)

    async def _stop(self) -> None:
        self._stopping.set()
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()
        if self._tasks:
            drain_s = self._config.drain_grace + self._config.drain_timeout
            _, late = await asyncio.wait(self._tasks, timeout=drain_s + _STOP_S)
            for process in self._processes.values():
                if process.returncode is None:
                    log.warning("worker_killed", pid=process.pid)
                    process.kill()
            await asyncio.gather(*late, return_exceptions=True)
        if self._port is not None:
            self._port.close()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _keep(self, number: int, ready: asyncio.Future[None]) -> None:
        """Run a worker again and again. Its first start, or why it failed, is the result of `ready`."""
        loop, backoff_s = asyncio.get_running_loop(), _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            started = loop.time()
            try:
                problem = await self._run(number, ready)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                log.exception("worker_not_started", worker=number)
            if not ready.done():
                process = self._processes.get(number)
                is_told_wrong = process is not None and process.returncode == _TOLD_WRONG
                ready.set_exception((RouterStartError if is_told_wrong else RouterNotNowError)(problem))
                return
            if self._stopping.is_set():
                return
            backoff_s = _FIRST_BACKOFF_S if loop.time() - started > _PROVEN_S else backoff_s
            log.error("worker_died", worker=number, problem=problem, restart_in_s=backoff_s)
            await asyncio.to_thread(forget_gauges, self._directory, number)
            try:
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
            except TimeoutError:
                backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)

    async def _run(self, number: int, ready: asyncio.Future[None]) -> str:
        """Run a worker once; returns why it ended."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment_with(PROMETHEUS_MULTIPROC_DIR=str(self._directory)),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes[number] = process
        if self._stopping.is_set():
            process.terminate()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        # As long as this stays open the worker knows that its parent lives.
        try:
            writer.write(json.dumps(self._task(number)).encode() + b"\n")
            try:
                async with asyncio.timeout(_START_S):
                    said = (await reader.readline()).decode().strip()
            except TimeoutError:
                said = f"it did not start within {_START_S:g} s"
                process.kill()
            except ConnectionError:
                said = ""
            if said == "ready":
                said = ""
                if not ready.done():
                    ready.set_result(None)
                log.info("worker_started", worker=number, pid=process.pid)
                if not await _lives(reader):
                    said = f"it gave no sign of life for {_SILENT_S:g} s"
                    process.kill()
            code = await process.wait()
            return said or (f"killed by signal {-code}" if code < 0 else f"it ended with status {code}")
        finally:
            writer.close()

    def _task(self, number: int) -> dict[str, object]:
        config = self._config
        limits = {
            name: share(getattr(config, name), config.workers)
            for name in ("max_requests", "max_engine_requests", "max_queued")
        }
        mine = config.model_copy(update={"port": self.port, "plane": self._plane_address, **limits})
        return {
            "number": number,
            "processes": config.workers,
            "directory": str(self._directory),
            "config": mine.model_dump(mode="json"),
        }
