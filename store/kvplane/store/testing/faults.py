"""A store that fails on demand: before a call is done, or after it, when only the answer is lost."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Literal, TypeVar, get_args

from kvplane.store.base import Compare, EventBatch, KeyValue, Lease, Operation, Page, Store, Transaction
from kvplane.store.errors import StoreError, StoreUnavailableError

StoreCall = Literal["get", "scan", "transact", "grant_lease", "keep_lease", "revoke_lease", "watch"]
When = Literal["before", "after"]
T = TypeVar("T")


class Gate:
    """Holds one call at its fault point until the test lets it go."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._opened = asyncio.Event()
        self._error: StoreError | None = None

    async def reached(self) -> None:
        """Wait until the call stands at the gate."""
        await self._reached.wait()

    def release(self) -> None:
        """Let the call go on. Idempotent."""
        self._opened.set()

    def fail(self, error: StoreError | None = None) -> None:
        """Let the call go with an error: StoreUnavailableError unless another is given."""
        self._error = error or _unavailable()
        self._opened.set()

    async def meet(self) -> None:
        """Stand at the gate; for the store's own use."""
        self._reached.set()
        await self._opened.wait()
        if self._error is not None:
            raise self._error


class FaultInjectingStore(Store):
    """Passes calls on to `inner`, except for the faults that a test asks for.

    Every Store method but `aclose` has two fault points: "before", where `inner` has not been asked, and
    "after", where it has done its work (successfully) and the answer can be lost. For `watch`, they lie
    around each step of the iteration: "after" loses the batch that had come. Faults of one point are used up
    in the order in which they were asked for, one per call.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._faults: defaultdict[tuple[StoreCall, When], deque[Gate]] = defaultdict(deque)
        self._unavailable = False
        self._waiting: set[asyncio.Future[None]] = set()
        self.calls: Counter[str] = Counter()
        """How often each method was called (for `watch`: steps of its iterations), faulty calls included."""

    def fail_next(
        self, call: StoreCall, *, when: When = "before", error: StoreError | None = None, times: int = 1
    ) -> None:
        """Make the next `times` calls raise `error` (StoreUnavailableError by default) at that point."""
        for _ in range(times):
            self.hold_next(call, when=when).fail(error)

    def hold_next(self, call: StoreCall, *, when: When = "before") -> Gate:
        """Make the next call stop at that point; the gate returned lets it go on, or fail."""
        if call not in get_args(StoreCall) or when not in get_args(When):
            raise ValueError(f"no fault point {when!r} {call!r}; calls: {', '.join(get_args(StoreCall))}")
        gate = Gate()
        self._faults[call, when].append(gate)
        return gate

    def set_unavailable(self, unavailable: bool) -> None:
        """Make every call and every waiting watch raise StoreUnavailableError, until it is set back."""
        self._unavailable = unavailable
        if unavailable:
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_result(None)

    @property
    def shared(self) -> bool:
        """See Store."""
        return self._inner.shared

    async def get(self, key: bytes) -> KeyValue | None:
        """See Store."""
        await self._before("get")
        return await self._after("get", await self._inner.get(key))

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        """See Store."""
        await self._before("scan")
        return await self._after("scan", await self._inner.scan(prefix, after=after, limit=limit))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store."""
        await self._before("transact")
        return await self._after("transact", await self._inner.transact(compares, operations))

    async def grant_lease(self, ttl_s: float) -> Lease:
        """See Store."""
        await self._before("grant_lease")
        return await self._after("grant_lease", await self._inner.grant_lease(ttl_s))

    async def keep_lease(self, lease_id: int) -> Lease:
        """See Store."""
        await self._before("keep_lease")
        return await self._after("keep_lease", await self._inner.keep_lease(lease_id))

    async def revoke_lease(self, lease_id: int) -> None:
        """See Store."""
        await self._before("revoke_lease")
        await self._inner.revoke_lease(lease_id)
        await self._after("revoke_lease", None)

    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        """See Store. After a fault the iteration is over, like a broken stream: watch again."""
        return _FaultyWatch(self, self._inner.watch(prefix, from_revision=from_revision))

    async def aclose(self) -> None:
        """See Store."""
        await self._inner.aclose()

    async def _before(self, call: StoreCall) -> None:
        self.calls[call] += 1
        await self._meet(call, "before")
        if self._unavailable:
            raise _unavailable()

    async def _after(self, call: StoreCall, result: T) -> T:
        await self._meet(call, "after")
        return result

    async def _meet(self, call: StoreCall, when: When) -> None:
        gates = self._faults.get((call, when))
        if gates:
            await gates.popleft().meet()

    async def _until_unavailable(self, awaitable: Awaitable[T]) -> T:
        """Await, unless the store becomes unavailable first."""
        step = asyncio.ensure_future(awaitable)
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(broken)
        try:
            waited: set[asyncio.Future[Any]] = {step, broken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                raise _unavailable()
            return step.result()
        finally:
            self._waiting.discard(broken)
            if not step.done():
                step.cancel()
                await asyncio.wait({step})
            elif not step.cancelled():
                step.exception()  # seen, whether or not it was raised


class _FaultyWatch(AsyncIterator[EventBatch]):
    def __init__(self, store: FaultInjectingStore, inner: AsyncIterator[EventBatch]) -> None:
        self._store = store
        self._inner = inner
        self._over = False

    async def __anext__(self) -> EventBatch:
        if self._over:
            raise StopAsyncIteration
        try:
            await self._store._before("watch")
            batch = await self._store._until_unavailable(anext(self._inner))
            return await self._store._after("watch", batch)
        except BaseException:
            # Also when cancelled: a batch may have come in the same moment, and a gap must not be silent.
            self._over = True
            raise


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("made unavailable by a test")
