"""kvplane's own commands as programs of the rig: `up`, or `serve` and `route` apart."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports

_PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")


def _engines(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> list[str]:
    return [
        *(argument for url in prefill_urls for argument in ("--prefill", url)),
        *(argument for url in decode_urls for argument in ("--decode", url)),
    ]


def is_serving(address: str) -> bool:
    """Whether the health service at host:port says SERVING."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class ControlPlane(RigProcess):
    """`kvplane serve` on loopback."""

    def __init__(self, *, port: int, log_file: Path, extra: Sequence[str] = ()) -> None:
        self.address = f"{LOCALHOST}:{port}"
        super().__init__(
            "kvplane serve",
            [*_PROGRAM, "serve", "--grpc-port", str(port), *extra],
            environment=dict(os.environ),
            log_file=log_file,
            ready_url="",
        )

    def is_ready(self) -> bool:
        """Whether its health service says SERVING."""
        return is_serving(self.address)


class Router(RigProcess):
    """A router for the engines at the given base URLs. With `command` "up", the control plane is in it."""

    def __init__(
        self,
        *,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        port: int,
        log_file: Path,
        extra: Sequence[str] = (),
        command: str = "route",
    ) -> None:
        self.port = port
        self.url = f"http://{LOCALHOST}:{port}"
        engines = _engines(prefill_urls, decode_urls)
        super().__init__(
            f"kvplane {command}",
            [*_PROGRAM, command, *engines, "--port", str(port), *extra],
            environment=dict(os.environ),
            log_file=log_file,
            ready_url=f"{self.url}/health",
        )

    def wait_engines(self, timeout: float = 60.0, *, announcing: bool = True) -> None:
        """Block until the router has seen every engine answer and has no other problem.

        `timeout` is in seconds. With `announcing` False it is enough that they answer: vLLM's own connector
        announces nothing, which the router rightly calls a problem. Raises RigError with what the router
        names as its problems.
        """
        deadline = time.monotonic() + timeout
        while problems := self.problems(announcing=announcing):
            if time.monotonic() > deadline:
                raise RigError(f"the router is not ready: {'; '.join(problems)}\n{self.log_tail()}")
            time.sleep(0.25)

    def problems(self, *, announcing: bool = True) -> list[str]:
        """What the router's /ready page complains about now; empty when all is well.

        With `announcing` False, only which engines do not answer.
        """
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5.0) as answer:
                page = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                page = json.load(error)
        except OSError as error:
            return [f"no answer: {error}"]
        if not announcing:
            engines: dict[str, str] = page["prefill"] | page["decode"]
            return [f"{url} is {state}" for url, state in engines.items() if state != "up"]
        found: list[str] = page["problems"]
        return found if found or page["ready"] else ["not ready"]


class Plane(Router):
    """`kvplane up`: router and control plane in one process, on free ports unless given.

    It may be started before the engines: they register with it when they come up.
    """

    def __init__(
        self,
        *,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        log_file: Path,
        port: int | None = None,
        grpc_port: int | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        free = free_ports(2)
        self.grpc_port = free[1] if grpc_port is None else grpc_port
        self.grpc_address = f"{LOCALHOST}:{self.grpc_port}"
        super().__init__(
            prefill_urls=prefill_urls,
            decode_urls=decode_urls,
            port=free[0] if port is None else port,
            log_file=log_file,
            extra=["--grpc-port", str(self.grpc_port), *extra],
            command="up",
        )
