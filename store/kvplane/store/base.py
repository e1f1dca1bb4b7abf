"""The contract every store keeps: a small transactional key-value store with leases and watches.

It says no more than etcd's v3 API can keep, and no less than memory can: revisions count committed
transactions, a transaction compares and then writes atomically, leases end keys, watches replay history
until it is compacted. Which meaning the keys have is none of the store's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from msgspec import Struct

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 1_400_000
"""etcd refuses requests above 1.5 MiB (its default); the rest is for keys and framing."""
MAX_TXN_OPERATIONS = 128
"""etcd's default limit of operations in one transaction; compares count separately, same limit."""
MAX_TXN_BYTES = 1_500_000
"""Keys and values of one transaction together (compared keys too): etcd's request limit, less framing."""
MIN_LEASE_TTL_S = 2
"""etcd turns shorter ones into this."""


# These are made several times per transaction, hence structs: frozen as a dataclass, at a tenth of the cost.
# gc=False: none can be part of a cycle, so the garbage collector need not look at them.


class KeyValue(Struct, frozen=True, gc=False):
    """A key as stored.

    `mod_revision` is the revision of its last put, `create_revision` of the first put since it was last
    absent. `lease_id` is 0 without a lease.
    """

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


class Compare(Struct, frozen=True, gc=False):
    """Holds if the key's mod_revision equals `mod_revision`; 0 means that the key is absent."""

    key: bytes
    mod_revision: int


class Put(Struct, frozen=True, gc=False):
    """Write a key. With a lease, the key goes when the lease ends; 0 takes it off any lease."""

    key: bytes
    value: bytes
    lease_id: int = 0


class Delete(Struct, frozen=True, gc=False):
    """Remove a key; removing an absent key changes nothing."""

    key: bytes


Operation = Put | Delete


class Transaction(Struct, frozen=True, gc=False):
    """What became of a transaction: nothing was written unless `succeeded`.

    `revision` is the store's after it. `found` tells, of one that failed, what lies under each compared key
    at that revision, in the order of the compares: enough to decide anew without reading again.
    """

    succeeded: bool
    revision: int
    found: tuple[KeyValue | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a scan. `revision` is the store's at reading; `more` tells that keys follow."""

    items: tuple[KeyValue, ...]
    revision: int
    more: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as granted; `ttl_s` may be longer than asked for."""

    lease_id: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a backend says of itself; "" and 0 where it does not."""

    version: str = ""
    """Software and version."""
    size_bytes: int = 0
    quota_bytes: int = 0
    """What it may take at most."""
    trouble: str = ""
    """What it finds wrong with itself."""


class Event(Struct, frozen=True, gc=False):
    """One key's change. `current` is None for a removal; `previous` is None for a key that was absent."""

    key: bytes
    current: KeyValue | None
    previous: KeyValue | None


class EventBatch(Struct, frozen=True, gc=False):
    """All changes of one revision below the watched prefix; each key at most once."""

    revision: int
    events: tuple[Event, ...]


class Store(ABC):
    """A transactional key-value store. Safe to use from any task of one event loop.

    Every method may raise StoreUnavailableError, and StoreClosedError after `aclose`; a limit broken is
    InvalidStoreRequestError. Cancelling a `transact` leaves all of it or nothing.
    """

    @property
    def shared(self) -> bool:
        """Whether others than this object's users may write to what it stores."""
        return True

    def observe(self, listener: Callable[[Event], None]) -> Mapping[bytes, KeyValue] | None:
        """Return the live contents, if they are at hand, and from then on tell `listener` of each change.

        At once, that is, within the call that makes it; the listener must not block, raise or call the store.
        None where that is not to be had: follow a watch.
        """
        return None

    @abstractmethod
    async def get(self, key: bytes) -> KeyValue | None:
        """Return the key's latest committed value, or None."""

    @abstractmethod
    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        """Return keys that start with `prefix` and are greater than `after`, ascending, at most `limit`.

        Pages of one scan may stem from different revisions; each says its own. O(limit).
        """

    @abstractmethod
    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """Write all `operations` if all `compares` hold, atomically, as one revision.

        Independent transactions may be committed together and then share a revision: none of them writes
        what another compares or writes. Without operations it only tells whether the compares hold.
        At most MAX_TXN_OPERATIONS of each and MAX_TXN_BYTES in all, no key written twice
        (InvalidStoreRequestError). If the compares hold, a put on a lease that has ended raises
        LeaseNotFoundError and writes nothing. Changing nothing makes no revision. Raises StoreFullError where
        the store refuses writes. On StoreUnavailableError the outcome is unknown: read to find out.
        """

    @abstractmethod
    async def grant_lease(self, ttl_s: float) -> Lease:
        """Start a lease of at least `ttl_s` seconds (and at least MIN_LEASE_TTL_S)."""

    @abstractmethod
    async def keep_lease(self, lease_id: int) -> Lease:
        """Start the lease's ttl anew. Raises LeaseNotFoundError if it has ended: at its ttl it has."""

    @abstractmethod
    async def revoke_lease(self, lease_id: int) -> None:
        """End a lease and remove its keys, as one revision. Ending an ended lease changes nothing."""

    @abstractmethod
    def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        """Iterate over changes below `prefix`, each revision once, in order, without gaps.

        Starts with `from_revision`; 0 means with the first change after the iteration began. Raises, from
        the iteration: CompactedError when history is gone (also later, for a watcher that is too slow),
        FutureRevisionError for a revision above the current + 1. Ends with StoreClosedError on `aclose`.
        """

    async def facts(self) -> StoreFacts:
        """Return what the backend says of itself. May take as long as a read."""
        return StoreFacts()

    async def caution(self) -> str | None:
        """Return what speaks against trusting this backend, for its operator; None if nothing is known."""
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of everything. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
