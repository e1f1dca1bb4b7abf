"""The time by which deadlines are written and judged, agreed on by all replicas."""

from __future__ import annotations

import structlog

from kvplane.store.clock import Clock

log = structlog.get_logger(__name__)

_NOTEWORTHY_MS = 1000


class FleetTime:
    """A Clock that is never behind what any replica has said.

    Wall time is read once and carried on by the monotonic clock, so a step of the wall clock moves nothing.
    A replica whose clock is behind takes over the time of the others as soon as it hears of it: a deadline
    may then come early, which costs a hit, but never late, which would hand out freed blocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.monotonic() * 1000

    def now_ms(self) -> int:
        """See Clock."""
        return round(self._offset_ms + self._clock.monotonic() * 1000)

    def monotonic(self) -> float:
        """See Clock."""
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._clock.sleep(seconds)

    def heard(self, time_ms: int) -> None:
        """Another replica's time was `time_ms`, at some moment before now."""
        ahead_ms = time_ms - self.now_ms()
        if ahead_ms > 0:
            self._offset_ms += ahead_ms
            if ahead_ms >= _NOTEWORTHY_MS:
                log.warning("fleet_time_moved_ahead", milliseconds=ahead_ms)
