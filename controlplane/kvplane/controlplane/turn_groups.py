"""Turns that are looked for in several places, counted once: by what became of the turn as a whole."""

from __future__ import annotations

from collections.abc import Callable

from kvplane.controlplane import model as m

HIT = 0
"""In counts by MissReason, whose numbers begin with 1: nothing was missed."""
_OPEN_S = 1.0
"""For how long something may still be found."""
_MOST = 10_000


class TurnGroups:
    """Adds to `counts`, by MissReason and HIT. All methods but `as_of_now` are O(1).

    A turn whose places all had nothing is counted a second after the first of them was asked for; what is
    counted is never taken back. `now` reads seconds.
    """

    __slots__ = ("_counts", "_now", "_open")

    def __init__(self, counts: list[int], now: Callable[[], float]) -> None:
        self._counts = counts
        self._now = now
        self._open: dict[str, tuple[float, int]] = {}
        """By group: until when, and how it counts; HIT if it has been counted. In order of time."""

    def __len__(self) -> int:
        return len(self._open)

    def found(self, group: str) -> None:
        """Note that something was found in one of a turn's places."""
        known = self._close_others(group)
        if known is None or known[1] != HIT:
            self._counts[HIT] += 1
            self._open[group] = (self._now() + _OPEN_S if known is None else known[0], HIT)

    def missed(self, group: str, reason: m.MissReason) -> None:
        """Note that a turn has begun at a place where there is nothing, and why.

        Of several reasons one that says more than that nobody has been there counts.
        """
        known = self._close_others(group)
        if known is None:
            self._open[group] = (self._now() + _OPEN_S, int(reason))
        elif known[1] == m.MissReason.UNKNOWN_CONVERSATION:
            self._open[group] = (known[0], int(reason))

    def as_of_now(self) -> list[int]:
        """Return the counts with those turns that nothing will be found of any more. O(open turns)."""
        counts, now = list(self._counts), self._now()
        for until, reason in tuple(self._open.values()):
            if reason != HIT and until <= now:
                counts[reason] += 1
        return counts

    def _close_others(self, group: str) -> tuple[float, int] | None:
        """Count what is over, and return how the turn itself counts so far."""
        now = self._now()
        while self._open:
            first = next(iter(self._open))
            until, reason = self._open[first]
            if until > now and len(self._open) < _MOST:
                break
            del self._open[first]
            if reason != HIT:
                self._counts[reason] += 1
        return self._open.get(group)
