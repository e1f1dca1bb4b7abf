"""Time that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools

_SETTLE_PASSES = 25


async def settle() -> None:
    """Let the tasks that can run do so: some passes of the event loop, enough for a few awaits in a row.

    Does not wait for input and output; whoever tests with a network waits for what it should bring.
    """
    for _ in range(_SETTLE_PASSES):
        await asyncio.sleep(0)


class ManualClock:
    """A Clock that stands still until it is advanced. Counts whole nanoseconds, so sums are exact."""

    def __init__(self, *, start_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = start_ms
        self._now_ns = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        """See Clock."""
        return self._start_ms + self._now_ns // 1_000_000

    def monotonic(self) -> float:
        """See Clock. Starts at 0."""
        return self._now_ns / 1e9

    @property
    def sleepers(self) -> int:
        """How many tasks sleep on this clock."""
        return sum(not woken.done() for _, _, woken in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """See Clock. Wakes in `advance`, when exactly that much time has passed."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ns + round(seconds * 1e9), next(self._order), woken))
        await woken

    def jump(self, seconds: float) -> None:
        """Let time pass at once, as in a process that was stopped: sleepers that are due run afterwards.

        Raises ValueError for a negative span.
        """
        if seconds < 0:
            raise ValueError("time does not run backward")
        self._now_ns += round(seconds * 1e9)
        self._wake_due(self._now_ns)

    async def advance(self, seconds: float) -> None:
        """Let time pass: wake sleepers in the order of their times, each at its own.

        Woken tasks run before time goes on, so those that sleep again within the span wake again. Raises
        ValueError for a negative span. One call at a time.
        """
        if seconds < 0:
            raise ValueError("time does not run backward")
        target_ns = self._now_ns + round(seconds * 1e9)
        await settle()  # tasks just made have to come to their sleep first
        while self._sleepers and self._sleepers[0][0] <= target_ns:
            self._now_ns = max(self._now_ns, self._sleepers[0][0])
            self._wake_due(self._now_ns)
            await settle()
        self._now_ns = target_ns
        await settle()

    def _wake_due(self, until_ns: int) -> None:
        while self._sleepers and self._sleepers[0][0] <= until_ns:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)
