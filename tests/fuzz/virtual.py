"""An event loop whose time runs only while nothing else does: an hour's wait takes none, a hang is found."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any

_START_MS = 1_790_000_000_000
_REAL_S = 0.05
"""With no timer at all, only another thread can bring anything: it is given so long, again and again."""


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(_REAL_S)
        ready = super().select(0)
        if not ready and timeout > 0:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now` is its time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.faults: list[Mapping[str, Any]] = []
        """What nobody else would hear of: exceptions of tasks and callbacks."""
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]  # of any arguments
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run it at once: what another thread does takes no virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class LoopClock:
    """The running loop's time as kvplane's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_ms(self) -> int:
        return _START_MS + int(self._loop.time() * 1000)

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
