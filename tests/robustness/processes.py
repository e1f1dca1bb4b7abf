"""The fleet's processes: replicas and traffic, which can be killed, paused, and started again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports
from tests.robustness.stepped_serve import step

ROOT = Path(__file__).resolve().parents[2]


def _environment() -> dict[str, str]:
    """Return an environment in which this tree is found first."""
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *path.split(os.pathsep)]).rstrip(":")}


class Pausable(RigProcess):
    """A program that can be stopped where it stands."""

    def pause(self) -> None:
        """Stop it (SIGSTOP): connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on (SIGCONT). Harmless if it never stopped."""
        self._signal(signal.SIGCONT)

    def stop(self, grace: float = 5.0) -> None:
        """See RigProcess; also of a paused one."""
        if self.running:
            self.resume()
        super().stop(grace)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the program, which leads a process group below its guard."""
        if self._guard is None or self._guard.poll() is not None:
            raise RigError(f"{self.name} is not running")
        guard = self._guard.pid
        for child in Path(f"/proc/{guard}/task/{guard}/children").read_text().split():
            os.killpg(int(child), number)


class Replica(Pausable):
    """One `kvplane serve`, with a wall clock of its own that `step_clock` moves."""

    def __init__(self, name: str, folder: Path, *, store: str, flags: Sequence[str] = ()) -> None:
        self.port = free_ports(1)[0]
        self.address = f"{LOCALHOST}:{self.port}"
        self._clock = folder / f"{name}.clock"
        step(self._clock, 0.0)
        script = str(Path(__file__).with_name("stepped_serve.py"))
        command = [sys.executable, script, str(self._clock), "serve", "--grpc-port", str(self.port)]
        super().__init__(
            name,
            [*command, "--store", store, "--log-format", "json", *flags],
            environment=_environment(),
            log_file=folder / f"{name}.log",
            ready_url="",
        )

    def step_clock(self, seconds: float) -> None:
        """Move its wall clock away from the machine's by so much, at once or for its next start."""
        step(self._clock, seconds)

    def is_ready(self) -> bool:
        """Whether its health service says SERVING."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=1.0
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Worker(Pausable):
    """A process of traffic: a module of this package that writes a history. Each start begins a new file.

    `options` become flags. It is ready once its history exists.
    """

    def __init__(
        self, name: str, module: str, folder: Path, history: Path, options: Mapping[str, object]
    ) -> None:
        self._history_folder = history
        self._module = module
        self._options = dict(options)
        self._starts = 0
        super().__init__(name, [], environment=_environment(), log_file=folder / f"{name}.log", ready_url="")

    @property
    def history(self) -> Path:
        """Where the latest start writes."""
        return self._history_folder / f"{self.name}-{self._starts}.jsonl"

    def start(self) -> None:
        """See RigProcess."""
        self._starts += 1
        flags = [text for name, value in self._options.items() for text in (f"--{name}", str(value))]
        self._command = [
            *(sys.executable, "-m", f"tests.robustness.{self._module}"),
            *("--history", str(self.history), "--run", str(self._starts), *flags),
        ]
        super().start()

    def is_ready(self) -> bool:
        """Whether it has begun."""
        return self.history.exists()
