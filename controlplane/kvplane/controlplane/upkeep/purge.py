"""Taking records out of a store: all of them, or those of a tenant, an engine, a conversation.

Purging frees nothing on engines. Blocks whose records are purged stay where they are until their ttl ends
there; a live engine that loses its registration registers again at its next renewal and announces again
what it retains. So purging under live engines costs them room. To release a conversation's blocks at once,
ask the control plane (ReleaseLocation).

Open claims of live engines are left, or the engine could free the blocks under the reader: without a record
of the claim, nobody would tell it not to. They end by themselves, within a claim's life.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.records import UnreadableRecordError
from kvplane.controlplane.schema import SchemaUnreadableError, check_schema, read_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.store.base import MAX_TXN_BYTES, MAX_TXN_OPERATIONS, Compare, Delete, KeyValue, Store
from kvplane.store.errors import StoreUnavailableError

_KEPT = (kinds.EPOCHS, kinds.SCHEMA, kinds.PULSES)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records: those that match all members that are set. None means any."""

    tenant_id: str | None = None
    model: str | None = None
    adapter: str | None = None
    conversation_id: str | None = None
    engine_id: str | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is set."""
        return self == Selection()

    @property
    def names_conversations(self) -> bool:
        """Whether it tells conversations apart, not only engines."""
        return Selection(engine_id=self.engine_id) != self

    def has(self, key: m.ConversationKey) -> bool:
        """Tell whether a conversation is meant, whatever the engine."""
        wanted = (self.tenant_id, self.model, self.adapter, self.conversation_id)
        there = (key.tenant_id, key.model, key.adapter, key.conversation_id)
        return all(want in (None, name) for want, name in zip(wanted, there, strict=True))

    def has_location(self, location: m.Location) -> bool:
        """Tell whether a location is meant, retained or claimed."""
        return self.engine_id in (None, location.holder.engine_id) and self.has(location.key)


@dataclass(frozen=True, slots=True)
class _Victim:
    """Records that go together: the first is compared, so that nothing written meanwhile is lost."""

    kind: kinds.Kind
    item: KeyValue
    besides: tuple[bytes, ...] = ()
    holder: m.Holder | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """What a purge would take, by kind, and the ids of the live engines that it concerns."""

    counts: dict[str, int]
    live_engines: tuple[str, ...]


_Incarnation = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge took, by kind, and how many records it left since others changed them meanwhile."""

    counts: dict[str, int]
    changed: int


async def survey(store: Store, selection: Selection, *, everything: bool = False) -> Survey:
    """Return what `purge` with the same arguments would take if it ran now. Raises as `purge`. O(records)."""
    await _require_known(store)
    counts, concerned = dict[str, int](), set[_Incarnation]()
    live = await _live_engines(store)
    async for victim in _victims(store, selection, live, everything=everything):
        _count(counts, victim)
        if victim.holder is not None:
            concerned.add(_incarnation(victim.holder))
    names = {
        engine_id
        for engine_id, engine_epoch in live
        if selection.everything or selection.engine_id == engine_id or (engine_id, engine_epoch) in concerned
    }
    return Survey(counts, tuple(sorted(names)))


async def purge(
    store: Store,
    selection: Selection,
    *,
    everything: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Purged:
    """Remove the selected records.

    Of a whole store, or of an engine, the epochs stay, so that later ones are larger, and of a whole store
    the schema, the replicas' pulses and the open claims of live engines too, unless `everything`. Records
    that others change meanwhile stay and are counted. Idempotent; one that was broken off is to be repeated.
    Raises StoreError, and SchemaTooNewError for a store that only newer software may read: what this one
    takes for nobody's could be a live engine's. A damaged schema record is no obstacle. O(records).
    """
    await _require_known(store)
    counts, changed, batch = dict[str, int](), 0, list[_Victim]()
    operations = size = 0
    live = await _live_engines(store)
    async for victim in _victims(store, selection, live, everything=everything):
        weight = 2 * len(victim.item.key) + sum(map(len, victim.besides))
        if operations + 1 + len(victim.besides) > MAX_TXN_OPERATIONS or size + weight > MAX_TXN_BYTES:
            changed += await _remove(store, batch, counts)
            progress(len(batch))
            batch, operations, size = [], 0, 0
        batch.append(victim)
        operations, size = operations + 1 + len(victim.besides), size + weight
    changed += await _remove(store, batch, counts)
    progress(len(batch))
    return Purged(counts, changed)


async def _require_known(store: Store) -> None:
    with suppress(SchemaUnreadableError):
        check_schema(await read_schema(store))


async def _remove(store: Store, batch: list[_Victim], counts: dict[str, int]) -> int:
    """Remove a batch, or those of it that have not changed, one by one; returns how many had."""
    if not batch:
        return 0
    if await _transact(store, batch):
        for victim in batch:
            _count(counts, victim)
        return 0
    changed = 0
    for victim in batch:
        if await _transact(store, [victim]):
            _count(counts, victim)
        else:
            changed += 1
    return changed


async def _transact(store: Store, batch: list[_Victim]) -> bool:
    compares = [Compare(victim.item.key, victim.item.mod_revision) for victim in batch]
    gone = dict.fromkeys(key for victim in batch for key in (victim.item.key, *victim.besides))
    operations = [Delete(key) for key in gone]
    try:
        return (await store.transact(compares, operations)).succeeded
    except StoreUnavailableError:
        found = await kinds.together(store, *gone)  # was it done?
        return not any(found.values()) or (await store.transact(compares, operations)).succeeded


def _count(counts: dict[str, int], victim: _Victim) -> None:
    counts[victim.kind.name] = counts.get(victim.kind.name, 0) + 1
    if victim.besides:
        counts[kinds.HOLDINGS.name] = counts.get(kinds.HOLDINGS.name, 0) + len(victim.besides)


async def _live_engines(store: Store) -> frozenset[_Incarnation]:
    live = set[_Incarnation]()
    async for item in _below(store, keys.ENGINES):
        engine = _read(kinds.ENGINES, item)
        if engine is not None:
            live.add((engine.spec.engine_id, engine.engine_epoch))
    return frozenset(live)


def _incarnation(holder: m.Holder) -> _Incarnation:
    return holder.engine_id, holder.engine_epoch


async def _victims(
    store: Store, selection: Selection, live: frozenset[_Incarnation], *, everything: bool
) -> AsyncIterator[_Victim]:
    """Give what is selected, registrations of engines first: then nothing new is put on record for them."""
    if selection.everything:
        async for victim in _all(store, live, everything=everything):
            yield victim
        return
    spared = frozenset[_Incarnation]() if everything else live
    engine_id = None if selection.names_conversations else selection.engine_id
    if engine_id is not None:
        for kind, key in ((kinds.ENGINES, keys.engine(engine_id)), (kinds.LOADS, keys.load(engine_id))):
            if (found := await store.get(key)) is not None:
                yield _Victim(kind, found)
    held = set[bytes]()
    async for victim in _located(store, selection, spared):
        if engine_id is not None:
            held.update(victim.besides)
        yield victim
    if selection.engine_id is None:
        async for item in _below(store, _of_tenant(keys.TURNS, selection)):
            named = _conversation(item.key)
            if named is not None and selection.has(named):
                yield _Victim(kinds.TURNS, item)
        async for item in _below(store, _of_tenant(keys.BEGUN, selection)):
            named = _read(kinds.BEGUN, item)
            if named is not None and selection.has(named):
                yield _Victim(kinds.BEGUN, item)
    if engine_id is not None:
        async for item in _below(store, keys.engine_holdings(engine_id)):
            if item.key not in held and not _is_spared_holding(item, spared):
                yield _Victim(kinds.HOLDINGS, item)
        async for item in _below(store, keys.engine_orders(engine_id)):
            yield _Victim(kinds.ORDERS, item)
        if everything and (found := await store.get(keys.epoch(engine_id))) is not None:
            yield _Victim(kinds.EPOCHS, found)


async def _all(store: Store, live: frozenset[_Incarnation], *, everything: bool) -> AsyncIterator[_Victim]:
    async for item in _below(store, keys.ENGINES):
        yield _Victim(kinds.ENGINES, item)
    async for item in _below(store, b""):
        kind = kinds.kind_of(item.key)
        if kind is kinds.ENGINES:
            continue
        if not everything:
            if kind in _KEPT or (kind is kinds.HOLDINGS and _is_spared_holding(item, live)):
                continue
            claim = _read(kind, item) if kind is kinds.CLAIMS else None
            if claim is not None and _incarnation(claim.location.holder) in live:
                continue
        yield _Victim(kind, item)


async def _located(
    store: Store, selection: Selection, spared: frozenset[_Incarnation]
) -> AsyncIterator[_Victim]:
    """Give the selected locations, and the claims that are not spared, each with its holding."""
    async for item in _below(store, _of_tenant(keys.LOCATIONS, selection)):
        location = _read(kinds.LOCATIONS, item)
        if location is not None and selection.has_location(location):
            yield _Victim(kinds.LOCATIONS, item, (keys.holding(location.holder),), location.holder)
    async for item in _below(store, keys.CLAIMS):
        claim = _read(kinds.CLAIMS, item)
        if claim is None or not selection.has_location(claim.location):
            continue
        holder = claim.location.holder
        if _incarnation(holder) not in spared:
            yield _Victim(kinds.CLAIMS, item, (keys.holding(holder),), holder)


def _is_spared_holding(item: KeyValue, live: frozenset[_Incarnation]) -> bool:
    target = _read(kinds.HOLDINGS, item)
    if target is None or kinds.kind_of(target) is not kinds.CLAIMS:
        return False
    return _incarnation(keys.holder_of(item.key)) in live


def _of_tenant(prefix: bytes, selection: Selection) -> bytes:
    if selection.tenant_id is None:
        return prefix
    return prefix + keys.tenant_locations(selection.tenant_id)[len(keys.LOCATIONS) :]


def _conversation(key: bytes) -> m.ConversationKey | None:
    try:
        return keys.conversation_of(key)
    except ValueError:
        return None


def _read(kind: kinds.Kind, item: KeyValue) -> Any:
    try:
        return kind.read(item.key, item.value)
    except UnreadableRecordError:
        return None


async def _below(store: Store, prefix: bytes) -> AsyncIterator[KeyValue]:
    async for page in kinds.pages(store, prefix):
        for item in page.items:
            yield item
        await asyncio.sleep(0)  # a store in memory never waits, and others have to run
