"""How many requests are taken on: bounded in all, bounded per engine, and a bounded queue between the two.

Where there are tenants none takes all places (see `shares`), and those that wait are served in turn.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from kvplane.router.shares import Shares

TENANT: ContextVar[str] = ContextVar("TENANT", default="")
"""Whose request is being served; "" where there are no tenants."""


class Loaded(Protocol):
    """An engine as admission sees it."""

    outstanding: int


L = TypeVar("L", bound=Loaded)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much is taken on. 0 sets no limit on requests."""

    max_requests: int = 4096
    """Requests under way in this router, those that wait included; one more is answered 429."""
    max_engine_requests: int = 1024
    """Requests of this router's on one engine; more wait here."""
    max_queued: int = 1024
    """Requests that wait for a place on an engine; one more is answered 429. 0: none waits."""
    queue_timeout_s: float = 30.0
    """Longest wait for a place; then 503."""

    def __post_init__(self) -> None:
        if min(self.max_requests, self.max_engine_requests, self.max_queued) < 0:
            raise ValueError("max_requests, max_engine_requests, max_queued: must be 0 or more")
        if self.queue_timeout_s <= 0:
            raise ValueError("queue_timeout_s: must be above 0")


class OverloadedError(Exception):
    """A request is not taken on. `status` is 429 or 503, `retry_after_s` whole seconds from 1 to 60."""

    def __init__(self, message: str, status: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class _Waiting(asyncio.Event):
    """One that waits for a place; set when it should look again. A lower `order` is served earlier."""

    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.order = order


def _order(waiting: _Waiting) -> tuple[int, int]:
    return waiting.order


_WEIGHT = 0.1
_MOST_SECONDS = 60


class Admission:
    """Counts what is under way, and queues what finds no engine with a place, first come first served.

    `async with` around a request counts it; entering raises OverloadedError. `monotonic` reads seconds.
    """

    def __init__(self, limits: AdmissionLimits, monotonic: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic = monotonic
        self._lines: dict[str, list[_Waiting]] = {}
        self._came = 0
        self._round = 0
        """The last one that somebody was served in."""
        self._rounds: dict[str, int] = {}
        """By tenant: the round of the last one of its that waits or has waited."""
        self._under_way = Shares(limits.max_requests)
        self._waiting = Shares(limits.max_queued)
        self._ended_at: float | None = None
        self._between_ends_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def requests(self) -> int:
        """Requests under way, those that wait included."""
        return self._under_way.taken

    @property
    def queued(self) -> int:
        """Requests that wait for a place on an engine."""
        return self._waiting.taken

    def check(self) -> None:
        """Raise OverloadedError if one more request would not be taken on now."""
        if not self._under_way.may_take(TENANT.get()):
            most = self._limits.max_requests
            raise OverloadedError(
                f"The router has {most} requests under way; try again later.", 429, self.retry_after_s()
            )

    async def __aenter__(self) -> Self:
        self.check()
        self._under_way.take(TENANT.get())
        self._idle.clear()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._under_way.give(TENANT.get())
        if not self._under_way.taken:
            self._idle.set()
        now = self._monotonic()
        if self._ended_at is not None:
            self._between_ends_s += (now - self._ended_at - self._between_ends_s) * _WEIGHT
        self._ended_at = now

    async def until_idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    def retry_after_s(self) -> int:
        """Return after how many seconds those that wait now will probably have been served: 1 to 60."""
        return max(1, min(_MOST_SECONDS, math.ceil((self.queued + 1) * self._between_ends_s)))

    def has_place(self, engine: Loaded) -> bool:
        """Tell whether an engine may get one more request."""
        most = self._limits.max_engine_requests
        return not most or engine.outstanding < most

    async def place(self, kind: str, choose: Callable[[], L | None]) -> L | None:
        """Return an engine that `choose` gives and that has a place, as soon as there is one.

        Requests of one `kind` (those that the same engines can serve) wait in one line, where one of each
        tenant is served in turn, and a tenant's own as they came. `choose` is asked again each time a place
        may have become free; it should prefer engines with one. None is its answer
        when there is no engine at all. The caller counts the request as outstanding before it awaits
        anything. Raises OverloadedError.
        """
        line = self._lines.get(kind)
        if line is None:
            engine = choose()
            if engine is None or self.has_place(engine):
                return engine
        tenant = TENANT.get()
        if not self._limits.max_queued or not self._waiting.may_take(tenant):
            raise OverloadedError(
                "All engines are busy and the queue is full; try again later.", 429, self.retry_after_s()
            )
        if line is None:
            line = self._lines[kind] = []
        turn = _Waiting(self._place_in_turn(tenant))
        insort(line, turn, key=_order)
        self._waiting.take(tenant)
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                while True:
                    await turn.wait()
                    turn.clear()
                    engine = choose()
                    if engine is None or self.has_place(engine):
                        self._round = max(self._round, turn.order[0])
                        return engine
        except TimeoutError:
            raise OverloadedError(
                "No engine became free in time; try again later.", 503, self.retry_after_s()
            ) from None
        finally:
            self._waiting.give(tenant)
            line.remove(turn)
            if line:
                line[0].set()
            else:
                del self._lines[kind]

    def _place_in_turn(self, tenant: str) -> tuple[int, int]:
        """Return where one that comes now is in the order: in the round after the tenant's last one.

        Who had nothing waiting begins in the round that is being served, however many others wait.
        """
        if not self._waiting.taken:
            self._rounds.clear()
        self._came += 1
        in_round = max(self._round, self._rounds.get(tenant, 0)) + 1 if tenant else 0
        self._rounds[tenant] = in_round
        return in_round, self._came

    def freed(self) -> None:
        """Have the first in each line look again: a place became free, or an engine came or went.

        Lines may be for the same engines, so whoever is first of all looks first.
        """
        for turn in sorted((line[0] for line in self._lines.values()), key=_order):
            turn.set()
