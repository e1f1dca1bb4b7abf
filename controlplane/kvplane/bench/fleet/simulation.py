"""Simulated time: a heap of what happens when, and coroutines that wait for it. Nothing sleeps.

A process is a coroutine that waits for `Wait`s of the simulation and, now and then, for futures of asyncio:
the control plane and the router use those where something has to be waited for. The tasks of asyncio get
their turn when time has passed or somebody waits for one. Time is a ManualClock's.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from kvplane.store.testing import ManualClock

_TICK_S = 0.25
"""How often the tasks of asyncio get their turn at the least: as often as the control plane sweeps."""
_PASSES = 12
"""Of the event loop: enough for a few awaits in a row."""

Process = Coroutine[Any, Any, Any]


class Wait:
    """What a process waits for; once it is over, `error` is raised there if there is one."""

    __slots__ = ("_simulation", "error", "over", "process")

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.process: Process | None = None
        self.error: Exception | None = None
        self.over = False

    def __await__(self) -> Generator[Wait, None, None]:
        if not self.over:
            yield self
        if self.error is not None:
            raise self.error

    def end(self, error: Exception | None = None) -> None:
        """Have the process go on at once; not if it did already."""
        if self.over:
            return
        self.over, self.error = True, error
        if self.process is not None:
            self._simulation.step(self.process)


class Simulation:
    """Runs processes in simulated time. `now` is in seconds since the beginning.

    `quantum_s`: the tasks of asyncio get their turn whenever so much time has passed, for replicas that
    follow a shared store by watches; 0 if they need none.
    """

    def __init__(self, *, quantum_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.now = 0.0
        self.events = 0
        """How many have happened."""
        self._quantum_s = quantum_s or _TICK_S
        self._passes = 3 if quantum_s else _PASSES
        self._pass_at = 0.0
        self._at_ns = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._back: deque[Process] = deque()
        self._outside = 0

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Have something done at a time."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Have something done some time from now."""
        heapq.heappush(self._heap, (self.now + max(0.0, seconds), next(self._order), action))

    def every(self, seconds: float, action: Callable[[], bool | None], *, first: float = 0.0) -> None:
        """Do something again and again, first after `first` seconds, until it answers False."""

        def again() -> None:
            if action() is not False:
                self.after(seconds, again)

        self.after(first, again)

    def wait(self) -> Wait:
        """Return something to wait for that somebody ends."""
        return Wait(self)

    def sleep(self, seconds: float) -> Wait:
        """Return something to wait for that is over after some time."""
        wait = Wait(self)
        self.after(seconds, wait.end)
        return wait

    def start(self, process: Process) -> None:
        """Run a coroutine until it first waits; the rest follows by itself. What it raises ends the run."""
        self.step(process)

    def step(self, process: Process) -> None:
        """Run a process to where it waits next."""
        try:
            waited = process.send(None)
        except StopIteration:
            return
        if type(waited) is Wait:
            waited.process = process
            return
        self._outside += 1
        if waited is None:  # a bare yield, as asyncio.sleep(0) is
            self._back.append(process)
            return
        # As a task does that takes over a future.
        waited._asyncio_future_blocking = False
        waited.add_done_callback(lambda _: self._back.append(process))

    async def run(self, until: Callable[[], bool], *, horizon_s: float = float("inf")) -> None:
        """Let things happen until a condition holds, nothing is left to happen, or the horizon is reached."""
        while self._heap and not until():
            when, _, action = heapq.heappop(self._heap)
            if when > horizon_s:
                break
            await self._advance(when)
            self.events += 1
            action()
            if self._outside:
                await self._turn(_PASSES)

    async def _advance(self, when: float) -> None:
        """Let time pass; asyncio's tasks get their turn where some of it has."""
        while self._pass_at + self._quantum_s <= when:
            self._pass_at = max(self._pass_at + self._quantum_s, min(self.now, when))
            self._set(self._pass_at)
            await self._turn(self._passes, all_of_them=True)
        self._set(when)

    def _set(self, when: float) -> None:
        at_ns = round(when * 1e9)
        if at_ns > self._at_ns:
            self.clock.jump((at_ns - self._at_ns) / 1e9)
            self._at_ns = at_ns
            self.now = when

    async def _turn(self, passes: int, *, all_of_them: bool = False) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)
            while self._back:
                process = self._back.popleft()
                self._outside -= 1
                self.step(process)
            if not self._outside and not all_of_them:
                return
