"""How engines' answers decide who gets requests: circuit breaker, outlier ejection, slow start. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Circuit(StrEnum):
    """Whether an engine gets requests."""

    CLOSED = "closed"
    """It does."""
    OPEN = "open"
    """It does not: it failed too often, and is left alone for a while."""
    HALF_OPEN = "half_open"
    """It gets one request at a time, until one succeeds or fails."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When an engine is ejected, and how it comes back. Times in seconds."""

    consecutive_failures: int = 5
    """So many failures in a row eject; 0 never does."""
    window_s: float = 30.0
    """Shares of errors are taken over between one and two of these."""
    min_requests: int = 20
    """Fewer requests within the window say nothing about an engine's share of errors."""
    share_margin: float = 0.3
    """An engine whose share of errors is so much above that of all others together is ejected."""
    ejection_s: float = 5.0
    """First ejection; each one that follows on a failed trial lasts twice as long."""
    max_ejection_s: float = 60.0
    slow_start_s: float = 10.0
    """For so long an engine that is back gets less than its share, a tenth at first; 0: all at once."""

    def __post_init__(self) -> None:
        if self.consecutive_failures < 0 or self.slow_start_s < 0:
            raise ValueError("consecutive_failures, slow_start_s: must be 0 or more")
        if not 0 < self.ejection_s <= self.max_ejection_s:
            raise ValueError("ejection_s: must be above 0, and at most max_ejection_s")
        if self.window_s <= 0 or self.min_requests < 1 or not 0 < self.share_margin <= 1:
            raise ValueError("window_s, min_requests, share_margin: out of range")


_LEAST_WEIGHT = 0.1


class Health:
    """What one engine's answers say. Readings of the clock are passed in, in seconds."""

    __slots__ = (
        "_back_at",
        "_bad",
        "_ejections",
        "_good",
        "_old_bad",
        "_old_good",
        "_open_until",
        "_row",
        "_trial_until",
        "_window_at",
        "opened",
    )

    def __init__(self) -> None:
        self._row = 0
        self.opened = False
        """Whether it gets no requests, or one at a time: its circuit is not closed."""
        self._open_until = 0.0
        self._trial_until = 0.0
        self._ejections = 0
        self._back_at: float | None = None
        self._window_at = 0.0
        self._good = self._bad = self._old_good = self._old_bad = 0

    def circuit(self, now: float) -> Circuit:
        """Return whether it gets requests."""
        if not self.opened:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._open_until else Circuit.HALF_OPEN

    def trial_due(self, now: float) -> bool:
        """Tell whether the next request should be sent to it, to see whether it is well again."""
        return self.circuit(now) is Circuit.HALF_OPEN and now >= self._trial_until

    def taken(self, now: float, limits: HealthLimits) -> None:
        """Note that it gets a request: while half open, the only one until a first ejection's time is over.

        The time is for trials that end without a verdict, as when their client goes away.
        """
        if self.opened and now >= self._open_until:
            self._trial_until = now + limits.ejection_s

    def untold(self) -> None:
        """Note that a request ended without a verdict: while half open, the next one is the trial."""
        self._trial_until = 0.0

    def weight(self, now: float, limits: HealthLimits) -> float:
        """Return its share of what it would get if it had been there all along: 0.1 to 1."""
        if self._back_at is None:
            return 1.0
        age = now - self._back_at
        if age >= limits.slow_start_s:
            self._back_at = None
            return 1.0
        return max(_LEAST_WEIGHT, age / limits.slow_start_s)

    def came_back(self, now: float) -> None:
        """Note that it answers again after it did not: whatever failed before is over, slow start begins."""
        self._row = 0
        self.opened = False
        self._back_at = now

    def share(self, now: float, limits: HealthLimits) -> tuple[int, int]:
        """Return how many requests failed within the window, and how many there were."""
        self._turn_window(now, limits)
        bad = self._bad + self._old_bad
        return bad, bad + self._good + self._old_good

    def succeeded(self, now: float, limits: HealthLimits) -> bool:
        """Note an answer; tells whether it brings the engine back."""
        self._turn_window(now, limits)
        self._good += 1
        self._row = 0
        circuit = self.circuit(now)
        if circuit is Circuit.HALF_OPEN:
            self.came_back(now)
            return True
        if circuit is Circuit.CLOSED and self._bad + self._old_bad == 0:
            self._ejections = 0
        return False

    def failed(self, now: float, limits: HealthLimits, pools: Sequence[Sequence[Health]]) -> str:
        """Note a failure; returns why the engine is ejected now, "" if it is not.

        `pools` are the other engines that are up, for each kind of work this one does. It is not ejected
        where that would leave fewer than half of a pool, or none: then the pool is ill, not the engine.
        """
        self._turn_window(now, limits)
        self._bad += 1
        self._row += 1
        if self.opened:
            if now < self._open_until:
                return ""
            why = "trial_failed"
        else:
            why = self._outlies(now, limits, pools)
        if not why:
            return ""
        if not self.opened and not all(_can_do_without(now, others) for others in pools):
            return ""
        self.opened = True
        self._open_until = now + min(
            limits.max_ejection_s, limits.ejection_s * 2.0 ** min(self._ejections, 16)
        )
        self._trial_until = 0.0
        self._ejections += 1
        # What led here is paid for: back again, it starts afresh.
        self._row = self._good = self._bad = self._old_good = self._old_bad = 0
        return why

    def _outlies(self, now: float, limits: HealthLimits, pools: Sequence[Sequence[Health]]) -> str:
        if limits.consecutive_failures and self._row >= limits.consecutive_failures:
            return "consecutive_failures"
        bad, total = self.share(now, limits)
        if total < limits.min_requests:
            return ""
        others = {id(other): other for pool in pools for other in pool}
        counts = [other.share(now, limits) for other in others.values()]
        rest = sum(count for _, count in counts)
        if not rest:
            return ""
        theirs = sum(failures for failures, _ in counts) / rest
        return "error_share" if bad / total >= theirs + limits.share_margin else ""

    def _turn_window(self, now: float, limits: HealthLimits) -> None:
        age = now - self._window_at
        if age < limits.window_s:
            return
        fresh = age < 2 * limits.window_s
        self._old_good, self._old_bad = (self._good, self._bad) if fresh else (0, 0)
        self._good = self._bad = 0
        self._window_at = now


def _can_do_without(now: float, others: Sequence[Health]) -> bool:
    """Tell whether one more of a pool may be ejected, beside these others."""
    well = sum(other.circuit(now) is Circuit.CLOSED for other in others)
    return well > 0 and well >= (len(others) + 1) / 2
