"""Keeps what happens again and again from filling the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LINES = 4
PER_S = 3600.0


class Sparing:
    """Lets a few lines of each kind through per hour, and counts the others.

    Args:
        monotonic: clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._written: dict[str, deque[float]] = {}
        self._left_out: dict[str, int] = {}

    def fields(self, event: str) -> dict[str, int] | None:
        """Return what to add to a line about `event`, or None if it is to be left out. O(1)."""
        now = self._monotonic()
        written = self._written.setdefault(event, deque(maxlen=LINES))
        if len(written) == LINES and now - written[0] < PER_S:
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return None
        written.append(now)
        left_out = self._left_out.pop(event, 0)
        return {"left_out": left_out} if left_out else {}
