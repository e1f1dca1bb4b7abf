"""CPU time of a program of the rig, with everything it started: what work costs, whoever else is busy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
ENGINE_CORE = "EngineCore"
"""Part of the title vLLM gives the process that schedules and computes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds, user and system: of all processes, and of those that compute."""

    total_s: float = 0.0
    core_s: float = 0.0

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(self.total_s - earlier.total_s, self.core_s - earlier.core_s)

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.total_s + other.total_s, self.core_s + other.core_s)


def usage_of(pid: int) -> Usage:
    """Return what a process and its descendants have used so far; those that ended and were reaped count.

    Raises ProcessLookupError when there is no such process.
    """
    parents = dict[int, int]()
    seconds = dict[int, float]()
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may hold anything, blanks and brackets included.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    if pid not in seconds:
        raise ProcessLookupError(pid)
    total = core = 0.0
    for one, used in seconds.items():
        if _descends(one, pid, parents):
            total += used
            if ENGINE_CORE in _title(one):
                core += used
    return Usage(total, core)


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor


def _title(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
