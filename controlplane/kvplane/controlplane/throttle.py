"""Log lines that callers could cause by the thousand: of each kind at most one a second."""

from __future__ import annotations

from collections.abc import Callable

from kvplane.store.clock import SystemClock

_EVERY_S = 1.0
_MACHINE = SystemClock()


class Throttle:
    """Says whether a line is due. `monotonic` is a clock in seconds that only runs forward.

    It remembers every kind, so there must be few.
    """

    def __init__(self, monotonic: Callable[[], float] = _MACHINE.monotonic) -> None:
        self._monotonic = monotonic
        self._last: dict[object, tuple[float, int]] = {}  # by kind: when logged, passed over since

    def due(self, kind: object) -> int | None:
        """Return how many lines were passed over since the last of its kind; None: pass over this one too."""
        now = self._monotonic()
        logged_at, since = self._last.get(kind, (float("-inf"), 0))
        if now - logged_at < _EVERY_S:
            self._last[kind] = logged_at, since + 1
            return None
        self._last[kind] = now, 0
        return since
