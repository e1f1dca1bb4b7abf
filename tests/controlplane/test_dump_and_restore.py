"""Dumps are whole or refused; a restore brings back numbers, never locations."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.engines import EPOCH_KEPT_MS
from kvplane.controlplane.schema import CURRENT, Schema, SchemaTooNewError, ensure_schema, read_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.controlplane.upkeep.dump import Dump, DumpError, read_dump, write_dump
from kvplane.controlplane.upkeep.restore import RESTORED, NotEmptyError, restore_dump
from kvplane.store.base import Compare, Operation, Put, Store, Transaction
from kvplane.store.errors import LeaseNotFoundError, StoreUnavailableError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock
from tests.controlplane.harness import Rig, key, replica, running

KEPT_MS = m.Settings().turns_kept_ms


@pytest.fixture
async def filled() -> AsyncIterator[Rig]:
    async with running() as rig:
        await ensure_schema(rig.store)
        engine = await rig.engine()
        await rig.retain(engine, "first")
        await rig.retain(engine, "second", key("claimed"))
        assert isinstance(await rig.claim(conversation=key("claimed")), m.Claim)
        yield rig


@pytest.fixture
async def empty() -> AsyncIterator[FaultInjectingStore]:
    async with FaultInjectingStore(MemoryStore(ManualClock())) as store:
        yield store


async def dumped(store: Store) -> list[bytes]:
    parts = [part async for part in write_dump(store, ManualClock())]
    return "".join(part.text for part in parts).encode().splitlines(keepends=True)


async def dump_of(store: Store) -> Dump:
    return read_dump(await dumped(store), RESTORED)


def line(kind: str, record_key: bytes, value: bytes) -> bytes:
    encoded = {
        "kind": kind,
        "key": base64.b64encode(record_key).decode(),
        "value": base64.b64encode(value).decode(),
    }
    return json.dumps(encoded).encode()


HEADER = b'{"kvplane_dump":1,"schema":1,"least_reader":1,"revision":5,"time_ms":1700000000000}'
EPOCH = line("epochs", keys.epoch("d"), records.dump_epoch(7))


def end(count: int) -> bytes:
    return json.dumps({"records": count, "revision": 5}).encode()


async def test_a_dump_holds_every_record_and_says_what_it_is(filled: Rig) -> None:
    header, *lines, last = [json.loads(text) for text in await dumped(filled.store)]
    stored = {item.key: item.value async for page in kinds.pages(filled.store) for item in page.items}
    assert {base64.b64decode(each["key"]): base64.b64decode(each["value"]) for each in lines} == stored
    assert header["kvplane_dump"] == 1
    assert (header["schema"], header["least_reader"]) == (CURRENT.schema, CURRENT.least_reader)
    assert header["time_ms"] == ManualClock().now_ms()
    assert last == {"records": len(lines), "revision": header["revision"]}
    lives = {each["kind"]: each["ttl_s"] for each in lines if "ttl_s" in each}
    assert lives == {"locations": pytest.approx(400), "claims": pytest.approx(30)}


async def test_a_dump_of_nothing_is_one_and_can_be_restored(empty: FaultInjectingStore) -> None:
    dump = await dump_of(empty)
    assert (dump.schema, dump.records) == (None, ())
    result = await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS)
    assert result.written == {}
    assert await read_schema(empty) == CURRENT


async def test_unreadable_and_foreign_records_are_dumped_as_they_are(empty: FaultInjectingStore) -> None:
    await empty.transact([], [Put(keys.location(key()), b"\xff"), Put(b"zz", b"\x00")])
    dump = await dump_of(empty)
    assert dump.counts == {"locations": 1, "foreign": 1}


async def test_a_restore_brings_back_numbers_and_nothing_about_blocks(filled: Rig) -> None:
    dump = await dump_of(filled.store)
    clock = ManualClock()
    async with MemoryStore(clock) as store:
        result = await restore_dump(store, clock, dump, turns_kept_ms=KEPT_MS)
        assert result.written == {"epochs": 1, "turns": 2}
        assert result.left_out == {"locations": 1, "claims": 1, "holdings": 2, "engines": 1}
        assert (result.kept, result.expired) == ({}, {})
        for wanted in (keys.epoch("d"), keys.turns(key()), keys.turns(key("claimed"))):
            before, after = await filled.store.get(wanted), await store.get(wanted)
            assert before is not None
            assert after is not None
            assert after.value == before.value
            assert after.lease_id
        left = [item.key for item in (await store.scan(b"")).items]
        assert {kinds.kind_of(k).name for k in left} == {"schema", "epochs", "turns"}


async def test_numbers_only_grow_over_loss_and_restore_and_superseded_turns_stay_so(filled: Rig) -> None:
    """The clock of the restored fleet is an hour behind: only what was restored keeps numbers growing."""
    engine = (await filled.store.get(keys.engine("d"))) or pytest.fail("no engine")
    epoch = records.load_engine(engine.value).engine_epoch
    turn = await filled.begin("third")
    dump = await dump_of(filled.store)
    clock = ManualClock(start_ms=filled.clock.now_ms() - 3_600_000)
    async with MemoryStore(clock) as store:
        await restore_dump(store, clock, dump, turns_kept_ms=KEPT_MS)
        async with replica(store, clock) as plane:
            rig = Rig(plane, clock, store)
            assert (await rig.engine()).engine_epoch > epoch
            assert await rig.begin("fourth") > turn
            assert await rig.lookup() is m.MissReason.UNKNOWN_CONVERSATION


async def test_restored_turns_live_as_long_as_those_dumped_would_have(filled: Rig) -> None:
    dump = await dump_of(filled.store)
    clock = ManualClock()
    async with MemoryStore(clock) as store:
        await clock.advance(KEPT_MS / 1000 - 20)
        await restore_dump(store, clock, dump, turns_kept_ms=KEPT_MS)
        await clock.advance(19.5)
        assert await store.get(keys.turns(key()))
        await clock.advance(61)
        assert await store.get(keys.turns(key())) is None
        await clock.advance(EPOCH_KEPT_MS / 1000 - 100)
        assert await store.get(keys.epoch("d"))
        await clock.advance(200)
        assert await store.get(keys.epoch("d")) is None


async def test_turns_that_would_have_been_forgotten_are_skipped_and_counted(filled: Rig) -> None:
    dump = await dump_of(filled.store)
    clock = ManualClock()
    async with MemoryStore(clock) as store:
        await clock.advance(KEPT_MS / 1000)
        result = await restore_dump(store, clock, dump, turns_kept_ms=KEPT_MS)
        assert (result.written, result.expired) == ({"epochs": 1}, {"turns": 2})
        assert await store.get(keys.turns(key())) is None


async def test_a_store_with_records_is_left_alone_unless_forced(filled: Rig) -> None:
    dump = await dump_of(filled.store)
    before = (await filled.store.scan(b"")).items
    with pytest.raises(NotEmptyError, match="not empty"):
        await restore_dump(filled.store, filled.clock, dump, turns_kept_ms=KEPT_MS)
    assert (await filled.store.scan(b"")).items == before


async def test_running_replicas_do_not_make_a_store_full(empty: FaultInjectingStore, filled: Rig) -> None:
    await ensure_schema(empty)
    await empty.transact(
        [], [Put(keys.pulse(f"r{n}"), records.dump_pulse(m.Pulse(1, "1", None))) for n in range(3)]
    )
    result = await restore_dump(empty, ManualClock(), await dump_of(filled.store), turns_kept_ms=KEPT_MS)
    assert result.written == {"epochs": 1, "turns": 2}


async def test_of_each_record_the_newer_one_stays(filled: Rig, empty: FaultInjectingStore) -> None:
    dump = await dump_of(filled.store)
    engine_epoch = records.load_epoch(dict(dump.records)[keys.epoch("d")])
    older, newer = m.Turns(latest_turn=5), m.Turns(latest_turn=2**60)
    lease = (await empty.grant_lease(500)).lease_id
    await empty.transact(
        [],
        [
            Put(keys.epoch("d"), records.dump_epoch(engine_epoch - 1), lease),
            Put(keys.turns(key()), records.dump_turns(older), lease),
            Put(keys.turns(key("claimed")), records.dump_turns(newer), lease),
        ],
    )
    result = await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS, force=True)
    assert result.written == {"epochs": 1, "turns": 1}
    assert result.kept == {"turns": 1}
    kept = await empty.get(keys.turns(key("claimed")))
    assert kept is not None
    assert records.load_turns(kept.value) == newer


async def test_a_restore_can_be_repeated_and_then_keeps_all(filled: Rig, empty: FaultInjectingStore) -> None:
    dump = await dump_of(filled.store)
    await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS)
    result = await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS, force=True)
    assert (result.written, result.kept) == ({}, {"epochs": 1, "turns": 2})


async def test_a_lost_answer_is_looked_into(filled: Rig) -> None:
    class LosesTheFirstAnswer(MemoryStore):
        lost = False

        async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
            done = await super().transact(compares, operations)
            if not self.lost and any(operation.key == keys.epoch("d") for operation in operations):
                self.lost = True
                raise StoreUnavailableError
            return done

    async with LosesTheFirstAnswer(ManualClock()) as store:
        await restore_dump(store, ManualClock(), await dump_of(filled.store), turns_kept_ms=KEPT_MS)
        assert store.lost
        assert await store.get(keys.epoch("d"))
        assert await store.get(keys.turns(key()))


async def test_a_replica_that_is_faster_keeps_its_newer_record(filled: Rig) -> None:
    newer = m.Turns(latest_turn=2**60)

    class Overtaken(MemoryStore):
        overtaken = False

        async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
            if not self.overtaken and any(operation.key == keys.turns(key()) for operation in operations):
                self.overtaken = True
                await super().transact([], [Put(keys.turns(key()), records.dump_turns(newer))])
            return await super().transact(compares, operations)

    async with Overtaken(ManualClock()) as store:
        dump = await dump_of(filled.store)
        result = await restore_dump(store, ManualClock(), dump, turns_kept_ms=KEPT_MS)
        assert (result.written, result.kept) == ({"epochs": 1, "turns": 1}, {"turns": 1})
        kept = await store.get(keys.turns(key()))
        assert kept is not None
        assert records.load_turns(kept.value) == newer


async def test_a_lease_that_ended_meanwhile_is_replaced(filled: Rig, empty: FaultInjectingStore) -> None:
    dump = await dump_of(filled.store)
    await ensure_schema(empty)
    empty.fail_next("transact", error=LeaseNotFoundError(1))
    result = await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS)
    assert result.written == {"epochs": 1, "turns": 2}


async def test_a_store_that_stays_away_is_an_error(filled: Rig, empty: FaultInjectingStore) -> None:
    dump = await dump_of(filled.store)
    await ensure_schema(empty)
    empty.fail_next("transact", times=50)
    with pytest.raises(StoreUnavailableError):
        await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS)


async def test_more_than_a_transaction_and_a_lease_take(empty: FaultInjectingStore) -> None:
    turns = {keys.turns(key(f"c{n:05d}")): records.dump_turns(m.Turns(n + 1)) for n in range(2_500)}
    lines = [HEADER, *[line("turns", k, v) for k, v in turns.items()], end(len(turns))]
    dump = read_dump(lines, RESTORED)
    seen = list[int]()
    result = await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS, progress=seen.append)
    assert result.written == {"turns": 2_500}
    assert sum(seen) == 2_500
    items = [item async for page in kinds.pages(empty, keys.TURNS) for item in page.items]
    assert {item.key: item.value for item in items} == turns
    leases = [item.lease_id for item in items]
    assert max(leases.count(lease) for lease in set(leases)) <= 1000


async def test_what_a_newer_version_dumped_keeps_its_schema(empty: FaultInjectingStore) -> None:
    newer = HEADER.replace(b'"schema":1', b'"schema":3')
    extra = b"\xa2\x06\x03new"
    unknown = line("epochs", keys.epoch("d"), records.dump_epoch(7) + extra)
    future = line("gadgets", b"zz/gadget", b"?")
    dump = read_dump([newer, unknown, future, end(2)], RESTORED)
    result = await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS)
    assert await read_schema(empty) == Schema(3, 1)
    assert result.left_out == {"foreign": 1}
    epoch = await empty.get(keys.epoch("d"))
    assert epoch is not None
    assert epoch.value.endswith(extra)


async def test_stores_and_dumps_for_newer_software_are_refused(empty: FaultInjectingStore) -> None:
    breaking = HEADER.replace(b'"schema":1,"least_reader":1', b'"schema":3,"least_reader":2')
    with pytest.raises(SchemaTooNewError, match="schema 2"):
        read_dump([breaking, end(0)], RESTORED)
    await ensure_schema(empty, Schema(9, 9))
    with pytest.raises(SchemaTooNewError, match="schema 9"):
        await restore_dump(empty, ManualClock(), read_dump([HEADER, end(0)], RESTORED), turns_kept_ms=KEPT_MS)


async def test_a_dump_of_a_newer_version_opens_no_store_that_needs_one(empty: FaultInjectingStore) -> None:
    await ensure_schema(empty, Schema(4, 4))
    dump = read_dump([HEADER.replace(b'"schema":1', b'"schema":5'), end(0)], RESTORED)
    with pytest.raises(SchemaTooNewError, match="schema 4"):
        await restore_dump(empty, ManualClock(), dump, turns_kept_ms=KEPT_MS)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "it is empty"),
        ([b"\x00\xff\x00"], "not a dump"),
        ([b"{}"], "not a dump"),
        ([b"[" * 100_000], "not a dump"),
        ([b'{"kvplane_dump": true}'], "not a dump"),
        ([b'{"kvplane_dump": 2}'], "format 2"),
        ([HEADER.replace(b'"schema":1', b'"schema":0')], "line 1"),
        ([HEADER.replace(b'"schema":1', b'"schema":"x"')], "line 1"),
        ([HEADER.replace(b'"schema":1', b'"schema":4294967296')], "line 1"),
        ([HEADER.replace(b'"least_reader":1', b'"least_reader":null')], "line 1"),
        ([HEADER.replace(b'"revision":5', b'"revision":-5')], "line 1"),
        ([HEADER], "cut short"),
        ([HEADER, EPOCH], "cut short"),
        ([HEADER, EPOCH[:-9]], "line 2: not a line"),
        ([HEADER, b"7"], "line 2: not a line"),
        ([HEADER, b""], "line 2: not a line"),
        ([HEADER, end(1)], "line 2: the dump had 1 records, but 0 are here"),
        ([HEADER, EPOCH, end(0)], "line 3"),
        ([HEADER, EPOCH, EPOCH, end(2)], "line 3: out of order"),
        ([HEADER, end(0), EPOCH], "line 3: the dump ended"),
        ([HEADER, b'{"kind":"epochs","key":"bg=","value":""}'], "line 2: key or value"),
        ([HEADER, b'{"kind":"epochs","key":7,"value":""}'], "line 2: key or value"),
        ([HEADER, b'{"kind":"epochs","value":""}'], "line 2: key or value"),
        ([HEADER, line("epochs", b"", b"")], "line 2: key or value"),
        ([HEADER, line("epochs", b"n/" + b"x" * 5000, b"")], "line 2: key or value"),
        ([HEADER, line("turns", keys.epoch("d"), b"")], "line 2: its key is one of epochs, not of 'turns'"),
        ([HEADER, line("epochs", keys.epoch("d"), b"\xff")], "line 2: no record of epochs"),
        ([HEADER, line("turns", b"t/\x00\x01", b"")], "line 2: no record of turns"),
        *[
            (
                [HEADER, line("turns", keys.turns(key()), records.dump_turns(forged))],
                "no record of turns: a num",
            )
            for forged in (m.Turns(2**63 - 1), m.Turns(claimed_turn=-5), m.Turns(settled_turn=2**62))
        ],
        *[
            (
                [HEADER, line("epochs", keys.epoch("d"), records.dump_epoch(forged))],
                "no record of epochs: a num",
            )
            for forged in (-1, 2**62, 2**63 - 1)
        ],
    ],
)
def test_what_is_no_whole_dump_is_refused_and_the_line_named(lines: list[bytes], said: str) -> None:
    with pytest.raises(DumpError) as raised:
        read_dump(lines, RESTORED)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_whole_dump_used_above_is_one() -> None:
    assert read_dump([HEADER, EPOCH, end(1)], RESTORED).counts == {"epochs": 1}


@given(st.binary(max_size=200), st.integers(0, 400))
def test_a_damaged_dump_is_refused_or_still_makes_sense(noise: bytes, at: int) -> None:
    """Whatever is written over a dump: DumpError, or a dump whose every kept record can be read."""
    whole = b"\n".join([HEADER, EPOCH, line("turns", keys.turns(key()), b"\x08\x05"), end(2)])
    damaged = whole[:at] + noise + whole[at + len(noise) :]
    try:
        dump = read_dump(damaged.split(b"\n"), RESTORED)
    except (DumpError, SchemaTooNewError):
        return
    for record_key, raw in dump.records:
        kinds.kind_of(record_key).read(record_key, raw)
