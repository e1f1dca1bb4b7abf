"""Stores: the contract, and the backends that keep it."""

from kvplane.store.base import (
    Compare,
    Delete,
    Event,
    EventBatch,
    KeyValue,
    Lease,
    Operation,
    Page,
    Put,
    Store,
    Transaction,
)

__all__ = [
    "Compare",
    "Delete",
    "Event",
    "EventBatch",
    "KeyValue",
    "Lease",
    "Operation",
    "Page",
    "Put",
    "Store",
    "Transaction",
]
