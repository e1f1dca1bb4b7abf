"""How many operations per second tenants may ask for, on this replica."""

from __future__ import annotations

from collections.abc import Callable

from kvplane.controlplane.errors import QuotaExceededError

_BURST_S = 1.0
"""An idle tenant may ask for what it may in this time all at once."""
_MOST_KNOWN = 10_000
"""Tenants whose operations are counted; beyond it those that have their burst back are forgotten."""


class OperationRates:
    """A bucket per tenant, filled at its rate. `rate_of` may change its answers; None: no limit."""

    def __init__(self, rate_of: Callable[[str], float | None], monotonic: Callable[[], float]) -> None:
        self._rate_of = rate_of
        self._monotonic = monotonic
        self._buckets: dict[str, tuple[float, float]] = {}  # what is in it, and since when
        self._most = _MOST_KNOWN
        self.refused = 0
        """Operations refused."""

    def take(self, tenant_id: str) -> None:
        """Take one operation out of a tenant's bucket. O(1). Raises QuotaExceededError if it is empty."""
        rate = self._rate_of(tenant_id)
        if rate is None:
            return
        now, burst = self._monotonic(), max(1.0, rate * _BURST_S)
        left, since = self._buckets.get(tenant_id, (burst, now))
        left = min(burst, left + (now - since) * rate)
        if left < 1.0:
            self.refused += 1
            raise QuotaExceededError((1.0 - left) / rate)
        self._buckets[tenant_id] = left - 1.0, now
        if len(self._buckets) > self._most:
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Forget full buckets; where most are not, look again only when there are twice as many."""
        for tenant_id, (left, since) in list(self._buckets.items()):
            rate = self._rate_of(tenant_id)
            if rate is None or left + (now - since) * rate >= max(1.0, rate * _BURST_S):
                del self._buckets[tenant_id]
        self._most = max(_MOST_KNOWN, 2 * len(self._buckets))
