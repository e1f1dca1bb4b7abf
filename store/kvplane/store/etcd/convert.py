"""Between the store's words and etcd's."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import Compare, Event, KeyValue, Operation, Put

_MOD = 2  # compare target
_REMOVAL = 1  # event type
ALL_FURTHER_KEYS = b"\0"
"""As a range's end: none."""


def range_end(prefix: bytes) -> bytes:
    """Return the end of the range of keys that start with `prefix`."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else ALL_FURTHER_KEYS


def transaction(
    prefix: bytes, compares: Sequence[Compare], operations: Sequence[Operation], *, find: bool = True
) -> pb.TxnRequest:
    """Return a transaction. With `find` it reads the compared keys if the compares do not hold.

    One without operations reads as well if they hold, or etcd would take it for one that may be answered
    from what a member happens to have.
    """
    request = pb.TxnRequest()
    for compare in compares:
        request.compare.add(
            result=0, target=_MOD, key=prefix + compare.key, mod_revision=compare.mod_revision
        )
        if find:
            request.failure.add().request_range.key = prefix + compare.key
    for operation in operations:
        step = request.success.add()
        if isinstance(operation, Put):
            put = step.request_put
            put.key, put.value, put.lease = prefix + operation.key, operation.value, operation.lease_id
        else:
            step.request_delete_range.key = prefix + operation.key
    if not operations:
        request.success.add().request_range.key = prefix
    return request


def reads(prefix: bytes, compares: Sequence[Compare]) -> pb.TxnRequest:
    """Return a transaction that reads the compared keys, whatever they are."""
    request = pb.TxnRequest()
    for compare in compares:
        request.success.add().request_range.key = prefix + compare.key
    return request


def found(answers: Sequence[pb.ResponseOp], skip: int) -> tuple[KeyValue | None, ...]:
    """Return what reads of single keys found; `skip` is the length of the store's prefix."""
    return tuple(
        key_value(answer.response_range.kvs[0], skip) if answer.response_range.kvs else None
        for answer in answers
    )


def key_value(item: pb.KeyValue, skip: int) -> KeyValue:
    """Return a key as the store shows it, without the store's prefix."""
    return KeyValue(item.key[skip:], item.value, item.create_revision, item.mod_revision, item.lease)


def event(change: pb.Event, skip: int) -> Event:
    """Return a change as the store shows it."""
    return Event(
        change.kv.key[skip:],
        None if change.type == _REMOVAL else key_value(change.kv, skip),
        key_value(change.prev_kv, skip) if change.HasField("prev_kv") else None,
    )
