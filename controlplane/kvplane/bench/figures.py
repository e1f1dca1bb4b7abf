"""Figures: taken in alternating rounds, told by their medians, compared within one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Of(Enum):
    """What a target is about."""

    VALUE = auto()
    RATIO = auto()
    """The value over what it is against."""
    DIFFERENCE = auto()
    """The value less what it is against."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure has to reach."""

    bound: float
    at_most: bool
    of: Of = Of.VALUE

    def met(self, figure: float) -> bool:
        """Whether a figure reaches it."""
        return figure <= self.bound if self.at_most else figure >= self.bound

    def __str__(self) -> str:
        sign = "+" if self.of is Of.DIFFERENCE else ""
        return f"{'<=' if self.at_most else '>='} {sign}{self.bound:g}{'x' if self.of is Of.RATIO else ''}"


@dataclass(frozen=True, slots=True)
class Cpu:
    """Share of one core that each side used, 1.0 being all of it: the side near 1.0 is the limit."""

    server: float
    client: float


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its value in each round and, if it is compared, what it is against in the same rounds."""

    bench: str
    case: str
    unit: str
    rounds: tuple[float, ...]
    against: tuple[float, ...] = ()
    target: Target | None = None
    cpu: Cpu | None = None
    against_cpu: Cpu | None = None
    note: str = ""

    @property
    def value(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance from the lowest to the highest round, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / 2 / self.value if self.value else 0.0

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of the value over what it is against; None without that."""
        if not self.against:
            return None
        return statistics.median(own / other for own, other in zip(self.rounds, self.against, strict=True))

    @property
    def difference(self) -> float | None:
        """Median over the rounds of the value less what it is against; None without that."""
        if not self.against:
            return None
        return statistics.median(own - other for own, other in zip(self.rounds, self.against, strict=True))

    @property
    def per_core(self) -> float | None:
        """What a rate would be if the server had all of one core: what holds on a busy machine."""
        if self.cpu is None or not self.unit.startswith("/") or not self.cpu.server:
            return None
        return self.value / self.cpu.server

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        figures = {Of.VALUE: self.value, Of.RATIO: self.ratio, Of.DIFFERENCE: self.difference}
        figure = figures[self.target.of]
        return None if figure is None else self.target.met(figure)

    def as_json(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {
            "bench": self.bench,
            "case": self.case,
            "unit": self.unit,
            "value": self.value,
            "spread": self.spread,
            "rounds": list(self.rounds),
            "against": list(self.against),
            "per_core": self.per_core,
            "ratio": self.ratio,
            "difference": self.difference,
            "target": str(self.target) if self.target else None,
            "met": self.met,
            "server_cpu": self.cpu.server if self.cpu else None,
            "client_cpu": self.cpu.client if self.cpu else None,
            "against_server_cpu": self.against_cpu.server if self.against_cpu else None,
            "against_client_cpu": self.against_cpu.client if self.against_cpu else None,
            "note": self.note,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie. O(n log n)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def mean_cpu(shares: Sequence[Cpu]) -> Cpu:
    """Return the mean of some rounds' shares."""
    return Cpu(statistics.fmean(s.server for s in shares), statistics.fmean(s.client for s in shares))
