"""Start what is in `compose.yaml` as plain processes, put it under load, and take parts of it away.

First one control plane and the leading etcd member are killed, then all control planes and all routers are
restarted one after the other. No request may fail, no stream may break, and every answer must be right; else
the exit code is 1. `--up` only starts everything, and stays until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.compose.load import Load, Tally
from deploy.compose.topology import Service, Topology
from deploy.rig.envoy import healthy
from deploy.rig.process import RigError

_RETURN_S = 60.0
_LONGEST_S = 86_400.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much.

    Attributes:
        seconds: of load before, between and after the steps.
        conversations: at a time.
    """

    seconds: float = 10.0
    conversations: int = 16


class Steps:
    """What is done to a topology under load; blocking."""

    def __init__(self, topology: Topology, plan: Plan, tally: Tally, say: Say) -> None:
        self._topology, self._plan, self._tally, self._say = topology, plan, tally, say

    def run(self) -> None:
        """Do all of it. Raises RigError where something does not come back."""
        self._pause()
        self.kill()
        self._pause()
        self.restart()
        self._pause()

    def kill(self) -> None:
        """Kill a control plane and etcd's leader at once, and bring both back."""
        plane, member = self._topology.of_kind("serve")[0], self._leader()
        self._tell(f"killing {plane.name} and {member.name}, which leads")
        plane.kill()
        member.kill()
        self._pause()
        for service in (member, plane):
            service.start()
        for service in (member, plane):
            service.wait_ready(_RETURN_S)
        self._say(f"{plane.name} and {member.name} are back")

    def restart(self) -> None:
        """Restart every control plane and every router, one after the other."""
        for service in (*self._topology.of_kind("serve"), *self._topology.of_kind("route")):
            self._tell(f"restarting {service.name}")
            service.stop(_RETURN_S)
            service.start()
            service.wait_ready(_RETURN_S)
            if service.kind == "route":
                self._until_front_sees_all()

    def _leader(self) -> Service:
        ends = time.monotonic() + _RETURN_S
        while time.monotonic() < ends:
            for member in self._topology.of_kind("etcd"):
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://{member.address}:2379/metrics", timeout=2.0) as answer,
                ):
                    if b"\netcd_server_is_leader 1\n" in answer.read():
                        return member
            time.sleep(0.1)
        raise RigError("no etcd member leads")

    def _until_front_sees_all(self) -> None:
        """Wait until Envoy sends to all routers again."""
        (front,) = self._topology.of_kind("envoy")
        wanted, ends = len(self._topology.of_kind("route")), time.monotonic() + _RETURN_S
        while healthy(f"http://{front.address}:9901", "routers") < wanted:
            if time.monotonic() > ends:
                raise RigError(f"Envoy does not find all routers\n{front.log_tail()}")
            time.sleep(0.1)

    def _tell(self, text: str) -> None:
        self._say(f"{text} ({self._tally.open_streams} streams open, {self._tally.requests} requests so far)")

    def _pause(self) -> None:
        time.sleep(self._plan.seconds)


async def _play(topology: Topology, plan: Plan, say: Say) -> Tally:
    load = Load(topology.url, plan.conversations)
    talking = asyncio.create_task(load.run())
    try:
        await asyncio.to_thread(Steps(topology, plan, load.tally, say).run)
    finally:
        load.ending.set()
        await talking
    return load.tally


def play(topology: Topology, plan: Plan, say: Say = print) -> Tally:
    """Load what runs, break it, mend it; blocking. Raises RigError where something does not come back."""
    say(f"{len(topology.services)} services are up, behind {topology.url}")
    tally = asyncio.run(_play(topology, plan, say))
    if ended := [service.name for service in topology.services.values() if not service.running]:
        raise RigError(f"ended by themselves: {', '.join(ended)}")
    return tally


def seconds(text: str) -> float:
    """Read a flag's seconds: a positive number. Raises argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= _LONGEST_S:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, up to {_LONGEST_S:.0f}")


def conversations(text: str) -> int:
    """Read a flag's number of conversations: at least 1. Raises argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")


def unfit(folder: Path) -> str | None:
    """Make the folder of a run; return why it cannot be that, None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return "is not empty, and etcd does not start from data of a run that had other addresses"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _stay(folder: Path) -> None:
    with Topology(folder) as topology:
        for service in topology.services.values():
            print(f"{service.name:<15} {service.address:<16} {service.log_file}")
        print(f"\nask {topology.url}/v1/chat/completions, model fake; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(prog="python -m deploy.compose.run", description=__doc__)
    parser.add_argument("--up", action="store_true", help="start it, and stay")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="of load between steps (default: 10)")
    parser.add_argument("--conversations", type=conversations, default=16, help="at a time (default: 16)")
    parser.add_argument("--folder", type=Path, help="keep logs and data here")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-compose-")))
        elif trouble := unfit(folder):
            parser.error(f"--folder {folder}: {trouble}")
        try:
            if options.up:
                _stay(folder)
                return 0
            print("starting", flush=True)
            with Topology(folder) as topology:
                tally = play(topology, Plan(options.seconds, options.conversations))
        except RigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(tally.report())
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
