"""The contract's stated limits, checked alike by every backend before anything is asked of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvplane.store.base import (
    MAX_KEY_BYTES,
    MAX_TXN_BYTES,
    MAX_TXN_OPERATIONS,
    MAX_VALUE_BYTES,
    MIN_LEASE_TTL_S,
    Compare,
    Operation,
    Put,
)
from kvplane.store.errors import InvalidStoreRequestError


def check_key(key: bytes) -> None:
    """Raise InvalidStoreRequestError unless the key has 1 to MAX_KEY_BYTES bytes."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise InvalidStoreRequestError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def check_prefix(prefix: bytes) -> None:
    """Raise InvalidStoreRequestError for a prefix (or scan position) longer than any key."""
    if len(prefix) > MAX_KEY_BYTES:
        raise InvalidStoreRequestError(f"a prefix has at most {MAX_KEY_BYTES} bytes, not {len(prefix)}")


def check_scan(prefix: bytes, after: bytes, limit: int) -> None:
    """Raise InvalidStoreRequestError for what `Store.scan` cannot take."""
    check_prefix(prefix)
    check_prefix(after)
    if limit < 1:
        raise InvalidStoreRequestError(f"a scan's limit is at least 1, not {limit}")


def check_watch(prefix: bytes, from_revision: int) -> None:
    """Raise InvalidStoreRequestError for what `Store.watch` cannot take."""
    check_prefix(prefix)
    if from_revision < 0:
        raise InvalidStoreRequestError(f"a revision to watch from is at least 0, not {from_revision}")


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Raise InvalidStoreRequestError for what `Store.transact` cannot take. O(operations)."""
    if len(compares) > MAX_TXN_OPERATIONS or len(operations) > MAX_TXN_OPERATIONS:
        raise InvalidStoreRequestError(
            f"a transaction has at most {MAX_TXN_OPERATIONS} compares and as many operations,"
            f" not {len(compares)} and {len(operations)}"
        )
    size = 0
    for compare in compares:
        length = len(compare.key)
        if not 0 < length <= MAX_KEY_BYTES:
            check_key(compare.key)
        size += length
        if compare.mod_revision < 0:
            raise InvalidStoreRequestError(
                f"a revision to compare with is at least 0, not {compare.mod_revision}"
            )
    written = set()
    for operation in operations:
        key = operation.key
        length = len(key)
        if not 0 < length <= MAX_KEY_BYTES:
            check_key(key)
        written.add(key)
        size += length
        if isinstance(operation, Put):
            length = len(operation.value)
            if length > MAX_VALUE_BYTES:
                raise InvalidStoreRequestError(f"a value has at most {MAX_VALUE_BYTES} bytes, not {length}")
            size += length
    if size > MAX_TXN_BYTES:
        raise InvalidStoreRequestError(
            f"a transaction's keys and values have at most {MAX_TXN_BYTES} bytes together, not {size}"
        )
    if len(written) < len(operations):
        raise InvalidStoreRequestError("a transaction writes a key at most once")


def lease_ttl(ttl_s: float) -> float:
    """Return the shortest ttl a lease may get when `ttl_s` is asked for.

    Raises InvalidStoreRequestError for infinity and NaN: a lease ends.
    """
    if not math.isfinite(ttl_s):
        raise InvalidStoreRequestError(f"a lease's ttl is a number of seconds, not {ttl_s}")
    return max(float(ttl_s), float(MIN_LEASE_TTL_S))
