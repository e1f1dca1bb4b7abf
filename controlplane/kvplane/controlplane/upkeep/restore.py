"""Bringing a dump back: what is still true, and nothing else.

Restored are the epochs and the turns of conversations, from which the next numbers are taken. **Locations,
claims, holdings, orders and engines are not**: after the dump was written a location may have been claimed
and read, or withdrawn and its blocks reused, so handing it out again could hand out another conversation's
KV. They are not needed either: engines register with an empty store by themselves, within a lease, and
announce again what they still retain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvplane.controlplane.engines import EPOCH_KEPT_MS
from kvplane.controlplane.schema import CURRENT, Schema, check_schema, ensure_schema, read_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.controlplane.upkeep.dump import Dump
from kvplane.store.base import MAX_TXN_BYTES, MAX_TXN_OPERATIONS, Compare, KeyValue, Put, Store
from kvplane.store.clock import Clock
from kvplane.store.errors import LeaseNotFoundError, StoreUnavailableError

RESTORED = (kinds.EPOCHS, kinds.TURNS)

_IGNORED = (kinds.SCHEMA, kinds.PULSES, kinds.BEGUN)
_KEYS_PER_LEASE = 1000
_SPREAD_MS = 60_000
"""Leases end over this span, not all at once."""
_ATTEMPTS = 8


class NotEmptyError(Exception):
    """The store has records already. One line that says so."""


@dataclass(slots=True)
class Restored:
    """What became of a dump's records, by kind.

    `kept` are those that were left alone because the store's own record is as new or newer; `expired` would
    have been forgotten since the dump was written; `left_out` are of kinds that are not restored.
    """

    written: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)


_Item = tuple[kinds.Kind, bytes, bytes]


async def restore_dump(
    store: Store,
    clock: Clock,
    dump: Dump,
    *,
    turns_kept_ms: int,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Restored:
    """Write a dump's epochs and turns into a store that is empty but for its schema and replicas' pulses.

    With `force` it may have records: of each pair the newer one stays, by epoch or turn number. So a restore
    that was broken off can be repeated with `force`. Each write is a compare-transaction, and replicas may be
    running. Turns are kept as long as if they had been written when the dump was, for `turns_kept_ms`.
    Raises NotEmptyError, SchemaError, StoreError. O(records).
    """
    check_schema(await read_schema(store))
    check_schema(dump.schema)
    if not force:
        await _require_empty(store)
    dumped = dump.schema or CURRENT
    await ensure_schema(
        store,
        Schema(max(CURRENT.schema, dumped.schema), max(CURRENT.least_reader, dumped.least_reader)),
    )
    result = Restored()
    dealt_with = {kind.name for kind in (*RESTORED, *_IGNORED)}
    result.left_out = {name: count for name, count in dump.counts.items() if name not in dealt_with}
    for kind in RESTORED:
        items = [(kind, key, raw) for key, raw in dump.records if kinds.kind_of(key) is kind]
        now = clock.now_ms()
        # An epoch's life is counted from the restore, whatever the dump's age.
        until_ms = now + EPOCH_KEPT_MS if kind is kinds.EPOCHS else dump.time_ms + turns_kept_ms
        until_ms = min(until_ms, now + max(EPOCH_KEPT_MS, turns_kept_ms))  # a dump of a clock ahead
        if until_ms <= now:
            if items:
                result.expired[kind.name] = len(items)
            continue
        for number, lot in enumerate(_lots(items, _KEYS_PER_LEASE, None)):
            spread_ms = number * 1000 % _SPREAD_MS
            ttl_s = (until_ms + spread_ms - clock.now_ms()) / 1000
            await _write_lot(store, lot, ttl_s, result, progress)
    return result


async def _require_empty(store: Store) -> None:
    async for page in kinds.pages(store):
        for item in page.items:
            kind = kinds.kind_of(item.key)
            if kind not in _IGNORED:
                raise NotEmptyError(
                    f"the store is not empty: it has {kind.name}; restore into another prefix, purge this"
                    " one, or add --force to add what is missing"
                )


def _lots(items: Sequence[_Item], most: int, most_bytes: int | None) -> Iterator[list[_Item]]:
    """Split into runs of at most so many items, and so many bytes in keys (compared too) and values."""
    lot, size = list[_Item](), 0
    for item in items:
        weight = 2 * len(item[1]) + len(item[2])
        if lot and (len(lot) == most or (most_bytes is not None and size + weight > most_bytes)):
            yield lot
            lot, size = [], 0
        lot.append(item)
        size += weight
    if lot:
        yield lot


async def _write_lot(
    store: Store, lot: list[_Item], ttl_s: float, result: Restored, progress: Callable[[int], None]
) -> None:
    """Write records that share a lease."""
    lease_id = (await store.grant_lease(ttl_s)).lease_id
    for batch in _lots(lot, MAX_TXN_OPERATIONS, MAX_TXN_BYTES):
        for attempt in range(_ATTEMPTS):
            try:
                if await _write_batch(store, batch, lease_id, result):
                    break
            except LeaseNotFoundError:
                lease_id = (await store.grant_lease(ttl_s)).lease_id
            except StoreUnavailableError:
                if attempt + 1 == _ATTEMPTS:
                    raise
        else:
            raise StoreUnavailableError("others keep writing the same records")
        progress(len(batch))


async def _write_batch(store: Store, batch: list[_Item], lease_id: int, result: Restored) -> bool:
    """Write those records of a batch that the store lacks or has older ones of; False: to be done again."""
    found = await kinds.together(store, *[key for _, key, _ in batch])
    puts = [Put(key, raw, lease_id) for kind, key, raw in batch if _is_newer(kind, raw, found[key])]
    compares = [Compare(put.key, _revision(found[put.key])) for put in puts]
    if puts and not (await store.transact(compares, puts)).succeeded:
        return False
    written = {put.key for put in puts}
    for kind, key, _ in batch:
        into = result.written if key in written else result.kept
        into[kind.name] = into.get(kind.name, 0) + 1
    return True


def _revision(item: KeyValue | None) -> int:
    return 0 if item is None else item.mod_revision


def _is_newer(kind: kinds.Kind, raw: bytes, there: KeyValue | None) -> bool:
    if there is None:
        return True
    try:
        return _number(kind, there.key, raw) > _number(kind, there.key, there.value)
    except ValueError:
        return False  # what is there cannot be read: leave it to `check`


def _number(kind: kinds.Kind, key: bytes, raw: bytes) -> int:
    value = kind.read(key, raw)
    return int(value) if kind is kinds.EPOCHS else int(value.latest_turn)
