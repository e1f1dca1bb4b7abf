"""How this replica and its store do, for whoever looks after them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvplane.controlplane import model as m
from kvplane.controlplane.ledger import Ledger
from kvplane.controlplane.replicas import VERSION, Replicas
from kvplane.controlplane.tally import Tally
from kvplane.store.base import StoreFacts
from kvplane.store.clock import Clock
from kvplane.store.errors import StoreError

_READ_WITHIN_S = 2.0
_FACTS_EVERY_S = 5.0
_RECENT_MS = 10_000
_MOST_REPLICAS = 100
_LONGEST_STALENESS_S = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How the store does; `latency_s` is None if a read failed, and `trouble` then says why."""

    latency_s: float | None
    staleness_s: float
    trouble: str
    caution: str
    facts: StoreFacts


@dataclass(frozen=True, slots=True)
class PlaneStatus:
    """How the replica does. `fleet_ms` and `clock_ms` are Unix times of one moment."""

    replica_id: str
    version: str
    uptime_s: float
    fleet_ms: int
    clock_ms: int
    store: StoreStatus
    replicas: tuple[tuple[str, str, float], ...]
    """(id, version, age of its last sign of life in seconds)."""


class Status:
    """Tells how the replica does. `serving` is set by the server that checks its health."""

    def __init__(self, ledger: Ledger, replicas: Replicas, settings: m.Settings, clock: Clock) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.settings = settings
        self.serving = False
        self._clock = clock
        self._machine_ms: Callable[[], int] = getattr(clock, "machine_ms", clock.now_ms)
        self._started_at = clock.monotonic()
        self._facts = StoreFacts()
        self._caution = ""
        self._asked_at = float("-inf")

    @property
    def tally(self) -> Tally:
        """What the replica has counted."""
        return self._ledger.tally

    @property
    def shared(self) -> bool:
        """Whether other replicas may use the same store."""
        return self._ledger.store.shared

    async def get(self) -> PlaneStatus:
        """Look; takes as long as a read of the store, two seconds at most. Never raises a StoreError."""
        store = await self._store()
        fleet_ms, clock_ms = self._ledger.clock.now_ms(), self._machine_ms()
        pulses = sorted(self._replicas.pulses().items(), key=lambda item: -item[1].time_ms)
        recent = [
            (replica_id, pulse.version, max(0, fleet_ms - pulse.time_ms) / 1000)
            for replica_id, pulse in pulses
            if fleet_ms - pulse.time_ms <= _RECENT_MS
        ]
        return PlaneStatus(
            self._replicas.replica_id,
            VERSION,
            self._clock.monotonic() - self._started_at,
            fleet_ms,
            clock_ms,
            store,
            tuple(sorted(recent[:_MOST_REPLICAS])),
        )

    async def _store(self) -> StoreStatus:
        store, clock = self._ledger.store, self._clock
        began = clock.monotonic()
        latency_s, trouble = None, ""
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                await store.get(b"health")
                latency_s = clock.monotonic() - began
                if began - self._asked_at >= _FACTS_EVERY_S:
                    self._facts, self._caution = await store.facts(), await store.caution() or ""
                    self._asked_at = began
        except TimeoutError:
            trouble = f"it does not answer within {_READ_WITHIN_S:g} s"
        except StoreError as error:
            trouble = str(error) or type(error).__name__
        staleness_s = min(self._ledger.mirror.staleness_s, _LONGEST_STALENESS_S)
        return StoreStatus(latency_s, staleness_s, trouble or self._facts.trouble, self._caution, self._facts)
