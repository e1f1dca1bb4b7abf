"""What a second of a lease has to bring: leases cut where holding on costs more than it saves.

A `Curve` says for one class of turns what a lease of T seconds brings (the share of conversations back within
T) and costs (seconds held on average, until the return or T). For a price, the lease is the T with the most
of one less price times the other. `Savings` keeps, for a row of prices at once, what they would have brought
lately: so is found the highest that still brings enough.

Prices are chances of a return per second: the least that a full block's tokens have to have, at any moment,
to be held on for. A conversation whose blocks hold fewer tokens each pays more in proportion.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

LOWEST = 1e-5
"""The price of a lease where room is plenty: not held on for less than one return in a hundred thousand
seconds, which is one conversation in 200 over eight minutes."""
_STEP = 1.4
_STEPS = 34
PRICES = tuple(LOWEST * _STEP**step for step in range(_STEPS))
"""The row of prices, lowest first: to one return a second."""


class Curve:
    """What leases of a class bring and cost.

    Args:
        edges: ends of the stretches of idle time.
        chances: for each, of a return in it if there was none before.
        min_ttl_s: shortest lease.
    """

    __slots__ = ("_edges", "_points", "_rates", "_slopes", "_ttls", "brought", "leases")

    def __init__(self, edges: Sequence[float], chances: Sequence[float], min_ttl_s: float) -> None:
        self._edges = edges
        times, shares, seconds = [0.0], [0.0], [0.0]
        out = 1.0
        for edge, chance in zip(edges, chances, strict=True):
            seconds.append(seconds[-1] + out * (edge - times[-1]) * (1.0 - chance / 2.0))
            out *= 1.0 - chance
            times.append(edge)
            shares.append(1.0 - out)
        self._points = (shares, seconds)
        self._rates: list[float] | None = None  # made when it is first asked for
        # The corners of the hull over (seconds held, share back), from the shortest lease on.
        hull = list[int]()
        for index in range(bisect_left(times, min_ttl_s), len(times)):
            while len(hull) > 1 and _slope(shares, seconds, hull[-2], hull[-1]) <= _slope(
                shares, seconds, hull[-1], index
            ):
                hull.pop()
            hull.append(index)
        self._slopes = [-_slope(shares, seconds, a, b) for a, b in itertools.pairwise(hull)]
        self._ttls = [times[index] for index in hull]
        corners = [bisect_left(self._slopes, -price) for price in PRICES]
        self.brought = [shares[hull[corner]] for corner in corners]
        """For each of PRICES, the share of conversations back within the lease."""
        self.leases = [self._ttls[corner] for corner in corners]
        """For each of PRICES, the best lease."""

    @property
    def most(self) -> float:
        """The share back within the longest lease that is ever worth its lowest price."""
        return self.brought[0]

    def ttl_s(self, price: float) -> float:
        """Return the best lease at a price. The higher the price, the shorter. O(log bins)."""
        return self._ttls[bisect_left(self._slopes, -price)]

    def rate(self, idle_s: float) -> float:
        """Return the chance per second held, from now on and to the best end, after so much idle time.

        Beyond the longest lease nothing is learned; it is taken to fall with the time. O(log bins).
        """
        rates = self._rates
        if rates is None:
            rates = self._rates = _best_rates(*self._points)
        index = bisect_right(self._edges, idle_s)
        if index < len(rates):
            return rates[index]
        return rates[-1] * self._edges[-1] / idle_s


def _slope(shares: Sequence[float], seconds: Sequence[float], a: int, b: int) -> float:
    span = seconds[b] - seconds[a]
    return (shares[b] - shares[a]) / span if span > 0 else 0.0


def _best_rates(shares: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return for the beginning of each stretch the best quotient of what comes after."""
    last = len(shares) - 1
    rates, hull = [0.0] * last, [last]
    # From the end: what is best from a place on leads to a corner of the hull over what comes after.
    for index in range(last - 1, -1, -1):
        best = _slope(shares, seconds, index, hull[-1])
        while len(hull) > 1 and best <= (next_best := _slope(shares, seconds, index, hull[-2])):
            hull.pop()
            best = next_best
        rates[index] = best
        hull.append(index)
    return rates


class Savings:
    """What the row of prices brought of what the longest leases would have: foreseen, and seen.

    Seen is by turns that came back: whether each price's lease, as it would be now, reaches that far. The
    lower of the two counts: the foreseen one is too high where estimates follow chance, the seen one while
    those that are out for long cannot be back yet. Old turns fade.
    """

    __slots__ = ("_foreseen", "_foreseen_most", "_seen", "_seen_most")

    _KEEP = 1.0 - 1.0 / 500.0
    _FORESEEN_COUNTS = 30.0

    def __init__(self) -> None:
        self._foreseen = [0.0] * _STEPS
        self._foreseen_most = 0.0
        self._seen = [0.0] * _STEPS
        self._seen_most = 0.0

    def foresee(self, curve: Curve, tokens: float, shift: int) -> None:
        """Note a turn that ended. `shift` is how many steps of the price its blocks are dearer."""
        keep = self._KEEP
        self._foreseen_most = self._foreseen_most * keep + tokens * curve.most
        brought = _shifted(curve.brought, shift)
        self._foreseen = [
            old * keep + tokens * share for old, share in zip(self._foreseen, brought, strict=True)
        ]

    def see(self, curve: Curve, tokens: float, idle_s: float) -> None:
        """Note a turn that came back within the longest lease."""
        keep = self._KEEP
        self._seen_most = self._seen_most * keep + tokens
        # A higher price gives a shorter lease: reached up to some price, and by none above.
        self._seen = [
            old * keep + (tokens if ttl_s >= idle_s else 0.0)
            for old, ttl_s in zip(self._seen, curve.leases, strict=True)
        ]

    def highest(self, share: float) -> float:
        """Return the highest price that keeps a share of the savings, at least the lowest price."""
        shares = self.shares()
        for index in range(_STEPS - 1, 0, -1):
            if shares[index] >= share:
                return PRICES[index]
            if shares[index - 1] >= share:
                # Between two prices, by ratio.
                part = (shares[index - 1] - share) / (shares[index - 1] - shares[index])
                return PRICES[index - 1] * math.pow(_STEP, part)
        return LOWEST

    def shares(self) -> list[float]:
        """Return for each price the share of savings kept."""
        if self._foreseen_most <= 0.0:
            return [1.0] + [0.0] * (_STEPS - 1)
        foreseen = [expected / self._foreseen_most for expected in self._foreseen]
        # As much weight as so many turns seen have, while those are few.
        weight = self._FORESEEN_COUNTS * self._foreseen_most * (1.0 - self._KEEP)
        # What was seen is late for those that are out long; what is foreseen supposes that some come back.
        return [
            min(expected, (seen + weight * expected) / (self._seen_most + weight))
            for seen, expected in zip(self._seen, foreseen, strict=True)
        ]


def _shifted(row: list[float], shift: int) -> list[float]:
    if not shift:
        return row
    if shift > 0:
        return (row[shift:] + row[-1:] * shift)[: len(row)]
    return (row[:1] * -shift + row)[: len(row)]


def steps(ratio: float) -> int:
    """Return how many steps of the price a ratio is, between as many down and up as there are."""
    return max(1 - _STEPS, min(_STEPS - 1, round(math.log(ratio) / math.log(_STEP))))
