"""Probes against a real control plane: they leave one alone whose store is away, and find one that hangs.

It hangs as a fault of ours would make it: in the thread of its event loop, while gRPC's own threads go on and
its ports take connections.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.docker import health
from deploy.rig.process import LOCALHOST, free_ports
from kvplane.controlplane.server import LIVENESS
from tests.robustness.processes import Pausable
from tests.security.authority import Authority

HANGING = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
from kvplane.cli.entry import main
sys.exit(main())
"""
AWAY = "etcd://127.0.0.1:1/kvplane"
PATIENCE_S = 10.0
SOON_S = 1.0
"""A probe that is not answered takes so long."""


class Plane(Pausable):
    """`kvplane serve` that hangs when it is told to."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.metrics_port = free_ports(2)
        ports = [f"--grpc-port={self.port}", f"--metrics-port={self.metrics_port}"]
        self.words = ["kvplane", "serve", *ports, f"--store={AWAY}", *flags]
        super().__init__(
            "kvplane serve",
            [sys.executable, "-c", HANGING, *self.words[1:]],
            environment=dict(os.environ),
            log_file=folder / "log",
            ready_url=f"http://{LOCALHOST}:{self.metrics_port}/health",
        )

    def is_ready(self) -> bool:
        return super().is_ready() and self.takes_connections(self.port)

    def takes_connections(self, port: int) -> bool:
        """What a TCP probe would find."""
        try:
            with socket.create_connection((LOCALHOST, port), SOON_S):
                return True
        except OSError:
            return False

    def page(self, path: str, patience_s: float = PATIENCE_S) -> int:
        """Return the status of a page of the metrics' port, 0 where none comes."""
        url = f"http://{LOCALHOST}:{self.metrics_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=patience_s) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def hang(self) -> None:
        self._signal(signal.SIGUSR1)


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Plane]:
    plane = Plane(folder, *flags)
    plane.start()
    try:
        plane.wait_ready(60.0)
        yield plane
    finally:
        plane.kill()


def health_of(plane: Plane, service: str, patience_s: float = PATIENCE_S) -> str:
    """Return what the kubelet's gRPC probe would get: a status of health, or of the call."""
    with grpc.insecure_channel(f"{LOCALHOST}:{plane.port}") as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=patience_s)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_grpc_probes(tmp_path: Path) -> None:
    with running(tmp_path) as plane:
        assert health_of(plane, "") == "NOT_SERVING"
        assert health_of(plane, LIVENESS) == "SERVING"
        assert health.main(plane.words, {}) == 0
        plane.hang()
        assert health_of(plane, LIVENESS, SOON_S) == "DEADLINE_EXCEEDED"
        assert plane.takes_connections(plane.port), "a TCP probe finds nothing wrong"


def test_probes_of_one_whose_port_asks_for_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own = authority.server()
    with running(
        tmp_path,
        f"--grpc-tls-cert={own.cert}",
        f"--grpc-tls-key={own.key}",
        f"--grpc-client-ca={authority.ca}",
    ) as plane:
        assert health_of(plane, LIVENESS) == "UNAVAILABLE", "the kubelet has no certificate"
        assert (plane.page("/health"), plane.page("/ready")) == (200, 503)
        assert health.main(plane.words, {}) == 0
        plane.hang()
        monkeypatch.setattr(health, "SECONDS", SOON_S)
        assert plane.page("/health", SOON_S) == 0
        assert health.main(plane.words, {}) == 1
        assert plane.takes_connections(plane.port)
        assert plane.takes_connections(plane.metrics_port)
