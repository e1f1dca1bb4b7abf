"""`kvplane up` (router and control plane in one process) as a process of the rig."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports


class Plane(RigProcess):
    """Router and control plane for the engines at the given base URLs, on free ports unless given.

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
        self.port = free[0] if port is None else port
        self.grpc_port = free[1] if grpc_port is None else grpc_port
        self.url = f"http://{LOCALHOST}:{self.port}"
        self.grpc_address = f"{LOCALHOST}:{self.grpc_port}"
        engines = [
            *(argument for url in prefill_urls for argument in ("--prefill", url)),
            *(argument for url in decode_urls for argument in ("--decode", url)),
        ]
        ports = ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        program = "import sys; from kvplane.cli.main import main; sys.exit(main())"
        super().__init__(
            "kvplane up",
            [sys.executable, "-c", program, "up", *engines, *ports, *extra],
            environment=dict(os.environ),
            log_file=log_file,
            ready_url=f"{self.url}/health",
        )

    def wait_engines(self, timeout: float = 60.0) -> None:
        """Block until the router has seen every engine answer and has no other problem.

        `timeout` is in seconds. Raises RigError with what the router names as its problems.
        """
        deadline = time.monotonic() + timeout
        while problems := self.problems():
            if time.monotonic() > deadline:
                raise RigError(f"the router is not ready: {'; '.join(problems)}\n{self.log_tail()}")
            time.sleep(0.25)

    def problems(self) -> list[str]:
        """What the router's /ready page complains about now; empty when all is well."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5.0) as answer:
                page = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                page = json.load(error)
        except OSError as error:
            return [f"no answer: {error}"]
        found: list[str] = page["problems"]
        return found if found or page["ready"] else ["not ready"]
