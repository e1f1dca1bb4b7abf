"""The time by which deadlines are written and judged, agreed on by all replicas."""

from __future__ import annotations

import structlog

from kvplane.store.clock import Clock

log = structlog.get_logger(__name__)

_NOTEWORTHY_MS = 1000


class FleetTime:
    """A Clock that is never behind what any replica has said, and a second reading that never hurries.

    Wall time is read once and carried on by the monotonic clock, so a step of the wall clock moves nothing. A
    replica that starts takes over the time of those that run (`adopt`); one that finds itself behind later
    moves ahead (`heard`). Two kinds of deadlines need opposite care where time may be wrong:

    - what must not be given out **after** it (a location) is judged by `now_ms`, which is never behind;
    - what must not be freed **before** it (a claimed location, a quarantined one) is judged by `patient_ms`,
      for which a move ahead counts only when `patience_s` have really passed since.
    """

    def __init__(self, clock: Clock, *, patience_s: float = 0.0) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._offset_ms = clock.now_ms() - clock.monotonic() * 1000
        self._moves: list[tuple[float, float]] = []  # (monotonic time, milliseconds ahead)

    def now_ms(self) -> int:
        """See Clock."""
        return round(self._offset_ms + self._clock.monotonic() * 1000)

    def patient_ms(self) -> int:
        """Return the time by which nothing is over too early: `now_ms` without recent moves ahead."""
        if not self._moves:
            return self.now_ms()
        since = self._clock.monotonic() - self._patience_s
        self._moves = [move for move in self._moves if move[0] > since]
        return self.now_ms() - round(sum(ahead_ms for _, ahead_ms in self._moves))

    def monotonic(self) -> float:
        """See Clock."""
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._clock.sleep(seconds)

    def adopt(self, time_ms: int) -> None:
        """Take over the time of a replica that runs; for one that has not written or judged anything yet."""
        ahead_ms = time_ms - self.now_ms()
        self._offset_ms += ahead_ms
        if abs(ahead_ms) >= _NOTEWORTHY_MS:
            log.warning("clock_differs_from_fleet", milliseconds=-ahead_ms)

    def heard(self, time_ms: int) -> None:
        """Another replica's time was `time_ms`, at some moment before now."""
        ahead_ms = time_ms - self.now_ms()
        if ahead_ms > 0:
            self._offset_ms += ahead_ms
            if self._patience_s:
                self._moves.append((self._clock.monotonic(), ahead_ms))
            if ahead_ms >= _NOTEWORTHY_MS:
                log.warning("fleet_time_moved_ahead", milliseconds=ahead_ms)

    def distrust(self) -> None:
        """Nobody could confirm this replica's time: for `patience_s`, let nothing be over too early."""
        self._moves.append((self._clock.monotonic(), float(self.now_ms())))
