"""Everything one conversation needs: `kvplane up`, one prefill and one decode engine."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deploy.rig.engines import Engine, EngineSettings, Role
from deploy.rig.plane import Plane
from deploy.rig.process import LOCALHOST, RigProcess, free_ports

StackProgress = Callable[[str, float, str], None]
"""Called while a program starts: its name, seconds waited, last line of its log."""


class Stack:
    """One prefill engine without prefix caching, one decode engine with it, and the plane before them.

    P's prefix cache is off as in the published benchmark: it stands for a P that evicted the conversation or
    never had it. `prefill_options` and `decode_options` override members of EngineSettings; `dtype` goes to
    both, which must agree.
    """

    def __init__(
        self,
        *,
        venv: Path,
        model: Path,
        log_dir: Path,
        dtype: str = "bfloat16",
        prefill_options: Mapping[str, Any] | None = None,
        decode_options: Mapping[str, Any] | None = None,
        plane_arguments: Sequence[str] = (),
    ) -> None:
        port, grpc_port = free_ports(2)
        common: dict[str, Any] = {
            "venv": venv,
            "model": model,
            "dtype": dtype,
            "kvplane_address": f"{LOCALHOST}:{grpc_port}",
        }
        for_prefill: dict[str, Any] = {
            **common,
            "role": Role.PREFILL,
            "core": 0,
            "log_file": log_dir / "prefill.log",
            "prefix_caching": False,
        }
        for_decode: dict[str, Any] = {
            **common,
            "role": Role.DECODE,
            "core": 1,
            "log_file": log_dir / "decode.log",
        }
        self.prefill = Engine(EngineSettings(**for_prefill | dict(prefill_options or {})))
        self.decode = Engine(EngineSettings(**for_decode | dict(decode_options or {})))
        self.plane = Plane(
            prefill_urls=[self.prefill.url],
            decode_urls=[self.decode.url],
            log_file=log_dir / "kvplane.log",
            port=port,
            grpc_port=grpc_port,
            extra=plane_arguments,
        )
        self._stops = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """Base URL of the router."""
        return self.plane.url

    def start(self, timeout: float = 300.0, progress: StackProgress | None = None) -> None:
        """Start all three and wait until they are ready; `timeout` in seconds for each.

        Raises RigError when one does not come up; everything is stopped then.
        """
        everything: Sequence[RigProcess] = (self.plane, self.prefill, self.decode)
        with contextlib.ExitStack() as undo:
            for program in everything:
                program.start()
                undo.callback(program.stop)
            for program in (self.plane, self.prefill, self.decode):
                name = program.name

                def report(waited: float, line: str, name: str = name) -> None:
                    if progress is not None:
                        progress(name, waited, line)

                program.wait_ready(timeout, report)
            self.plane.wait_engines(announcing=self.decode.settings.connector == "kvplane")
            self._stops = undo.pop_all()

    def stop(self) -> None:
        """Stop what is running, engines first; nothing of them is left afterwards."""
        self._stops.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
