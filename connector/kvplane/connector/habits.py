"""How soon conversations come back: chances per stretch of idle time, learned from what is seen of turns.

Time since a turn's end is cut into stretches (bins). For each, a class of turns has a number of conversations
that had not come back before it (at risk) and of those that came back in it. From the quotients follows
everything else: the share that comes back within a time, and how long a lease is held on average.

A turn is counted in a bin only once it is old enough to have gone through all of it, so that young turns do
not look like lost ones: `Cohorts` keeps turns by the time of their end until then. A return may be seen by
another engine than the one that counted the turn; the sums are right as long as each is seen once and
engines are loaded alike.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

from kvplane.connector.lease_class import CLASSES, COARSER

_BORROWED = 400.0
"""Turns that a coarser class counts for in the estimate of a finer one, in each bin."""
_SURE = 4.0
"""Returns that it counts for in how much more, or less, often all in all a finer one comes back."""
_SUPPOSED = 4.0
"""Turns that the supposition counts for with which everything begins: one return per longest lease."""


def bin_edges(max_ttl_s: float, min_ttl_s: float) -> tuple[float, ...]:
    """Return the ends of the stretches: the shortest lease, the longest, and about 30 between.

    Each is a quarter longer than the one before, but none longer than a twentieth of the longest lease.
    """
    edges = {min_ttl_s, max_ttl_s}
    edge = max_ttl_s / 240.0
    while edge < max_ttl_s:
        edges.add(edge)
        edge += min(edge / 4.0, max_ttl_s / 20.0)
    return tuple(sorted(edge for edge in edges if edge > 0.0))


class _Node:
    """Counts of one class, coarse or fine, for each bin."""

    __slots__ = ("at_risk", "back")

    def __init__(self, bins: int) -> None:
        self.at_risk = [0.0] * bins
        self.back = [0.0] * bins

    def halve(self) -> None:
        self.at_risk = [count / 2.0 for count in self.at_risk]
        self.back = [count / 2.0 for count in self.back]


_COARSEST_FIRST = (*reversed(COARSER), 0)


class Habits:
    """Counts of one party: a tenant, or all together. Old counts fade by half every `fade_after` turns.

    Memory: at most 1,353 nodes of two numbers per bin; an update costs O(5), an estimate O(5 x bins).
    """

    __slots__ = ("_bins", "_fade_after", "_nodes", "_paths", "_since_halving", "returns", "turns", "version")

    def __init__(self, bins: int, fade_after: float) -> None:
        self._bins = bins
        self._fade_after = fade_after
        self._nodes: dict[int, _Node] = {}
        self._paths: dict[int, list[_Node]] = {}
        """By class: the nodes of all coarser ones and of itself, coarsest first."""
        self._since_halving = 0.0
        self.turns = 0.0
        """Turns of which all is known: they went through all bins, or ended in one."""
        self.returns = 0.0
        """Those that ended in a return."""
        self.version = 0
        """Grows when estimates are worth making anew: every fiftieth part more seen."""

    def __len__(self) -> int:
        return len(self._nodes)

    def count(self, lease_class: int, index: int, at_risk: float, back: float) -> None:
        """Add to a class and all coarser ones, in one bin. Negative numbers take back."""
        for node in self._paths.get(lease_class) or self._path(lease_class):
            node.at_risk[index] += at_risk
            if back:
                node.back[index] += back

    def completed(self, turns: float, returns: float) -> None:
        """Note turns of which all is known, for fading and for `version`."""
        before = self.turns
        self.turns = max(0.0, self.turns + turns)
        self.returns += returns
        step = max(4.0, min(before, self._fade_after) / 50.0)
        if int(self.turns / step) != int(before / step):
            self.version += 1
        self._since_halving += turns
        if self._since_halving >= self._fade_after:
            self._since_halving = 0.0
            for node in self._nodes.values():
                node.halve()

    def chances(self, lease_class: int, supposed: Sequence[float]) -> list[float]:
        """Return for each bin the chance (0 to 1) of a return in it, given none before.

        A class is taken to be like the next coarser one, times one factor for all bins, which few returns
        suffice to tell; each bin's own counts show the more, the more there are. The coarsest leans on
        `supposed`, as it is.
        """
        chances = list(supposed)
        trust = _SUPPOSED
        for dropped in _COARSEST_FIRST:
            node = self._nodes.get((CLASSES | lease_class) >> dropped)
            if node is None:
                break  # nor is there a finer one
            expected = sum(map(mul, node.at_risk, chances))
            # Nothing is known of the whole from its first stretches; of a part there is, from the whole.
            factor = (
                max(0.0, sum(node.back) + _SURE) / max(_SURE, expected + _SURE) if trust == _BORROWED else 1.0
            )
            weight, before, chances = trust * factor, chances, []
            for chance, back, risk in zip(before, node.back, node.at_risk, strict=True):
                # Counts that were taken back elsewhere can be out by a turn or two for a moment.
                at_risk = risk if risk > back else back
                mine = (back + weight * chance) / ((at_risk if at_risk > 0.0 else 0.0) + trust)
                chances.append(0.0 if mine < 0.0 else 1.0 if mine > 1.0 else mine)
            trust = _BORROWED
        return chances

    def _path(self, lease_class: int) -> list[_Node]:
        path = self._paths.get(lease_class)
        if path is None:
            path = self._paths[lease_class] = []
            for dropped in _COARSEST_FIRST:
                key = (CLASSES | lease_class) >> dropped
                if key not in self._nodes:
                    self._nodes[key] = _Node(self._bins)
                path.append(self._nodes[key])
        return path


@dataclass(slots=True)
class _Ended:
    """Turns of one tenant and class that ended at about the same time: still out, and back by bin."""

    out: float = 0.0
    back: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Cohort:
    """Turns that ended in one stretch of time, and the next bin they have to go through."""

    next_bin: int = 0
    ended: dict[tuple[str, int], _Ended] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passed:
    """Turns that went through a bin: how many had been out at its beginning, how many came back in it."""

    tenant_id: str
    lease_class: int
    index: int
    at_risk: float
    back: float


class Cohorts:
    """Turns by the time of their end, until it is known what became of them in each bin.

    Bounded: with more than half of `limit` kinds of turns pending, only every second, fourth, ... turn is
    taken, for as many; at `limit` none.

    Args:
        edges: ends of the bins, in seconds since the turn's end.
        limit: of (cohort, tenant, class) pending.
    """

    def __init__(self, edges: Sequence[float], *, limit: int = 16384) -> None:
        self._edges = edges
        self._width = edges[-1] / 240.0
        self._limit = limit
        self._cohorts: dict[int, _Cohort] = {}
        self._due: list[tuple[float, int]] = []
        self._pending = 0
        self._began: float | None = None
        self._turns = 0

    def __len__(self) -> int:
        return self._pending

    def add(self, tenant_id: str, lease_class: int, now: float) -> None:
        """Take a turn that ends now."""
        if self._began is None:
            self._began = now
        self._turns += 1
        every = 1
        if self._pending > self._limit // 2:
            every = 1 << 1 + 6 * (2 * self._pending - self._limit) // self._limit
        if self._turns % every == 0:
            ended = self._ended(tenant_id, lease_class, now, now)
            if ended is not None:
                ended.out += every

    def back(self, tenant_id: str, lease_class: int, idle_s: float, now: float) -> list[Passed]:
        """Take a return, and return what it changes about bins that its turn was counted in already.

        One from before the first turn of this engine is left out, as the turn was: nothing would be out.
        """
        began = self._began
        if began is None or now - idle_s < began or idle_s > self._edges[-1]:
            return []
        index = bisect_left(self._edges, idle_s)
        number = int((now - idle_s) // self._width)
        ended = self._ended(tenant_id, lease_class, now - idle_s, now)
        if ended is None:
            return []
        ended.out -= 1
        passed = self._cohorts[number].next_bin
        if index >= passed:
            ended.back[index] = ended.back.get(index, 0.0) + 1
            return []
        # It was reported late: its turn has been counted as out in the bins since.
        late = [Passed(tenant_id, lease_class, index, 0.0, 1.0)]
        late += [Passed(tenant_id, lease_class, later, -1.0, 0.0) for later in range(index + 1, passed)]
        return late

    def take(self, now: float, most: int = 64) -> list[Passed]:
        """Return what has gone through a bin since the last call; what is beyond `most` comes next time."""
        taken = list[Passed]()
        while self._due and self._due[0][0] <= now and len(taken) < most:
            _, number = heapq.heappop(self._due)
            cohort = self._cohorts[number]
            index = cohort.next_bin
            cohort.next_bin = index + 1
            for (tenant_id, lease_class), ended in cohort.ended.items():
                back = ended.back.pop(index, 0.0)
                at_risk = ended.out + back + sum(ended.back.values())
                if at_risk or back:
                    taken.append(Passed(tenant_id, lease_class, index, at_risk, back))
            if cohort.next_bin < len(self._edges):
                self._schedule(number, cohort)
            else:
                self._pending -= len(cohort.ended)
                del self._cohorts[number]
        return taken

    def _schedule(self, number: int, cohort: _Cohort) -> None:
        youngest = (number + 1) * self._width
        heapq.heappush(self._due, (youngest + self._edges[cohort.next_bin], number))

    def _ended(self, tenant_id: str, lease_class: int, when: float, now: float) -> _Ended | None:
        """Return the entry for turns that ended at a time, None where there is no room or it is too late."""
        number = int(when // self._width)
        cohort = self._cohorts.get(number)
        ended = cohort.ended.get((tenant_id, lease_class)) if cohort is not None else None
        if ended is not None:
            return ended
        if self._pending >= self._limit:
            return None
        if cohort is None:
            cohort = self._cohorts[number] = _Cohort()
            while (
                cohort.next_bin < len(self._edges)
                and (number + 1) * self._width + self._edges[cohort.next_bin] <= now
            ):
                cohort.next_bin += 1
            if cohort.next_bin == len(self._edges):
                del self._cohorts[number]
                return None
            self._schedule(number, cohort)
        self._pending += 1
        ended = cohort.ended[tenant_id, lease_class] = _Ended()
        return ended
