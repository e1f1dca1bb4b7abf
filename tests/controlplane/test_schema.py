"""Who may start on a store: the schema record, upgraded and downgraded, by one replica or several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from kvplane.controlplane import keys, records
from kvplane.controlplane.schema import (
    CURRENT,
    Schema,
    SchemaTooNewError,
    SchemaUnreadableError,
    ensure_schema,
    read_schema,
)
from kvplane.store.base import Compare, Operation, Put, Store, Transaction
from kvplane.store.errors import StoreFullError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock


@pytest.fixture
async def store() -> AsyncIterator[FaultInjectingStore]:
    async with FaultInjectingStore(MemoryStore(ManualClock())) as store:
        yield store


async def test_the_first_replica_writes_the_record_and_the_next_leaves_it_alone(store: Store) -> None:
    assert await read_schema(store) is None
    assert await ensure_schema(store) == CURRENT
    written = await store.get(keys.schema())
    assert await ensure_schema(store) == CURRENT
    assert await store.get(keys.schema()) == written
    assert await read_schema(store) == CURRENT


async def test_an_upgrade_raises_the_schema_and_a_downgrade_leaves_it(store: Store) -> None:
    old, new = Schema(1, 1), Schema(3, 1)
    await ensure_schema(store, old)
    assert await ensure_schema(store, new) == new
    assert await ensure_schema(store, old) == new
    assert await read_schema(store) == new


async def test_a_breaking_change_locks_out_older_software_but_not_that_which_knows_both(
    store: Store,
) -> None:
    await ensure_schema(store, Schema(2, 1))
    assert await ensure_schema(store, Schema(4, 3)) == Schema(4, 3)
    with pytest.raises(SchemaTooNewError, match="schema 3 or later, and this one knows 2") as raised:
        await ensure_schema(store, Schema(2, 1))
    assert (raised.value.needed, raised.value.ours) == (3, 2)
    assert await ensure_schema(store, Schema(3, 1)) == Schema(4, 3)


async def test_a_needed_version_equal_to_ours_is_enough(store: Store) -> None:
    await ensure_schema(store, Schema(5, 5))
    assert await ensure_schema(store, Schema(5, 1)) == Schema(5, 5)


@pytest.mark.parametrize("raw", [b"\xff", b"", records.dump_schema(0, 0), records.dump_schema(1, 2)])
async def test_something_else_under_the_key_is_refused_and_kept(store: Store, raw: bytes) -> None:
    await store.transact([], [Put(keys.schema(), raw)])
    with pytest.raises(SchemaUnreadableError, match="prefix"):
        await ensure_schema(store)
    found = await store.get(keys.schema())
    assert found is not None
    assert found.value == raw


async def test_what_a_newer_version_noted_besides_survives_an_upgrade(store: Store) -> None:
    extra = b"\xa2\x06\x03new"  # field 100, three bytes
    await store.transact([], [Put(keys.schema(), records.dump_schema(1, 1) + extra)])
    await ensure_schema(store, Schema(2, 1))
    found = await store.get(keys.schema())
    assert found is not None
    assert found.value.endswith(extra)


async def test_replicas_that_start_at_once_agree(store: Store) -> None:
    versions = [Schema(n, 1) for n in (1, 4, 2, 3, 4, 1)]
    await asyncio.gather(*[ensure_schema(store, version) for version in versions])
    assert await read_schema(store) == Schema(4, 1)


async def test_another_replica_between_reading_and_writing_is_noticed() -> None:
    class Overtaken(MemoryStore):
        async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
            if not self.overtaken:
                self.overtaken = True
                await super().transact([], [Put(keys.schema(), records.dump_schema(7, 6))])
            return await super().transact(compares, operations)

        overtaken = False

    async with Overtaken(ManualClock()) as store:
        with pytest.raises(SchemaTooNewError):
            await ensure_schema(store, Schema(2, 1))
        assert await read_schema(store) == Schema(7, 6)


async def test_a_lost_answer_is_looked_into_once(store: FaultInjectingStore) -> None:
    store.fail_next("transact", when="after")
    assert await ensure_schema(store) == CURRENT
    store.fail_next("transact", when="before", times=2)
    with pytest.raises(StoreUnavailableError):
        await ensure_schema(store, Schema(2, 1))
    assert await read_schema(store) == CURRENT


async def test_a_full_store_says_so(store: FaultInjectingStore) -> None:
    store.fail_next("transact", error=StoreFullError("full"))
    with pytest.raises(StoreFullError):
        await ensure_schema(store)
