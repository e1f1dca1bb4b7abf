"""Time as the rest of kvplane sees it. The only module that reads the machine's clocks."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Injected time."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch; never steps back within one process."""

    def monotonic(self) -> float:
        """Return seconds of a clock that only runs forward, of no particular origin."""

    async def sleep(self, seconds: float) -> None:
        """Wait; returns at once for zero or less."""


class SystemClock:
    """The machine's time: wall time read once, then carried on by the monotonic clock.

    So a step of the wall clock does not move deadlines within the life of a process.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def machine_ms(self) -> int:
        """Return what the machine's clock says now, in milliseconds since the Unix epoch; it may step."""
        return int(time.time() * 1000)

    def now_ms(self) -> int:
        """See Clock."""
        return int((self._offset + time.monotonic()) * 1000)

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await asyncio.sleep(max(0.0, seconds))
