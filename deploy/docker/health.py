"""The image's health check: 0 if what runs in this container serves.

What runs is the command line of the container's first process: a router answers `GET /health`, a control
plane `grpc.health.v1`. Ports are those of the flags, or of KVPLANE_PORT and KVPLANE_GRPC_PORT, else the
defaults. Where a control plane has TLS, that its port takes connections has to do: its health is for callers
it knows.
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
    """Return 0 if what was started with these words, in this environment, serves; else 1, after one line."""
    command = next((word for word in words if word in ("serve", "route", "up")), "")
    problem = f"no kvplane serve, route or up: {' '.join(words)!r}" if not command else ""
    if command in ("serve", "up"):
        problem = control_plane(int(_value("grpc-port", "50051", words, variables)), _tls(words, variables))
    if command in ("route", "up") and not problem:
        scheme = "https" if _value("tls-cert", "", words, variables) else "http"
        problem = router(scheme, int(_value("port", "8000", words, variables)))
    if problem:
        print(problem)
    return 1 if problem else 0


def control_plane(port: int, tls: bool) -> str:
    """Return what is wrong with the control plane at a port, "" if nothing is."""
    if tls:
        try:
            with socket.create_connection(("127.0.0.1", port), SECONDS):
                return ""
        except OSError as error:
            return f"port {port}: {error}"
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            asked = health_pb2.HealthCheckRequest()
            status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=SECONDS).status
        except grpc.RpcError as error:
            return f"port {port}: {error.code().name}"
    return "" if status == health_pb2.HealthCheckResponse.SERVING else f"port {port}: not serving"


def router(scheme: str, port: int) -> str:
    """Return what is wrong with the router at a port, "" if nothing is.

    Its certificate is for the names that others use, and not looked at.
    """
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        url = f"{scheme}://127.0.0.1:{port}/health"
        with urllib.request.urlopen(url, timeout=SECONDS, context=context if scheme == "https" else None):
            return ""
    except (OSError, urllib.error.URLError) as error:
        return f"port {port}: {error}"


def _value(name: str, default: str, words: Sequence[str], variables: Mapping[str, str]) -> str:
    for at, word in enumerate(words):
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
        if word == f"--{name}" and at + 1 < len(words):
            return words[at + 1]
    return variables.get(f"KVPLANE_{name.upper().replace('-', '_')}", default)


def _tls(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    return bool(_value("grpc-tls-cert", "", words, variables))


if __name__ == "__main__":
    started = Path("/proc/1/cmdline").read_bytes().decode().split("\0")
    sys.exit(main(started, os.environ))
