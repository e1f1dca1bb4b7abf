"""What is retained, by engine and by tenant: read off the mirror, so that every replica has the whole of it.

Sums are kept as records come and go, so nobody ever goes through all conversations. Block-seconds are what
retention costs: blocks held for later, times the seconds they are; claims that are open included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.accounts import Accounts
from kvplane.controlplane.mirror import Mirror
from kvplane.controlplane.tally import AGES_S, Histogram, Tally
from kvplane.store.base import Event

ENGINES = 1000
"""Engines with a label of their own."""
TENANTS = 50
"""Tenants with one."""
_ENDED = 4096
"""Claims that have ended and whose end nobody has explained yet."""


class OpenClaim(NamedTuple):
    """What an open claim holds, and since when."""

    engine_id: str
    tenant_id: str
    tokens: int
    blocks: int
    began: float


class RetentionBooks:
    """Keeps the accounts. `monotonic` reads seconds."""

    def __init__(self, mirror: Mirror, tally: Tally, monotonic: Callable[[], float]) -> None:
        self.now = monotonic
        """The time by which block-seconds are counted."""
        self.engines = Accounts(ENGINES, monotonic())
        self.tenants = Accounts(TENANTS, monotonic())
        self.claims: dict[bytes, OpenClaim] = {}
        """Open claims by store key; quarantines are none."""
        self.ages = Histogram(AGES_S)
        """How long claims were open."""
        self._ended: OrderedDict[bytes, OpenClaim] = OrderedDict()
        tally.books = self
        mirror.listen(keys.LOCATIONS, self._on_location)
        mirror.listen(keys.CLAIMS, self._on_claim)

    def _on_location(self, event: Event) -> None:
        before = None if event.previous is None else records.location_sizes(event.previous.value)
        after = None if event.current is None else records.location_sizes(event.current.value)
        if before == after:
            return
        now = self.now()
        if before is not None:
            engine_id, tenant_id, tokens, blocks = before
            self.engines.add(engine_id, -1, tokens, blocks, now)
            self.tenants.add(tenant_id, -1, tokens, blocks, now)
        if after is not None:
            engine_id, tenant_id, tokens, blocks = after
            self.engines.add(engine_id, 1, tokens, blocks, now)
            self.tenants.add(tenant_id, 1, tokens, blocks, now)

    def _on_claim(self, event: Event) -> None:
        key = event.key
        if event.current is None:
            claim = self.claims.pop(key, None)
            if claim is not None:
                now = self.now()
                self.ages.observe(now - claim.began)
                self.engines.hold(claim.engine_id, -claim.blocks, now)
                self.tenants.hold(claim.tenant_id, -claim.blocks, now)
                self._ended[key] = claim
                if len(self._ended) > _ENDED:
                    self._ended.popitem(last=False)
        elif event.previous is None and not key.startswith(_QUARANTINES):
            now = self.now()
            engine_id, tenant_id, tokens, blocks = records.claim_sizes(event.current.value)
            self.claims[key] = OpenClaim(engine_id, tenant_id, tokens, blocks, now)
            self.engines.hold(engine_id, blocks, now)
            self.tenants.hold(tenant_id, blocks, now)

    def settle(self, claim_id: str, how: str) -> None:
        """See tally.Books: a claim whose reader is done has saved its tokens.

        Readers say so by finishing it, mostly before the engine tells that the blocks are free. They do as
        well where a leg failed before they read: that is rare, and cannot be told apart.
        """
        claim = self._ended.pop(keys.claim(claim_id), None)
        if claim is not None and how in ("read", "finished"):
            self.engines.save(claim.engine_id, claim.tokens)
            self.tenants.save(claim.tenant_id, claim.tokens)


_QUARANTINES = keys.claim(m.QUARANTINE)
