"""What is in a store, and whether it fits together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.records import UnreadableRecordError
from kvplane.controlplane.schema import CURRENT
from kvplane.controlplane.upkeep import kinds
from kvplane.controlplane.upkeep.findings import Inventory, Problem, Tally
from kvplane.store.base import MAX_TXN_OPERATIONS, KeyValue, Store

_State = Mapping[bytes, KeyValue | None]


async def take_inventory(store: Store, progress: Callable[[int], None] = lambda count: None) -> Inventory:
    """Read the whole store and judge how its records fit together.

    Replicas may go on working: what looks wrong because it moved while it was read is looked at again, all
    records concerned at one revision, and only then counts. An engine that has just died leaves findings
    until a replica has swept up after it, which takes some seconds. O(records); less than a kilobyte of
    memory for each location. `progress` is told how many more records were read. Raises StoreError.
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
    if inventory.schema is None and inventory.tallies:
        inventory.note(Problem.SCHEMA_MISSING, keys.schema())
    elif inventory.schema is not None and inventory.schema.least_reader > CURRENT.schema:
        inventory.note(Problem.SCHEMA_TOO_NEW, keys.schema())
    return inventory


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """Something that looked wrong while records moved; `judge` tells by one revision of `wanted`."""

    problem: Problem
    key: bytes
    wanted: tuple[bytes, ...]
    judge: Callable[[_State], bool]


class _Reader:
    """Sees every record once, in the order of the keys: claims, engines, locations, epochs, orders, holdings.

    The order spares memory: most of what a record has to fit to has been seen when it comes.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._epoch_of: dict[str, int] = {}  # live engines
        self._claims: list[tuple[bytes, m.Holder]] = []
        self._unheld: dict[bytes, bytes] = {}  # location or claim -> its holding, until that is seen
        self._unrecorded: dict[str, int] = {}  # live engines, until their epoch is seen
        self._suspicions: list[_Suspicion] = []

    def see(self, item: KeyValue) -> None:
        """Count a record and note what is wrong with it by itself, or may be with what it refers to."""
        kind, inventory = kinds.kind_of(item.key), self._inventory
        tally = inventory.tallies.setdefault(kind.name, Tally())
        tally.records += 1
        tally.bytes += len(item.key) + len(item.value)
        if kind is kinds.FOREIGN:
            inventory.note(Problem.FOREIGN, item.key)
        if kind.leased and not item.lease_id:
            inventory.note(Problem.NO_LEASE, item.key)
        value = _value(item)
        if value is None:
            if kind.load is not None:
                inventory.note(Problem.UNREADABLE, item.key)
        elif kind is kinds.SCHEMA:
            inventory.schema = value
        elif kind is kinds.ENGINES:
            self._epoch_of[value.spec.engine_id] = value.engine_epoch
            self._unrecorded[value.spec.engine_id] = value.engine_epoch
        elif kind is kinds.EPOCHS:
            engine_id = keys.engine_id_of(keys.ENGINES + item.key[len(keys.EPOCHS) :])
            if value >= self._unrecorded.get(engine_id, 0):
                self._unrecorded.pop(engine_id, None)
        elif kind is kinds.CLAIMS:
            self._claims.append((item.key, value.location.holder))
            self._unheld[item.key] = keys.holding(value.location.holder)
        elif kind is kinds.LOCATIONS:
            self._fit_engine(Problem.LOCATION_OF_GONE_ENGINE, item.key, value.holder)
            self._unheld[item.key] = keys.holding(value.holder)
        elif kind is kinds.ORDERS:
            self._fit_engine(Problem.ORDER_FOR_NOBODY, item.key, value.holder)
        elif kind is kinds.HOLDINGS and self._unheld.get(value) == item.key:
            del self._unheld[value]
        elif kind is kinds.HOLDINGS:
            judge = partial(_points_to_nothing, item.key, value)
            self._suspect(Problem.HOLDING_OF_NOTHING, item.key, (item.key, value), judge)

    def suspicions(self) -> Iterator[_Suspicion]:
        """Give all that looked wrong, when everything has been seen."""
        for key, holder in self._claims:
            self._fit_engine(Problem.CLAIM_OF_GONE_ENGINE, key, holder)
        for engine_id, engine_epoch in self._unrecorded.items():
            key, epoch_key = keys.engine(engine_id), keys.epoch(engine_id)
            judge = partial(_is_behind, key, epoch_key, engine_epoch)
            self._suspect(Problem.EPOCH_BEHIND, key, (key, epoch_key), judge)
        yield from self._suspicions
        for key, holding in self._unheld.items():
            is_claim = kinds.kind_of(key) is kinds.CLAIMS
            problem = Problem.CLAIM_WITHOUT_HOLDING if is_claim else Problem.LOCATION_WITHOUT_HOLDING
            yield _Suspicion(problem, key, (key, holding), partial(_is_unheld, key, holding))

    def _fit_engine(self, problem: Problem, key: bytes, holder: m.Holder) -> None:
        if self._epoch_of.get(holder.engine_id) != holder.engine_epoch:
            engine = keys.engine(holder.engine_id)
            self._suspect(problem, key, (key, engine), partial(_is_of_gone_engine, key, holder))

    def _suspect(
        self, problem: Problem, key: bytes, wanted: tuple[bytes, ...], judge: Callable[[_State], bool]
    ) -> None:
        self._suspicions.append(_Suspicion(problem, key, wanted, judge))


async def _confirm(store: Store, inventory: Inventory, suspicions: Iterator[_Suspicion]) -> None:
    """Note those suspicions that hold at one revision, a transaction's worth of keys at a time."""
    batch, wanted = list[_Suspicion](), dict[bytes, None]()
    for suspicion in suspicions:
        if len(wanted) + len(suspicion.wanted) > MAX_TXN_OPERATIONS:
            await _confirm_batch(store, inventory, batch, list(wanted))
            batch, wanted = [], {}
        batch.append(suspicion)
        wanted |= dict.fromkeys(suspicion.wanted)
    if batch:
        await _confirm_batch(store, inventory, batch, list(wanted))


async def _confirm_batch(
    store: Store, inventory: Inventory, batch: list[_Suspicion], wanted: list[bytes]
) -> None:
    state = await kinds.together(store, *wanted)
    for suspicion in batch:
        if suspicion.judge(state):
            inventory.note(suspicion.problem, suspicion.key)


# Each tells, by records of one revision, whether what looked wrong is wrong. What was removed or rewritten
# since it was first seen is not.


def _value(item: KeyValue | None) -> Any:
    """Return a record's value, or None if there is none or it cannot be read."""
    try:
        return None if item is None else kinds.kind_of(item.key).read(item.key, item.value)
    except UnreadableRecordError:
        return None


def _holder(item: KeyValue | None) -> m.Holder | None:
    """Return whose blocks a location or claim, or an order, is about."""
    value = _value(item)
    location = value.location if isinstance(value, m.Claim) else value
    return location.holder if isinstance(location, m.Location | m.Order) else None


def _points_to_nothing(key: bytes, target: bytes, state: _State) -> bool:
    return _value(state[key]) == target and _holder(state[target]) != keys.holder_of(key)


def _is_unheld(key: bytes, holding: bytes, state: _State) -> bool:
    holder = _holder(state[key])
    return holder is not None and keys.holding(holder) == holding and _value(state[holding]) != key


def _is_of_gone_engine(key: bytes, holder: m.Holder, state: _State) -> bool:
    engine = state[keys.engine(holder.engine_id)]
    if engine is not None and (found := _value(engine)) is None:
        return False  # it lives, but its record cannot be read, which is noted already
    return _holder(state[key]) == holder and (engine is None or found.engine_epoch != holder.engine_epoch)


def _is_behind(key: bytes, epoch_key: bytes, engine_epoch: int, state: _State) -> bool:
    engine = _value(state[key])
    recorded = _value(state[epoch_key])
    return engine is not None and engine.engine_epoch == engine_epoch and (recorded or 0) < engine_epoch
