"""A store for work that takes minutes: what may be asked again is, through elections and short outages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvplane.store.base import Compare, EventBatch, KeyValue, Lease, Operation, Page, Store, Transaction
from kvplane.store.clock import Clock
from kvplane.store.errors import StoreUnavailableError

T = TypeVar("T")

_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)


class PatientStore(Store):
    """Passes calls on to `inner` and repeats reads that found it unavailable, after pauses of 8 s in all.

    Leases are granted again too: one whose answer was lost ends by itself. Writes are passed on once, as
    their outcome is for the caller to find out.
    """

    def __init__(self, inner: Store, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        for pause_s in _PAUSES_S:
            try:
                return await call()
            except StoreUnavailableError:
                await self._clock.sleep(pause_s)
        return await call()

    @property
    def shared(self) -> bool:
        """See Store."""
        return self._inner.shared

    async def get(self, key: bytes) -> KeyValue | None:
        """See Store."""
        return await self._repeat(lambda: self._inner.get(key))

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        """See Store."""
        return await self._repeat(lambda: self._inner.scan(prefix, after=after, limit=limit))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store."""
        if operations:
            return await self._inner.transact(compares, operations)
        return await self._repeat(lambda: self._inner.transact(compares, operations))

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See Store."""
        return await self._repeat(lambda: self._inner.grant_lease(ttl_s))

    async def keep_lease(self, lease_id: int) -> Lease:
        """See Store."""
        return await self._repeat(lambda: self._inner.keep_lease(lease_id))

    async def revoke_lease(self, lease_id: int) -> None:
        """See Store."""
        await self._repeat(lambda: self._inner.revoke_lease(lease_id))

    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        """See Store."""
        return self._inner.watch(prefix, from_revision=from_revision)

    async def aclose(self) -> None:
        """See Store."""
        await self._inner.aclose()
