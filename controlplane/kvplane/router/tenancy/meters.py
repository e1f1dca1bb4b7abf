"""What each tenant uses of its quota. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvplane.router.admission import OverloadedError
from kvplane.router.tenancy.model import Quota

_MOST_RETRY_S = 60
_MOST_METERS = 10_000


class Bucket:
    """Something that fills by `rate` a second up to `most`. Readings of a clock in seconds are passed in."""

    __slots__ = ("_at", "_level", "most", "rate")

    def __init__(self, rate: float, most: float, now: float) -> None:
        self.rate, self.most = rate, most
        self._level, self._at = most, now

    def level(self, now: float) -> float:
        """Return how much there is."""
        self._level = min(self.most, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take some; there may be less than nothing then."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Return how long until there is as much."""
        return max(0.0, (amount - self.level(now)) / self.rate)


class Meter:
    """What one tenant uses, in one of `share` processes: each has its part of the limits, rounded up."""

    def __init__(self, quota: Quota, share: int, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._share = share
        self.requests = 0
        """Under way."""
        self._quota = Quota()
        self._rate: Bucket | None = None
        self._tokens: Bucket | None = None
        self._most: int | None = None
        self.set(quota)

    def set(self, quota: Quota) -> None:
        """Set other limits. What has been used stays used, where a limit has not changed."""
        now, share = self._monotonic(), self._share
        if quota == self._quota:
            return
        self._quota = quota
        self._rate = self._tokens = None
        if quota.requests_per_s is not None:
            burst = quota.burst if quota.burst is not None else max(1, math.ceil(quota.requests_per_s))
            self._rate = Bucket(quota.requests_per_s / share, -(-burst // share), now)
        if quota.tokens_per_minute is not None:
            part = quota.tokens_per_minute / share
            self._tokens = Bucket(part / 60, part, now)
        self._most = None if quota.concurrent is None else -(-quota.concurrent // share)

    @property
    def idle(self) -> bool:
        """Whether a new one would allow just as much."""
        now = self._monotonic()
        buckets = (bucket for bucket in (self._rate, self._tokens) if bucket is not None)
        return not self.requests and all(bucket.level(now) >= bucket.most for bucket in buckets)

    def begin(self) -> None:
        """Count a request, unless one more is too much: raises OverloadedError. `end` takes it back."""
        if self._most is not None and self.requests >= self._most:
            raise OverloadedError(
                "Too many requests of this tenant's are under way; try again later.", 429, 1
            )
        if self._rate is not None:
            now = self._monotonic()
            wait_s = self._rate.wait_s(1, now)
            # A bucket's arithmetic is not exact.
            if wait_s > 1e-9:
                raise OverloadedError(
                    "Too many requests of this tenant's; try again later.", 429, _retry(wait_s)
                )
            self._rate.take(1, now)
        self.requests += 1

    def end(self) -> None:
        """Note that a request is over."""
        self.requests -= 1

    def spend(self, tokens: int) -> None:
        """Take tokens from the minute's budget, which may be overdrawn by one request.

        Raises OverloadedError where it is spent.
        """
        if self._tokens is None:
            return
        now = self._monotonic()
        wait_s = self._tokens.wait_s(1, now)
        if wait_s > 1e-9:
            raise OverloadedError(
                "This tenant's tokens for a minute are used up; try again later.", 429, _retry(wait_s)
            )
        self._tokens.take(tokens, now)


def _retry(wait_s: float) -> int:
    return max(1, min(_MOST_RETRY_S, math.ceil(wait_s)))


class Meters:
    """The meters of all tenants, in one of `share` processes."""

    def __init__(self, share: int, monotonic: Callable[[], float]) -> None:
        self._share = share
        self._monotonic = monotonic
        self._meters: dict[str, Meter] = {}

    def of(self, tenant_id: str, quota: Quota) -> Meter:
        """Return a tenant's meter, with its limits as they are now."""
        meter = self._meters.get(tenant_id)
        if meter is None:
            meter = self._meters[tenant_id] = Meter(quota, self._share, self._monotonic)
        meter.set(quota)
        return meter

    @property
    def full(self) -> bool:
        """Whether there are very many: time to `prune`."""
        return len(self._meters) >= _MOST_METERS

    def prune(self) -> None:
        """Drop those that would allow as much if they were new. Who keeps one asks for it again."""
        self._meters = {name: each for name, each in self._meters.items() if not each.idle}
