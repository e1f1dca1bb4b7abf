"""What each tenant's fair share is of the room that an engine retains in.

Pure bookkeeping: no vLLM, no network, time injected. All who want room have a claim to a share of it: equal
ones, or by weight. A tenant wants room while it holds some, and for two minutes after it last tried to.
Shares are what a tenant is protected up to, not what it is held down to: with nobody else there, one may use
all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from kvplane.connector.shares import DistinctBlocks

_WANTS_S = 120.0

Holdings = Callable[[], Iterable[tuple[str, Iterable[int]]]]
"""Gives whose blocks are held now: (tenant, distinct blocks) of each request."""


class FairShares:
    """Counts distinct blocks by tenant, and says what each one's share is.

    While there is one tenant nothing is counted, and every method is O(1). With more, costs are O(blocks
    given), O(1) for the rest, and O(blocks held) once when the second comes.

    Args:
        holdings: asked when a second tenant comes, before its blocks are added.
        monotonic: the clock.
    """

    def __init__(self, holdings: Holdings, monotonic: Callable[[], float]) -> None:
        self._holdings = holdings
        self._monotonic = monotonic
        self.weights: Mapping[str, float] = {}
        """Of tenants, > 0; of those not named 1. May be set while nobody wants room."""
        self._wanting: OrderedDict[str, float] = OrderedDict()  # since when; the longest first
        self._total_weight = 0.0
        self._held: dict[str, DistinctBlocks] = {}
        self._counting = False

    @property
    def several(self) -> bool:
        """Whether more than one tenant wants room."""
        return self._counting

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self.weights.get(tenant, 1.0)

    def want(self, tenant: str) -> None:
        """Note that a tenant wants room now, whether or not it gets any."""
        if tenant not in self._wanting:
            self._total_weight += self.weight(tenant)
        self._wanting[tenant] = self._monotonic()
        self._wanting.move_to_end(tenant)
        if not self._counting and len(self._wanting) > 1:
            self._counting = True
            for holder, blocks in self._holdings():
                self._of(holder).add(blocks)
        self._forget()

    def add(self, tenant: str, blocks: Iterable[int]) -> None:
        """Add a request's blocks, distinct."""
        self.want(tenant)
        if self._counting:
            self._of(tenant).add(blocks)

    def remove(self, tenant: str, blocks: Iterable[int]) -> None:
        """Take a request's blocks off."""
        if self._counting:
            held = self._held[tenant]
            held.remove(blocks)
            if not len(held):
                del self._held[tenant]

    def used(self, tenant: str) -> int:
        """Return how many distinct blocks a tenant holds; only while there are several."""
        held = self._held.get(tenant)
        return len(held) if held is not None else 0

    def share(self, tenant: str, room: float) -> float:
        """Return a tenant's share of so many blocks."""
        return room * self.weight(tenant) / self._total_weight if self._total_weight else room

    def is_above(self, tenant: str, room: float, *, more: int = 0) -> bool:
        """Whether a tenant holds more than its share, with so many blocks more."""
        return self.used(tenant) + more > self.share(tenant, room)

    def _of(self, tenant: str) -> DistinctBlocks:
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = DistinctBlocks()
        return held

    def _forget(self) -> None:
        """Forget who has not wanted room for a while and holds none. Amortized O(1)."""
        now = self._monotonic()
        while self._counting:
            tenant, since = next(iter(self._wanting.items()))
            if now - since <= _WANTS_S:
                return
            if tenant in self._held:
                self._wanting[tenant] = now  # who holds some, wants it
                self._wanting.move_to_end(tenant)
                continue
            del self._wanting[tenant]
            self._total_weight -= self.weight(tenant)
            if len(self._wanting) == 1:
                self._counting = False
                self._held.clear()
                self._total_weight = self.weight(next(iter(self._wanting)))
