"""make upgrade-check FROM=REF: a fleet goes from an older version to this one, one by one, under load.

Two control planes over one etcd, a router and two fake engines of the older version serve conversations.
Then, as deploy/OPERATING.md says: the control planes are replaced one after the other, then the router, and
one control plane goes back to the older version. Nothing may fail, and nothing that was retained may be lost.
Exit codes: 0 so it was; 1 it was not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from deploy.release.environments import ROOT, ReleaseError, environment, run, with_extras
from deploy.release.smoke import Program, Serving, chat, end, fake_engine, router
from deploy.rig.etcd import EtcdServer
from deploy.rig.process import LOCALHOST, RigError, free_ports

QUIET = 40
"""Conversations that are retained before the upgrade, and go on after it."""
PAUSE_S = 0.3
"""Between turns under load: faster, they would fill the fake engine's 4,096 blocks within the upgrade, and it
would rightly give up what is oldest, which is what has to last."""


def older_tree(ref: str, folder: Path) -> Path:
    """Unpack the source of a commit, tag or branch into a folder. Raises ReleaseError."""
    archive = folder / "older.tar"
    run(["git", "archive", "--format=tar", "--output", archive, ref])
    tree = folder / "older"
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return tree


def previous_release() -> str | None:
    """Return the newest tag before this commit, None where there is none."""
    done = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "HEAD^"],  # noqa: S607 - developers' git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def wheel_of(tree: Path, folder: Path) -> Path:
    """Build the wheel of a source tree. Raises ReleaseError."""
    run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, tree])
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclass
class Load:
    """Conversations that go on, turn by turn, on threads of their own, until they are stopped."""

    port: int
    """Of the router; may be changed while it runs."""
    count: int = 4
    turns: int = 0
    reused: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin."""
        self._threads = [
            threading.Thread(target=self._talk, args=(number,), daemon=True) for number in range(self.count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, when the requests under way have."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def settle(self, turns: int = 12) -> None:
        """Wait until so many more turns are done. Raises ReleaseError for those that failed."""
        goal = self.turns + turns
        for _ in range(600):
            if self.turns >= goal or self.failures:
                break
            self._stop.wait(0.1)
        if self.failures or self.turns < goal:
            raise ReleaseError(f"under load: {self.failures or 'requests do not come through'}")

    def _talk(self, number: int) -> None:
        talk = 0
        while not self._stop.is_set():
            talk += 1
            history = [{"role": "user", "content": f"load {number} {talk} " * 12}]
            name = f"load-{number}-{talk}"
            try:
                for _ in range(5):
                    reply, path = chat(self.port, history, name)
                    self.turns += 1
                    self.reused += path != "cold"
                    history += [
                        {"role": "assistant", "content": reply},
                        {"role": "user", "content": "go on"},
                    ]
                    self._stop.wait(PAUSE_S)
                end(self.port, name)
            except ReleaseError as error:
                self.failures.append(str(error))
                return


class Fleet:
    """The parts, of which each can be of either version."""

    def __init__(self, folder: Path, older: Path, newer: Path, store: str, tree: Path) -> None:
        ports = free_ports(6)
        self.folder, self.older, self.newer, self.store, self.tree = folder, older, newer, store, tree
        self.ports, self.http = ports[:2], ports[2:4]
        self.prefill, self.decode = ports[4:]
        self.plane = ",".join(f"{LOCALHOST}:{port}" for port in self.ports)
        self.parts: list[Program] = []
        self.replicas: dict[int, Program] = {}

    def replica(self, number: int, programs: Path) -> None:
        """Start a control plane, and wait until it serves; one that runs there is stopped before."""
        if number in self.replicas:
            self.replicas[number].stop()
        name = f"replica {number} {self._version(programs)}"
        program = Serving(programs, self.folder, name, self.ports[number], "--store", self.store)
        program.start()
        self.parts.append(program)
        program.wait_ready(60)
        self.replicas[number] = program

    def router(self, number: int, programs: Path) -> Program:
        """Start a router and wait until it is ready."""
        engines = [
            word
            for flag, port in (("--prefill", self.prefill), ("--decode", self.decode))
            for word in (flag, f"http://{LOCALHOST}:{port}")
        ]
        name = f"router {number} {self._version(programs)}"
        program = router(programs, self.folder, name, self.http[number], self.plane, *engines)
        program.start()
        self.parts.append(program)
        program.wait_ready(60)
        return program

    def engines(self, programs: Path) -> None:
        """Start the engines and wait until they answer."""
        for role, port in (("prefill", self.prefill), ("decode", self.decode)):
            engine = fake_engine(programs, self.folder, role, port, self.plane, tree=self.tree)
            engine.start()
            self.parts.append(engine)
            engine.wait_ready(60)

    def retained(self) -> set[str]:
        """Return the conversations that are on record, but for those of the load. Raises ReleaseError."""
        command = [str(self.newer / "kvplane"), "conversations", "--all", "--prefix", "quiet-"]
        said = run([*command, "--output", "json", "--plane", self.plane])
        return {record["conversation_id"] for record in json.loads(said)["conversations"]}

    def stop(self) -> None:
        """Stop everything that was started."""
        for part in reversed(self.parts):
            part.stop()

    def _version(self, programs: Path) -> str:
        return "newer" if programs == self.newer else "older"


def upgrade(fleet: Fleet) -> str:
    """Play the upgrade; return what was seen. Raises ReleaseError and RigError."""
    for number in (0, 1):
        fleet.replica(number, fleet.older)
    fleet.engines(fleet.older)
    first = fleet.router(0, fleet.older)
    histories = {}
    for number in range(QUIET):
        history = [{"role": "user", "content": f"quiet {number} " * 40}]
        reply, _ = chat(fleet.http[0], history, f"quiet-{number}")
        histories[f"quiet-{number}"] = [
            *history,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "and now?"},
        ]
    before = fleet.retained()
    if len(before) != QUIET:
        raise ReleaseError(f"{len(before)} of {QUIET} conversations were retained to begin with")
    load = Load(fleet.http[0])
    load.start()
    try:
        load.settle()
        for number in (0, 1):
            fleet.replica(number, fleet.newer)
            load.settle()
            _same(before, fleet.retained(), f"control plane {number} is new")
        fleet.router(1, fleet.newer)
        load.port = fleet.http[1]
        load.settle()
        first.stop(40)
        load.settle()
        fleet.replica(0, fleet.older)
        load.settle()
        _same(before, fleet.retained(), "control plane 0 is old again")
        fleet.replica(0, fleet.newer)
        load.settle()
        _same(before, fleet.retained(), "control plane 0 is new again")
    finally:
        load.stop()
    if load.failures:
        raise ReleaseError(f"under load: {load.failures}")
    paths = {name: chat(fleet.http[1], history, name)[1] for name, history in histories.items()}
    cold = sorted(name for name, path in paths.items() if path == "cold")
    if cold:
        raise ReleaseError(f"retained before the upgrade, cold after it: {', '.join(cold)}")
    if not load.reused:
        raise ReleaseError("no turn under load reused anything")
    return (
        f"{load.turns} turns under load, {load.reused} of them reused, 0 failed;"
        f" {len(paths)} conversations retained before go on, none cold"
    )


def _same(before: set[str], now: set[str], when: str) -> None:
    if before - now:
        raise ReleaseError(f"{when}: lost {', '.join(sorted(before - now))}")


def main() -> int:
    """Build both versions, play the upgrade. See the module for exit codes."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.upgrade", description=__doc__)
    parser.add_argument("--from", dest="ref", help="commit, tag or branch of the older version")
    options = parser.parse_args()
    ref = options.ref or previous_release()
    if ref is None:
        print(
            "error: there is no tag: name the older version with --from REF (make: FROM=REF)", file=sys.stderr
        )
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="kvplane-upgrade-") as made:
            folder = Path(made)
            tree = older_tree(ref, folder)
            wheels = wheel_of(tree, folder / "old-dist"), wheel_of(ROOT, folder / "new-dist")
            older, newer = (
                environment(folder / name, Path(sys.executable), with_extras(wheel, "router"))
                for name, wheel in zip(("old-venv", "new-venv"), wheels, strict=True)
            )
            with EtcdServer(folder / "etcd" / "data") as etcd:
                etcd.wait_ready()
                fleet = Fleet(folder / "logs", older, newer, f"etcd://{etcd.endpoint}/upgrade", tree)
                try:
                    print(f"from {ref}: {upgrade(fleet)}", flush=True)
                except (ReleaseError, RigError):
                    for part in fleet.parts:
                        print(part.log_tail(8), file=sys.stderr)
                    raise
                finally:
                    fleet.stop()
                check = [str(newer / "kvplane"), "store", "check", "--store", fleet.store]
                print(run(check).strip().splitlines()[-1], flush=True)
    except (ReleaseError, RigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
