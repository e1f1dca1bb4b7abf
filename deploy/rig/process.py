"""Start and stop the programs of the rig: each with a log file, none able to outlive us (see guard.py)."""

import contextlib
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.rig.usage import Usage, usage_of

_ERROR_LINE = re.compile(r"(?:error:|(?:[\w.]+\.)?\w*(?:Error|Exception): )")
GUARD = Path(__file__).with_name("guard.py")
LOCALHOST = "127.0.0.1"

Progress = Callable[[float, str], None]
"""Called while something starts: seconds waited, and the last line of its log."""


_given_out: set[int] = set()
_LOWEST, _HIGHEST = 10_240, 32_767
"""Ports to give out: below those that systems take for outgoing connections (Linux: from 32768 on)."""
_chance = random.SystemRandom()


class RigError(Exception):
    """A program of the rig did not start, died or did not answer; the text says which and what to do."""


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports of the loopback address that nothing listens on now.

    No port is given out twice in the life of this program, and none that an outgoing connection of anybody
    could take before it is used; another program that listens still could.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = _chance.randint(_LOWEST, _HIGHEST)
        if port in _given_out or not _is_free(port):
            continue
        _given_out.add(port)
        ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    """Whether nothing listens on a port of the loopback address, or of all addresses."""
    with socket.socket() as probe:
        try:
            probe.bind((LOCALHOST, port))
        except OSError:
            return False
    return True


def answers(url: str, timeout: float = 2.0) -> bool:
    """Whether a GET of `url` comes back with a 2xx status within `timeout` seconds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout):
            return True
    except (OSError, urllib.error.URLError, ValueError):
        return False


class RigProcess:
    """One program under guard. Reusable: after `stop` or `kill` it can be started again, same command.

    `core` pins it (and its children) to the n-th core this process may use; None leaves it free.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_file: Path,
        ready_url: str,
        core: int | None = None,
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._command = list(command)
        self._environment = dict(environment)
        self._ready_url = ready_url
        self._core = core
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the program was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    def usage(self) -> Usage:
        """CPU time of the program and all it started, since it started.

        Raises RigError when it is not running.
        """
        if self._guard is None:
            raise RigError(f"{self.name} is not running")
        try:
            return usage_of(self._guard.pid)
        except ProcessLookupError:
            raise RigError(f"{self.name} has ended\n{self.log_tail()}") from None

    def start(self) -> None:
        """Start the program and return at once; its output is appended to `log_file`.

        Raises RigError when it is already running.
        """
        if self.running:
            raise RigError(f"{self.name} is already running")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        pinned = [] if self._core is None else ["--core", str(self._core)]
        with self.log_file.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *pinned, "--", *self._command],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal reaches us only; we stop it in order
            )

    def is_ready(self) -> bool:
        """Whether the program answers its health URL now."""
        return answers(self._ready_url)

    def wait_ready(self, timeout: float = 300.0, progress: Progress | None = None) -> None:
        """Block until the program is ready.

        `timeout` is in seconds. Raises RigError, with the tail of the log, when the program ends before it is
        ready or is not ready in time (it is then killed).
        """
        begin = time.monotonic()
        while not self.is_ready():
            waited = time.monotonic() - begin
            if self._guard is None or self._guard.poll() is not None:
                code = None if self._guard is None else self._guard.returncode
                raise RigError(
                    f"{self.name} ended while starting (exit code {code}){self._cause()}\n{self.log_tail()}"
                )
            if waited > timeout:
                self.kill()
                raise RigError(f"{self.name} was not ready after {timeout:.0f} s\n{self.log_tail()}")
            if progress is not None:
                progress(waited, self.last_line())
            time.sleep(0.25)

    def stop(self, grace: float = 20.0) -> None:
        """End the program with SIGTERM, and its whole process group with SIGKILL after `grace` seconds.

        Returns when nothing of it is left. Does nothing when it is not running.
        """
        guard = self._guard
        if guard is None:
            return
        guard.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(grace)
        self.kill()

    def kill(self) -> None:
        """End the program's whole process group with SIGKILL, as a crash would; nothing if not running."""
        guard = self._guard
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()  # the lifeline: the guard kills the group and follows
        guard.wait()
        self._guard = None

    def restart(self, timeout: float = 300.0, progress: Progress | None = None) -> None:
        """Stop, start again with the same command on the same address, and wait until ready."""
        self.stop()
        self.start()
        self.wait_ready(timeout, progress)

    def last_line(self) -> str:
        """The last non-empty line of the log, or an empty string."""
        lines = [line for line in self._read_tail(4096).splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def log_tail(self, lines: int = 20) -> str:
        """The last `lines` lines of the log, under a line that names the file."""
        text = "\n".join(self._read_tail(65536).splitlines()[-lines:])
        return f"--- the end of {self.log_file} ---\n{text}"

    def _cause(self) -> str:
        """The last line of the log's end that looks like a Python error, as a suffix; else nothing."""
        lines = [line.strip() for line in self._read_tail(16384).splitlines()]
        causes = [line for line in lines if _ERROR_LINE.match(line)]
        return f": {causes[-1][:200]}" if causes else ""

    def _read_tail(self, size: int) -> str:
        try:
            with self.log_file.open("rb") as log:
                log.seek(0, 2)
                log.seek(max(0, log.tell() - size))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
