"""How many blocks new requests take in a moment: what should be free before they come."""

from __future__ import annotations

from collections.abc import Callable

_MOMENT_S = 0.5
"""Longer than asking blocks back takes: an answer of the control plane and two steps."""
_HALF_LIFE_S = 30.0


class Demand:
    """The most blocks taken within a moment lately. Every method is O(1).

    Args:
        monotonic: the clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._peak = 0.0
        self._at = monotonic()
        self._taken = 0

    def take(self, blocks: int) -> None:
        """Note that a request was given blocks, or would have been if there were any."""
        self._roll()
        self._taken += max(0, blocks)

    def expected(self) -> int:
        """Return how many blocks may be wanted in the next moment: the most seen, halved every 30 s."""
        self._roll()
        return max(self._taken, int(self._peak))

    def _roll(self) -> None:
        """Close the moment that is over. The peak fades from one moment to the next."""
        passed = self._monotonic() - self._at
        if passed < _MOMENT_S:
            return
        self._peak = max(self._peak, float(self._taken)) * 0.5 ** (passed / _HALF_LIFE_S)
        self._taken = 0
        self._at += passed
