"""What happened, as each process saw it: one JSON line per event, times of the machine's monotonic clock.

That clock is one for all processes of a machine, so events of different files can be ordered. What an engine
is about to say is written before it is said, so that a killed engine leaves nothing unsaid in its history.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Whose blocks: unique for good."""

    engine_id: str
    engine_epoch: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Registered:
    """An engine was given an epoch."""

    engine_id: str
    engine_epoch: int
    invoked: float
    answered: float


@dataclass(frozen=True, slots=True)
class Announcing:
    """An engine is about to announce; `deadline` is the time of sending and the announced ttl."""

    place: Place
    conversation: str
    turn: int
    deadline: float
    at: float


@dataclass(frozen=True, slots=True)
class Announced:
    """The answer to the latest announcement of a place."""

    place: Place
    outcome: str
    at: float


@dataclass(frozen=True, slots=True)
class Renewing:
    """An engine is about to set a place's life anew."""

    place: Place
    deadline: float
    at: float


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to the latest renewal of a place."""

    place: Place
    renewed: bool
    at: float


@dataclass(frozen=True, slots=True)
class MayFree:
    """The control plane let an engine free: a withdrawal agreed to, a release order, a refusal."""

    place: Place
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class Died:
    """An engine's process was killed; `at` is after the kill."""

    engine_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Granted:
    """A claim was granted. `timeout_s` is the reader's time as the answer has it."""

    place: Place
    conversation: str
    turn: int
    claim_id: str
    owner: str
    timeout_s: float
    remaining_s: float
    invoked: float
    answered: float
    replica: str


@dataclass(frozen=True, slots=True)
class Finishing:
    """A reader is about to finish its claim."""

    claim_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Offered:
    """A location in the answer to a lookup or begin-turn, which takes nothing."""

    place: Place
    conversation: str
    turn: int
    remaining_s: float
    invoked: float
    answered: float
    replica: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn was numbered."""

    conversation: str
    request_id: str
    turn: int
    invoked: float
    answered: float


@dataclass(frozen=True, slots=True)
class Counted:
    """Attempts, and answers that handed nothing out, since the last such line, by name."""

    counts: dict[str, int]
    at: float


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the router-like caller: "hit", "cold" or "failed"."""

    outcome: str
    detail: str
    invoked: float
    answered: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was there from `began` to `ended`. Recovery is due `recovers_within_s` after its end."""

    name: str
    began: float
    ended: float
    recovers_within_s: float = field(default=15.0)


Event = (
    Registered
    | Announcing
    | Announced
    | Renewing
    | Renewed
    | MayFree
    | Died
    | Granted
    | Finishing
    | Offered
    | Begun
    | Counted
    | Request
    | Fault
)
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        Registered,
        Announcing,
        Announced,
        Renewing,
        Renewed,
        MayFree,
        Died,
        Granted,
        Finishing,
        Offered,
        Begun,
        Counted,
        Request,
        Fault,
    )
}


class Recorder:
    """Appends events to a file; an event is in the file when `record` returns, whoever is killed then."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._counts: dict[str, int] = {}
        self._counted_at = time.monotonic()

    def record(self, event: Event) -> None:
        """Write an event."""
        line = {"kind": type(event).__name__}
        line |= {member.name: getattr(event, member.name) for member in fields(event)}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def count(self, name: str, number: int = 1) -> None:
        """Add to a count; counts are written about twice a second, so a kill loses the last of them."""
        self._counts[name] = self._counts.get(name, 0) + number
        now = time.monotonic()
        if now - self._counted_at > 0.5:
            self.flush()

    def flush(self) -> None:
        """Write the counts."""
        self._counted_at = time.monotonic()
        if self._counts:
            counts, self._counts = self._counts, {}
            self.record(Counted(counts, self._counted_at))

    def close(self) -> None:
        """Write the counts and close the file."""
        self.flush()
        os.close(self._file)


class Reader:
    """Reads what is new in a directory of histories at each call of `new`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """Return the events written since the last call; a line that a kill cut short is left out."""
        found = list[Event]()
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole, _, _ = data.rpartition(b"\n")
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
                found.extend(parse(whole.split(b"\n")))
        return found


def parse(lines: Iterable[bytes]) -> Iterator[Event]:
    """Return the events of JSON lines."""
    for line in lines:
        values = json.loads(line)
        kind = _KINDS[values.pop("kind")]
        if "place" in values:
            values["place"] = Place(*values["place"])
        yield kind(**values)
