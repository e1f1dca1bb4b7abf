"""The image's health check: 0 if what runs in this container lives.

What runs is the command line of the container's first process: a router answers `GET /health`, a control
plane `grpc.health.v1` for "liveness". Neither asks for the store or for engines: what watches containers
replaces those that are unhealthy, and that mends neither. Where a control plane has TLS, its health is for
callers it knows, and the port of its metrics answers instead; without that one, that its port takes
connections has to do. Hosts and ports are those of the flags, or of KVPLANE_PORT and the like, else the
defaults.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS = 4.0


def main(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Return 0 if what was started with these words, in this environment, lives; else 1, after one line."""

    def given(name: str, default: str) -> str:
        return _value(name, default, words, variables)

    command = next((word for word in words if word in ("serve", "route", "up")), "")
    problem = f"no kvplane serve, route or up: {' '.join(words)!r}" if not command else ""
    if command in ("serve", "up"):
        host, port = _reached(given("grpc-host", "127.0.0.1")), int(given("grpc-port", "50051"))
        if not given("grpc-tls-cert", ""):
            problem = control_plane(host, port)
        elif metrics_port := given("metrics-port", ""):
            scheme = "https" if given("metrics-tls-cert", "") else "http"
            problem = page(scheme, _reached(given("metrics-host", "127.0.0.1")), int(metrics_port))
        else:
            problem = connection(host, port)
    if command in ("route", "up") and not problem:
        scheme = "https" if given("tls-cert", "") else "http"
        problem = page(scheme, _reached(given("host", "127.0.0.1")), int(given("port", "8000")))
    if problem:
        print(problem)
    return 1 if problem else 0


def connection(host: str, port: int) -> str:
    """Return what is wrong with connecting to a port, "" if nothing is."""
    try:
        with socket.create_connection((host, port), SECONDS):
            return ""
    except OSError as error:
        return f"port {port}: {error}"


def control_plane(host: str, port: int) -> str:
    """Return what is wrong with the control plane at a port in clear, "" if nothing is."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(_joined(host, port)) as channel:
        try:
            asked = health_pb2.HealthCheckRequest(service="liveness")
            status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=SECONDS).status
        except grpc.RpcError as error:
            return f"port {port}: {error.code().name}"
    return "" if status == health_pb2.HealthCheckResponse.SERVING else f"port {port}: not serving"


def page(scheme: str, host: str, port: int) -> str:
    """Return what is wrong with `/health` at a port, "" if nothing is.

    A certificate is for the names that others use, and not looked at.
    """
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        url = f"{scheme}://{_joined(host, port)}/health"
        with urllib.request.urlopen(url, timeout=SECONDS, context=context if scheme == "https" else None):
            return ""
    except (OSError, urllib.error.URLError) as error:
        return f"port {port}: {error}"


def _reached(host: str) -> str:
    """Return where this container reaches what listens on a host."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))  # noqa: S104


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _value(name: str, default: str, words: Sequence[str], variables: Mapping[str, str]) -> str:
    for at, word in enumerate(words):
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
        if word == f"--{name}" and at + 1 < len(words):
            return words[at + 1]
    return variables.get(f"KVPLANE_{name.upper().replace('-', '_')}", default)


if __name__ == "__main__":
    started = Path("/proc/1/cmdline").read_bytes().decode().split("\0")
    sys.exit(main(started, os.environ))
