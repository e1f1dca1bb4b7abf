"""What a store raises. Each says what the caller can do about it."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of a store."""


class StoreUnavailableError(StoreError):
    """The store did not answer. A write's outcome is unknown; a read may be repeated."""


class StoreClosedError(StoreError):
    """The store was closed by its owner; no call will work again."""


class StoreFullError(StoreError):
    """The store refuses writes for want of space; reads go on."""


class LeaseNotFoundError(StoreError):
    """The lease ended or never was. Grant another; nothing is revived."""

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"lease {lease_id} does not exist")
        self.lease_id = lease_id


class CompactedError(StoreError):
    """Revisions before `compact_revision` are gone. Scan again and watch from the scan's revision + 1."""

    def __init__(self, compact_revision: int) -> None:
        super().__init__(f"revisions before {compact_revision} are compacted")
        self.compact_revision = compact_revision


class FutureRevisionError(StoreError):
    """A revision beyond this store's was asked for: it is another store's, or a restarted one's."""

    def __init__(self, asked: int, current: int) -> None:
        super().__init__(f"revision {asked} asked for, but the store is at {current}")
        self.asked = asked
        self.current = current


class InvalidStoreRequestError(StoreError, ValueError):
    """A request breaks a stated limit; it will never work."""


class StoreUrlError(ValueError):
    """A store's URL that cannot work. One line that says why and what would; never repeats the URL itself,
    which may hold a password.
    """
