"""What is on record of each engine's locations, counted when somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.ledger import Ledger, understood

_COUNTED = (keys.LOCATIONS, keys.CLAIMS)
_SLICE = 512
_LEAST_AGE_S = 1.0
_SHARE = 20
"""Counting takes at most one in so many seconds, however often it is asked for."""


class Holdings(NamedTuple):
    """Locations of one engine."""

    conversations: int = 0
    tokens: int = 0
    blocks: int = 0
    claimed: int = 0


NOTHING = Holdings()


class HoldingsCount:
    """Counts from this replica's copy of the store: nothing is kept up to date for those who do not ask."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counting = asyncio.Lock()
        self._counted: Mapping[str, Holdings] = {}
        self._good_until = float("-inf")

    async def by_engine(self) -> Mapping[str, Holdings]:
        """Return what each engine holds: a second old or, of many locations, twenty times what it takes.

        O(locations), in slices; who asks meanwhile waits for the same count. Raises StoreUnavailableError.
        """
        self._ledger.mirror.require_fresh()
        async with self._counting:
            clock = self._ledger.clock
            began = clock.monotonic()
            if began >= self._good_until:
                self._counted = await self._count()
                took_s = clock.monotonic() - began
                self._good_until = clock.monotonic() + max(_LEAST_AGE_S, took_s * _SHARE)
            return self._counted

    async def _count(self) -> dict[str, Holdings]:
        sums: dict[str, list[int]] = {}
        mirror = self._ledger.mirror
        for number, key in enumerate(mirror.known(), 1):
            if not number % _SLICE:
                await asyncio.sleep(0)  # what never waits would hold up all others
            item = mirror.get(key) if key.startswith(_COUNTED) else None
            if item is None:
                continue
            if key.startswith(keys.LOCATIONS):
                brief = understood(item, records.location_size)
                if brief is not None:
                    engine_id, tokens, blocks = brief
                    held = sums.setdefault(engine_id, [0, 0, 0, 0])
                    held[0] += 1
                    held[1] += tokens
                    held[2] += blocks
                continue
            claim = understood(item, records.load_claim)
            if claim is not None and not claim.claim_id.startswith(m.QUARANTINE):
                sums.setdefault(claim.location.holder.engine_id, [0, 0, 0, 0])[3] += 1
        return {engine_id: Holdings(*held) for engine_id, held in sums.items()}
