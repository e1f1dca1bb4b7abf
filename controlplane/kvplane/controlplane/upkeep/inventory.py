"""What is in a store, and whether it fits together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.schema import Schema, SchemaTooNewError, check_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.store.base import MAX_TXN_OPERATIONS, KeyValue, Store

EXAMPLES = 5
"""So many records are named for each problem."""

State = Mapping[bytes, KeyValue | None]


class Problem(StrEnum):
    """What can be wrong with a record. Each value is its name in reports."""

    SCHEMA_MISSING = "schema_missing"
    SCHEMA_TOO_NEW = "schema_too_new"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    NO_LEASE = "no_lease"
    HOLDING_OF_NOTHING = "holding_of_nothing"
    LOCATION_WITHOUT_HOLDING = "location_without_holding"
    CLAIM_WITHOUT_HOLDING = "claim_without_holding"
    LOCATION_OF_GONE_ENGINE = "location_of_gone_engine"
    CLAIM_OF_GONE_ENGINE = "claim_of_gone_engine"
    ORDER_FOR_NOBODY = "order_for_nobody"
    EPOCH_BEHIND = "epoch_behind"


MEANING = {
    Problem.SCHEMA_MISSING: "there are records but no schema version: no replica of this version has started",
    Problem.SCHEMA_TOO_NEW: "the store is for newer software than this; what is said here may be wrong",
    Problem.FOREIGN: "under a prefix that this version does not know: a newer one's, or not kvplane's",
    Problem.UNREADABLE: "cannot be read, or lies under another record's key; replicas stumble over it",
    Problem.NO_LEASE: "hangs on no lease, so it stays for good when nobody removes it",
    Problem.HOLDING_OF_NOTHING: "points to a location or claim that is not there or not the same engine's",
    Problem.LOCATION_WITHOUT_HOLDING: "its engine can neither withdraw nor renew it",
    Problem.CLAIM_WITHOUT_HOLDING: "its engine can free the blocks under the reader",
    Problem.LOCATION_OF_GONE_ENGINE: "its engine is gone or has restarted; never handed out, swept up by a replica",
    Problem.CLAIM_OF_GONE_ENGINE: "its engine is gone or has restarted; swept up by a replica",
    Problem.ORDER_FOR_NOBODY: "its engine is gone or has restarted; swept up by a replica",
    Problem.EPOCH_BEHIND: "a live engine's epoch is not on record, so its next one may not be larger",
}
"""What each problem means for the fleet."""


@dataclass(slots=True)
class Tally:
    """How many records of a kind there are, and the bytes of their keys and values."""

    records: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Finding:
    """How often a problem was found, and some of the records that have it, for people."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Inventory:
    """What a store holds. `revision` is the store's when reading began, `until_revision` when it ended."""

    schema: Schema | None = None
    revision: int = 0
    until_revision: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: dict[Problem, Finding] = field(default_factory=dict)

    def note(self, problem: Problem, key: bytes) -> None:
        """Add a finding."""
        finding = self.findings.setdefault(problem, Finding())
        finding.count += 1
        if len(finding.examples) < EXAMPLES:
            finding.examples.append(kinds.readable(key))


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """Something that looked wrong while records moved; `confirm` judges by one revision of `wanted`."""

    problem: Problem
    key: bytes
    wanted: tuple[bytes, ...]
    confirm: Callable[[State], bool]


async def take(store: Store, progress: Callable[[int], None] = lambda count: None) -> Inventory:
    """Read the whole store and judge how its records fit together.

    Replicas may go on working: what looks wrong because it moved while it was read is looked at again, all
    records concerned at one revision, and only then counts. An engine that has just died leaves findings until
    a replica has swept up after it, which takes some seconds. O(records); about 300 bytes of memory for each
    location. Raises StoreError. `progress` is told how many records were read.
    """
    inventory = Inventory()
    reader = _Reader(inventory)
    async for page in kinds.pages(store):
        inventory.revision = inventory.revision or page.revision
        inventory.until_revision = page.revision
        for item in page.items:
            reader.see(item)
        progress(len(page.items))
        await asyncio.sleep(0)  # a store in memory never waits, and others have to run
    await _confirm(store, inventory, reader.suspicions())
    _judge_schema(inventory)
    return inventory


class _Reader:
    """Sees every record once, in the order of the keys, and remembers what has to fit together."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._engines: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._pointed_at: dict[bytes, bytes] = {}  # location or claim -> its holding, until that was seen
        self._bound: list[tuple[Problem, bytes, m.Holder]] = []
        self._dangling: list[_Suspicion] = []
        self._live: dict[tuple[str, int], list[tuple[Problem, bytes]]] = {}

    def see(self, item: KeyValue) -> None:
        kind = kinds.kind_of(item.key)
        tally = self._inventory.tallies.setdefault(kind.name, Tally())
        tally.records += 1
        tally.bytes += len(item.key) + len(item.value)
        if kind is kinds.FOREIGN:
            self._inventory.note(Problem.FOREIGN, item.key)
        if kind.leased and not item.lease_id:
            self._inventory.note(Problem.NO_LEASE, item.key)
        if kind.load is None:
            return
        try:
            value = kind.load(item.key, item.value)
        except ValueError:
            self._inventory.note(Problem.UNREADABLE, item.key)
            return
        if kind is kinds.SCHEMA:
            self._inventory.schema = value
        elif kind is kinds.ENGINES:
            self._engines[value.spec.engine_id] = value.engine_epoch
        elif kind is kinds.EPOCHS:
            self._epochs[item.key[len(keys.EPOCHS) :].decode()] = value
        elif kind is kinds.LOCATIONS:
            self._of_engine(Problem.LOCATION_OF_GONE_ENGINE, item.key, value.holder)
            self._pointed_at[item.key] = keys.holding(value.holder)
        elif kind is kinds.CLAIMS:
            self._of_engine(Problem.CLAIM_OF_GONE_ENGINE, item.key, value.location.holder)
            self._pointed_at[item.key] = keys.holding(value.location.holder)
        elif kind is kinds.ORDERS:
            self._of_engine(Problem.ORDER_FOR_NOBODY, item.key, value.holder)
        elif kind is kinds.HOLDINGS:
            self._see_holding(item.key, value)

    def _of_engine(self, problem: Problem, key: bytes, holder: m.Holder) -> None:
        self._live.setdefault((holder.engine_id, holder.engine_epoch), []).append((problem, key))
