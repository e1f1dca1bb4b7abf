"""Run one command and make sure that it never outlives the program that wanted it.

usage: python -I guard.py [--core N] -- COMMAND ARGUMENT...

Standard input is the lifeline: a pipe whose other end the program holds. The kernel closes that end however
the program goes, even by SIGKILL, and then the command's whole process group is killed. That matters with
vLLM, whose engine core is a child of its own and survives when only the API server is killed.

SIGTERM is passed on to the command alone, so that it can end in its own way; whatever it leaves behind in its
group is killed after it. The exit code is the command's (128 + signal number if a signal ended it).
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_SECONDS = 5.0


def _die_with_guard() -> None:
    """Ask the kernel for a SIGTERM should the guard itself be killed (runs in the child before exec)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _reap_orphans() -> None:
    """Collect what the command left behind, so that no dead process stays in the table of a container.

    A process that moved to a group of its own is no longer ours; it is not waited for beyond REAP_SECONDS.
    """
    deadline = time.monotonic() + REAP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def run(command: list[str], core: int | None) -> int:
    """Run `command` until it ends or standard input closes; returns the exit code to pass on."""
    if core is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})  # inherited by the command
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # the command's orphans come to us, not to init
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    # Only a signal with a handler of its own writes to the wake-up pipe.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_guard,  # this process has one thread
    ) as child:

        def pass_on(number: int, frame: object) -> None:
            child.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        try:
            while child.poll() is None:
                readable, _, _ = select.select([0, wake_read], [], [])
                if wake_read in readable:
                    os.read(wake_read, 4096)
                if 0 in readable and not os.read(0, 4096):
                    break
        finally:
            _kill_group(child.pid)
    _reap_orphans()
    code = child.returncode
    return code if code >= 0 else 128 - code


def main() -> None:
    """Parse the command line and exit as the command did."""
    parser = argparse.ArgumentParser(description="run a command that dies with its owner")
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    sys.exit(run(command, options.core))


if __name__ == "__main__":
    main()
