"""`check`: what fits together is clean, each thing that does not is found, what only moves is not."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.schema import Schema, ensure_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.controlplane.upkeep.findings import EXAMPLES, MEANING, Inventory, Problem
from kvplane.controlplane.upkeep.inventory import take_inventory
from kvplane.store.base import Compare, Delete, KeyValue, Operation, Page, Put, Transaction
from kvplane.store.errors import StoreFullError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock
from tests.controlplane.harness import Rig, key, running

OTHER = key("other")
CLAIMED = key("claimed")


@pytest.fixture
async def filled() -> AsyncIterator[Rig]:
    """A plane with an engine, one location retained, one superseded (an order), one claimed."""
    async with running() as rig:
        await ensure_schema(rig.store)
        engine = await rig.engine()
        await rig.retain(engine, "first")
        await rig.retain(engine, "second")
        await rig.retain(engine, "third", CLAIMED)
        assert isinstance(await rig.claim(conversation=CLAIMED), m.Claim)
        yield rig


def holder(request_id: str, engine: m.Engine) -> m.Holder:
    return m.Holder(engine.spec.engine_id, engine.engine_epoch, request_id)


def location_of(holder: m.Holder) -> m.Location:
    return m.Location(OTHER, holder, 1, 1, 1, b"", m.Fingerprint(0, b""), 1)


async def engine_of(rig: Rig) -> m.Engine:
    found = await rig.store.get(keys.engine("d"))
    assert found is not None
    return records.load_engine(found.value)


async def change(rig: Rig, *operations: Operation) -> None:
    assert (await rig.store.transact([], operations)).succeeded


async def found(rig: Rig) -> dict[str, int]:
    inventory = await take_inventory(rig.store)
    return {problem.value: finding.count for problem, finding in inventory.findings.items()}


async def test_an_empty_store_is_clean() -> None:
    async with MemoryStore(ManualClock()) as store:
        assert (await take_inventory(store)).findings == {}


async def test_what_a_control_plane_writes_is_clean_and_counted(filled: Rig) -> None:
    inventory = await take_inventory(filled.store)
    assert inventory.findings == {}
    assert inventory.schema == Schema(1, 1)
    counts = {name: tally.records for name, tally in inventory.tallies.items()}
    counts.pop("pulses", None)
    assert counts == {
        "schema": 1,
        "engines": 1,
        "epochs": 1,
        "locations": 1,
        "turns": 2,
        "claims": 1,
        "holdings": 2,
        "orders": 1,
    }
    location = await filled.store.get(keys.location(key()))
    assert location is not None
    assert inventory.tallies["locations"].bytes == len(location.key) + len(location.value)


async def test_an_engine_that_is_gone_is_clean_when_it_was_swept_up(filled: Rig) -> None:
    engine = await engine_of(filled)
    await filled.plane.engines.deregister("d", engine.engine_epoch)
    await filled.clock.advance(60)
    inventory = await take_inventory(filled.store)
    assert inventory.findings == {}
    assert "locations" not in inventory.tallies


async def test_records_of_an_engine_that_nobody_swept_up(filled: Rig) -> None:
    sweeping = await engine_of(filled)
    gone = dataclasses.replace(sweeping, engine_epoch=sweeping.engine_epoch + 1)
    put = Put(keys.engine("d"), records.dump_engine(gone), sweeping.lease_id)
    store = await copy_of(filled)
    await store.transact([], [put, Put(keys.epoch("d"), records.dump_epoch(gone.engine_epoch), 1)])
    inventory = await take_inventory(store)
    assert {problem: finding.count for problem, finding in inventory.findings.items()} == {
        Problem.LOCATION_OF_GONE_ENGINE: 1,
        Problem.CLAIM_OF_GONE_ENGINE: 1,
        Problem.ORDER_FOR_NOBODY: 1,
    }
    await store.aclose()


async def copy_of(rig: Rig) -> MemoryStore:
    """Copy a rig's records to where no replica works on them; all of them on one lease."""
    store = MemoryStore(ManualClock())
    lease = (await store.grant_lease(10_000)).lease_id
    async for page in kinds.pages(rig.store):
        for item in page.items:
            await store.transact([], [Put(item.key, item.value, lease if item.lease_id else 0)])
    return store


async def test_forged_numbers_are_found(filled: Rig) -> None:
    store = await copy_of(filled)
    turns = await store.get(keys.turns(key()))
    assert turns is not None
    for forged in (m.Turns(2**63 - 1), m.Turns(settled_turn=-1), m.Turns(ended_turn=2**62)):
        await store.transact([], [Put(turns.key, records.dump_turns(forged), turns.lease_id)])
        findings = (await take_inventory(store)).findings
        assert {problem: finding.count for problem, finding in findings.items()} == {Problem.UNREADABLE: 1}
    for number in (-1, 2**62):
        await store.transact([], [Put(keys.epoch("d"), records.dump_epoch(number), turns.lease_id)])
        assert (await take_inventory(store)).findings[Problem.UNREADABLE].count == 2
    await store.aclose()


async def test_dangling_references_are_found_each_by_its_name(filled: Rig) -> None:
    engine = await engine_of(filled)
    store = await copy_of(filled)
    filled = dataclasses.replace(filled, store=store)
    cases: list[tuple[Problem, list[bytes]]] = [
        (Problem.LOCATION_WITHOUT_HOLDING, [keys.holding(holder("second", engine))]),
        (Problem.CLAIM_WITHOUT_HOLDING, [keys.holding(holder("third", engine))]),
        (Problem.HOLDING_OF_NOTHING, [keys.location(key())]),
        (Problem.HOLDING_OF_NOTHING, [keys.claim("claim")]),
        (Problem.EPOCH_BEHIND, [keys.epoch("d")]),
        (Problem.SCHEMA_MISSING, [keys.schema()]),
    ]
    for problem, gone in cases:
        there = [item for item in [await store.get(key) for key in gone] if item is not None]
        await change(filled, *[Delete(item.key) for item in there])
        assert await found(filled) == {problem.value: 1}
        await change(filled, *[Put(item.key, item.value, item.lease_id) for item in there])
        assert await found(filled) == {}
    await store.aclose()


async def test_a_holding_that_points_to_another_engines_location_is_found(filled: Rig) -> None:
    engine = await engine_of(filled)
    store = await copy_of(filled)
    location = await store.get(keys.location(key()))
    assert location is not None
    value = records.load_location(location.value)
    value = replace(value, holder=holder("somebody", engine))
    await store.transact([], [Put(location.key, records.dump_location(value), location.lease_id)])
    filled = dataclasses.replace(filled, store=store)
    expected = {Problem.HOLDING_OF_NOTHING: 1, Problem.LOCATION_WITHOUT_HOLDING: 1}
    assert await found(filled) == {problem.value: count for problem, count in expected.items()}
    await store.aclose()


async def test_a_holding_that_points_elsewhere_than_to_its_location_is_found(filled: Rig) -> None:
    engine = await engine_of(filled)
    store = await copy_of(filled)
    at = keys.holding(holder("second", engine))
    await store.transact([], [Put(at, records.dump_holding(claim_id="claim"), 1)])
    filled = dataclasses.replace(filled, store=store)
    assert await found(filled) == {"holding_of_nothing": 1, "location_without_holding": 1}
    await store.aclose()


async def test_a_lower_epoch_than_the_engines_is_found(filled: Rig) -> None:
    engine = await engine_of(filled)
    epoch = await filled.store.get(keys.epoch("d"))
    assert epoch is not None
    lower = records.dump_epoch(engine.engine_epoch - 1)
    await change(filled, Put(epoch.key, lower, epoch.lease_id))
    assert await found(filled) == {"epoch_behind": 1}


@pytest.mark.parametrize("kind", [kind for kind in kinds.ALL if kind.leased], ids=lambda kind: str(kind.name))
async def test_what_should_end_by_itself_and_does_not_is_found(filled: Rig, kind: kinds.Kind) -> None:
    await filled.plane.turns.begin(key(""), "prompt", 0.0, m.Fingerprint(64, b"x" * 8))
    store = await copy_of(filled)
    page = await store.scan(kind.prefix)
    item = page.items[0] if page.items else None
    if item is None:
        await store.transact([], [Put(kind.prefix + b"x", b"")])
    else:
        await store.transact([], [Put(item.key, item.value)])
    assert await found(dataclasses.replace(filled, store=store)) == {"no_lease": 1}
    await store.aclose()


@pytest.mark.parametrize(
    "record",
    [
        (keys.location(OTHER), b"\xff"),
        (keys.location(OTHER), b""),
        (keys.claim("x"), records.dump_claim(m.Claim("y", "", location_of(m.Holder("d", 1, "r")), 1))),
        (keys.TURNS + b"\x00\x05ab", b""),
        (keys.HOLDINGS + b"zzz", records.dump_holding(claim_id="c")),
        (keys.holding(m.Holder("d", 1, "r")), b""),
        (keys.holding(m.Holder("d", 1, "r")), records.dump_holding(location_key=b"l/" + b"x" * 5000)),
        (keys.order(m.Holder("d", 1, "r")), b"\x08\x63"),
        (keys.ENGINES + b"\xff", b""),
        (keys.engine("e"), b"\x18\x63"),
        (keys.EPOCHS + b"\xff", records.dump_epoch(1)),
        (keys.SCHEMA + b"other", b""),
        (keys.location(OTHER), records.dump_location(location_of(m.Holder("d", -1, "r")))),
    ],
    ids=lambda record: kinds.readable(record[0])[:30],
)
async def test_what_cannot_be_read_is_found_and_named(filled: Rig, record: tuple[bytes, bytes]) -> None:
    store = await copy_of(filled)
    lease = (await store.grant_lease(1000)).lease_id
    await store.transact([], [Put(*record, lease)])
    inventory = await take_inventory(store)
    assert {problem: finding.count for problem, finding in inventory.findings.items()} == {
        Problem.UNREADABLE: 1
    }
    assert inventory.findings[Problem.UNREADABLE].examples == [kinds.readable(record[0])]
    await store.aclose()


async def test_keys_of_others_are_found(filled: Rig) -> None:
    await change(filled, Put(b"somebody/else", b"s"), Put(b"?", b""))
    inventory = await take_inventory(filled.store)
    assert inventory.findings[Problem.FOREIGN].count == 2
    assert inventory.tallies["foreign"].records == 2


async def test_a_store_for_newer_software_is_said_to_be_one(filled: Rig) -> None:
    await ensure_schema(filled.store, Schema(9, 8))
    assert await found(filled) == {"schema_too_new": 1}


async def test_of_many_findings_some_are_named_and_all_are_counted(filled: Rig) -> None:
    many = 300
    lease = (await filled.store.grant_lease(1000)).lease_id
    for number in range(many):
        dangling = keys.holding(m.Holder("d", 1, f"r{number}"))
        await change(filled, Put(dangling, records.dump_holding(claim_id=f"c{number}"), lease))
    inventory = await take_inventory(filled.store)
    finding = inventory.findings[Problem.HOLDING_OF_NOTHING]
    assert (finding.count, len(finding.examples)) == (many, EXAMPLES)


async def test_progress_tells_every_record(filled: Rig) -> None:
    seen = list[int]()
    inventory = await take_inventory(filled.store, seen.append)
    assert sum(seen) == sum(tally.records for tally in inventory.tallies.values())


class MovingStore(MemoryStore):
    """Between one page and the next, something happens; pages are small."""

    happens: list[Operation] | None = None

    async def scan(self, prefix: bytes, *, after: bytes = b"", limit: int = 1000) -> Page:
        page = await super().scan(prefix, after=after, limit=1)
        if self.happens and page.items and page.items[0].key.startswith(keys.LOCATIONS):
            happens, self.happens = self.happens, None
            await super().transact([], happens)
        return page


async def test_what_is_claimed_while_it_is_read_is_no_finding(filled: Rig) -> None:
    """A claim comes before locations in the order of keys: the reader sees the location, not the claim."""
    store = MovingStore(ManualClock())
    lease = (await store.grant_lease(10_000)).lease_id
    async for page in kinds.pages(filled.store):
        for item in page.items:
            await store.transact([], [Put(item.key, item.value, lease if item.lease_id else 0)])
    found_location = await store.get(keys.location(key()))
    assert found_location is not None
    location = records.load_location(found_location.value)
    claim = m.Claim("new", "o", location, location.deadline_ms)
    at = keys.holding(location.holder)
    store.happens = [
        Delete(found_location.key),
        Put(keys.claim("new"), records.dump_claim(claim), lease),
        Put(at, records.dump_holding(claim_id="new"), lease),
    ]
    inventory = await take_inventory(store)
    assert store.happens is None
    assert inventory.findings == {}
    assert inventory.until_revision == inventory.revision + 1
    await store.aclose()


async def test_doubts_are_settled_at_one_revision_and_never_by_reading_one_by_one(filled: Rig) -> None:
    class OneByOne(MemoryStore):
        transactions = 0

        async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
            self.transactions += not operations
            return await super().transact(compares, operations)

    store = OneByOne(ManualClock())
    lease = (await store.grant_lease(1000)).lease_id
    for number in range(128):
        dangling = keys.holding(m.Holder("d", 1, f"r{number}"))
        await store.transact([], [Put(dangling, records.dump_holding(claim_id=f"c{number}"), lease)])
    await take_inventory(store)
    assert store.transactions == 2
    await store.aclose()


async def test_a_full_store_is_checked_all_the_same(filled: Rig) -> None:
    async with FaultInjectingStore(await copy_of(filled)) as store:
        location = keys.location(key())
        await store.transact(
            [], [Delete(location), Put(keys.holding(m.Holder("d", 1, "r")), b"\x12\x01c", 1)]
        )
        store.fail_next("transact", error=StoreFullError("full"), times=50)
        inventory = await take_inventory(store)
        assert inventory.findings[Problem.HOLDING_OF_NOTHING].count == 2


async def test_a_full_store_that_never_stands_still_is_an_error() -> None:
    class Restless(MemoryStore):
        async def get(self, key: bytes) -> KeyValue | None:
            await super().transact([], [Put(b"k", b"")])
            return await super().get(key)

        async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
            raise StoreFullError

    async with Restless(ManualClock()) as store:
        with pytest.raises(StoreUnavailableError):
            await kinds.together(store, b"k")


def test_every_problem_says_what_it_means() -> None:
    assert set(MEANING) == set(Problem)


@pytest.mark.parametrize("record", [b"l/\x00", b"x/", b"c/\xff", b"zz", b"e/d", keys.turns(key("a/b"))])
def test_any_key_can_be_shown(record: bytes) -> None:
    assert kinds.readable(record)
    assert "\n" not in kinds.readable(record)


def test_findings_add_up() -> None:
    inventory = Inventory()
    inventory.note(Problem.FOREIGN, b"a")
    inventory.note(Problem.FOREIGN, b"b")
    assert inventory.findings[Problem.FOREIGN].count == 2
