"""What happens to the fleet, and when: a file of events, checked as it is read."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplane.bench.rig import BenchError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Happening:
    """One event; times are in seconds.

    Attributes:
        at: since the beginning.
        do: what happens, one of `KINDS`.
        role: of the engines it happens to.
        count: how many of them; 0 for all.
        down: for how long those that die are gone; 0 for good.
        every: from one engine to the next.
        drain: for how long engines that leave finish what they have, at most.
        replica: the control plane that is lost.
    """

    at: float
    do: str
    role: str = "decode"
    count: int = 1
    down: float = 60.0
    every: float = 10.0
    drain: float = 60.0
    replica: int = 0


KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("role", "count", "down"),
    "rolling-restart": ("role", "count", "down", "every", "drain"),
    "scale-up": ("role", "count"),
    "scale-down": ("role", "count", "drain"),
    "stop-plane": ("replica", "down"),
}
"""What may happen, and which fields say how."""


def read(path: Path) -> list[Happening]:
    """Return the events of a TOML file, `[[event]]` each, in order. Raises BenchError, one line."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {error}") from None
    unknown = next((name for name in document if name != "event"), None)
    if unknown is not None:
        raise BenchError(f"{path}: {unknown}: unknown; write each event as [[event]]")
    events = document.get("event")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise BenchError(f"{path}: event: write each as [[event]]")
    made = [_happening(event, f"{path}, event {number}") for number, event in enumerate(events, 1)]
    return sorted(made, key=lambda happening: happening.at)


def _happening(event: dict[str, Any], where: str) -> Happening:
    do = event.get("do")
    if do not in KINDS:
        raise BenchError(f"{where}: do: {do!r} is none of {', '.join(KINDS)}")
    if "at" not in event:
        raise BenchError(f"{where}: at: missing; write when, as in at = '10m'")
    known = ("at", "do", *KINDS[do])
    values: dict[str, Any] = {"do": do}
    for name, value in event.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; {do} knows {', '.join(known)}"
            raise BenchError(f"{where}: {name}: unknown{hint}")
        if name == "role":
            if value not in ROLES:
                raise BenchError(f"{where}: role: {value!r} is none of {', '.join(ROLES)}")
            values[name] = value
        elif name in ("count", "replica"):
            if type(value) is not int or not 0 <= value <= 100_000:
                raise BenchError(f"{where}: {name}: {value!r} is no number from 0 to 100,000")
            values[name] = value
        elif name != "do":
            values[name] = _seconds(value, f"{where}: {name}")
    return Happening(**values)


def _seconds(value: object, where: str) -> float:
    found = _SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        return float(found[1]) * _UNITS[found[2]]
    if type(value) in (int, float) and 0 <= value < 1e7:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise BenchError(f"{where}: {value!r} is no time; write seconds, or '90s', '10m', '1h'")
