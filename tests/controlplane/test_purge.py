"""Purging takes what was selected, keeps what must outlive it, and leaves claims to their readers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.schema import ensure_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.controlplane.upkeep.inventory import take_inventory
from kvplane.controlplane.upkeep.purge import Purged, Selection, purge, survey
from kvplane.store.base import Compare, Delete, Operation, Put, Store, Transaction
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from tests.controlplane.harness import Rig, key, running

ALL = Selection()
MINE, THEIRS, CLAIMED = key("c", "mine"), key("c", "theirs"), key("claimed", "mine")


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    """What two engines and a control plane left: nothing runs on it any more.

    d holds mine/c and the claimed mine/claimed, and has an order; e holds theirs/c.
    """
    async with running() as rig, MemoryStore(rig.clock) as store:
        await ensure_schema(rig.store)
        d, e = await rig.engine("d"), await rig.engine("e")
        await rig.retain(d, "superseded", MINE)
        await rig.retain(d, "mine", MINE)
        await rig.retain(d, "claimed", CLAIMED)
        await rig.retain(e, "theirs", THEIRS)
        assert isinstance(await rig.claim(conversation=CLAIMED), m.Claim)
        lease = (await store.grant_lease(10_000)).lease_id
        async for page in kinds.pages(rig.store):
            for item in page.items:
                await store.transact([], [Put(item.key, item.value, lease if item.lease_id else 0)])
        await store.transact([], [Put(keys.load("d"), b"load", lease)])
        yield store


async def left(store: Store) -> dict[str, int]:
    counts = dict[str, int]()
    async for page in kinds.pages(store):
        for item in page.items:
            name = kinds.kind_of(item.key).name
            counts[name] = counts.get(name, 0) + 1
    counts.pop("pulses", None)
    return counts


BEFORE = {
    "schema": 1,
    "engines": 2,
    "epochs": 2,
    "loads": 1,
    "locations": 2,
    "turns": 3,
    "claims": 1,
    "holdings": 3,
    "orders": 1,
}


async def test_the_store_under_test_is_as_described(store: MemoryStore) -> None:
    assert await left(store) == BEFORE
    assert (await take_inventory(store)).findings == {}


async def test_a_purge_of_all_keeps_epochs_the_schema_and_claims_of_live_engines(store: MemoryStore) -> None:
    result = await purge(store, ALL)
    assert await left(store) == {"schema": 1, "epochs": 2, "claims": 1, "holdings": 1}
    assert result.changed == 0
    assert result.counts == {
        "engines": 2,
        "loads": 1,
        "locations": 2,
        "turns": 3,
        "holdings": 2,
        "orders": 1,
    }


async def test_a_purge_of_all_takes_claims_of_engines_that_are_gone(store: MemoryStore) -> None:
    await store.transact([], [Delete(keys.engine("d"))])
    await purge(store, ALL)
    assert await left(store) == {"schema": 1, "epochs": 2}


async def test_a_purge_of_everything_leaves_nothing(store: MemoryStore) -> None:
    await store.transact([], [Put(keys.pulse("r"), b""), Put(b"zz", b"foreign")])
    await purge(store, ALL, everything=True)
    assert (await store.scan(b"")).items == ()


async def test_a_tenants_conversations_go_and_no_others(store: MemoryStore) -> None:
    result = await purge(store, Selection(tenant_id="mine"))
    assert result.counts == {"locations": 1, "holdings": 1, "turns": 2}
    assert await store.get(keys.location(MINE)) is None
    assert await store.get(keys.location(THEIRS))
    assert await store.get(keys.claim("claim"))  # its engine lives
    assert (await take_inventory(store)).findings == {}


async def test_a_tenants_claims_go_too_when_their_engine_is_gone(store: MemoryStore) -> None:
    await store.transact([], [Delete(keys.engine("d"))])
    result = await purge(store, Selection(tenant_id="mine"))
    assert result.counts == {"locations": 1, "claims": 1, "holdings": 2, "turns": 2}


async def test_a_tenant_that_begins_another_ones_name_is_another(store: MemoryStore) -> None:
    assert (await purge(store, Selection(tenant_id="min"))).counts == {}
    assert (await purge(store, Selection(tenant_id=""))).counts == {}
    assert await left(store) == BEFORE


@pytest.mark.parametrize(
    ("selection", "counts"),
    [
        (Selection(conversation_id="c"), {"locations": 2, "holdings": 2, "turns": 2}),
        (Selection(conversation_id="c", tenant_id="mine"), {"locations": 1, "holdings": 1, "turns": 1}),
        (Selection(conversation_id="c", model="m"), {"locations": 2, "holdings": 2, "turns": 2}),
        (Selection(conversation_id="c", model="other"), {}),
        (Selection(adapter="lora"), {}),
        (Selection(adapter="", tenant_id="theirs"), {"locations": 1, "holdings": 1, "turns": 1}),
        (Selection(conversation_id="claimed"), {"turns": 1}),
        (Selection(engine_id="e", conversation_id="c"), {"locations": 1, "holdings": 1}),
        (Selection(engine_id="nobody"), {}),
    ],
    ids=str,
)
async def test_members_of_a_selection_all_have_to_match(
    store: MemoryStore, selection: Selection, counts: dict[str, int]
) -> None:
    looked = await survey(store, selection)
    assert looked.counts == counts
    assert await left(store) == BEFORE
    assert await purge(store, selection) == Purged(counts, 0)


async def test_an_engine_goes_with_all_that_it_holds_but_its_epoch_and_open_claims(
    store: MemoryStore,
) -> None:
    result = await purge(store, Selection(engine_id="d"))
    assert result.counts == {"engines": 1, "loads": 1, "locations": 1, "holdings": 1, "orders": 1}
    assert await store.get(keys.epoch("d"))
    assert await store.get(keys.claim("claim"))
    again = await purge(store, Selection(engine_id="d"), everything=True)
    assert again.counts == {"claims": 1, "holdings": 1, "epochs": 1}
    assert await left(store) == {
        "schema": 1,
        "engines": 1,
        "epochs": 1,
        "locations": 1,
        "turns": 3,
        "holdings": 1,
    }


async def test_dangling_holdings_of_an_engine_go_with_it(store: MemoryStore) -> None:
    await store.transact([], [Delete(keys.location(MINE))])
    looked = await survey(store, Selection(engine_id="d"))
    assert looked.counts["holdings"] == 1
    await purge(store, Selection(engine_id="d"), everything=True)
    assert (await take_inventory(store)).findings == {}


async def test_live_engines_that_are_concerned_are_named(store: MemoryStore) -> None:
    assert (await survey(store, ALL)).live_engines == ("d", "e")
    assert (await survey(store, Selection(engine_id="e"))).live_engines == ("e",)
    assert (await survey(store, Selection(tenant_id="mine"))).live_engines == ("d",)
    assert (await survey(store, Selection(conversation_id="claimed"))).live_engines == ()
    await store.transact([], [Delete(keys.engine("d"))])
    assert (await survey(store, Selection(tenant_id="mine"))).live_engines == ()


async def test_more_than_a_transaction_takes(store: MemoryStore) -> None:
    for number in range(300):
        await store.transact([], [Put(keys.turns(key(f"c{number}", "many")), b"")])
    seen = list[int]()
    result = await purge(store, Selection(tenant_id="many"), progress=seen.append)
    assert (result.counts, sum(seen)) == ({"turns": 300}, 300)


class Meddled(MemoryStore):
    """Somebody writes a record just before the first transaction that removes it."""

    meddle: Put | None = None
    unavailable_after = False

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        put = self.meddle
        if put is not None and any(operation.key == put.key for operation in operations):
            self.meddle = None
            await super().transact([], [put])
        done = await super().transact(compares, operations)
        if self.unavailable_after and operations:
            self.unavailable_after = False
            raise StoreUnavailableError
        return done


async def meddled(store: MemoryStore) -> Meddled:
    copy = Meddled(ManualClock())
    lease = (await copy.grant_lease(10_000)).lease_id
    async for page in kinds.pages(store):
        for item in page.items:
            await copy.transact([], [Put(item.key, item.value, lease if item.lease_id else 0)])
    return copy


async def test_what_changes_meanwhile_stays_with_all_that_belongs_to_it(store: MemoryStore) -> None:
    async with await meddled(store) as copy:
        found = await copy.get(keys.location(MINE))
        assert found is not None
        copy.meddle = Put(found.key, found.value, found.lease_id)
        result = await purge(copy, Selection(tenant_id="mine"))
        assert result == Purged({"turns": 2}, 1)
        assert (await take_inventory(copy)).findings == {}
        assert (await purge(copy, Selection(tenant_id="mine"))).counts == {"locations": 1, "holdings": 1}


async def test_a_lost_answer_is_looked_into(store: MemoryStore) -> None:
    async with await meddled(store) as copy:
        copy.unavailable_after = True
        result = await purge(copy, Selection(tenant_id="mine"))
        assert result == Purged({"locations": 1, "holdings": 1, "turns": 2}, 0)


async def test_a_reader_keeps_its_claim_and_the_engine_is_told_so(rig: Rig) -> None:
    """After a purge under a live engine, what it wants back is still refused while it is being read."""
    engine = await rig.engine()
    await rig.retain(engine, "read", CLAIMED)
    await rig.retain(engine, "idle", MINE)
    assert isinstance(await rig.claim(conversation=CLAIMED), m.Claim)
    await purge(rig.store, Selection(tenant_id="mine"))
    await rig.clock.advance(0)
    holders = [m.Holder("d", engine.engine_epoch, request_id) for request_id in ("read", "idle")]
    outcomes = [await rig.plane.releases.withdraw(holder) for holder in holders]
    assert outcomes == [m.ReleaseOutcome.CLAIMED, m.ReleaseOutcome.NOTHING]
    assert await rig.plane.releases.finish_claim("claim", "r") is m.ReleaseOutcome.RELEASED
