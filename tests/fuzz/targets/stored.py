"""What lies in a store: records of another world, damaged or forged ones, and dumps of them."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.records import UnreadableRecordError
from kvplane.controlplane.schema import SchemaError
from kvplane.controlplane.upkeep import kinds
from kvplane.controlplane.upkeep.dump import DumpError, read_dump
from kvplane.controlplane.upkeep.restore import RESTORED, restore_dump
from kvplane.storage.v1 import records_pb2 as pb
from kvplane.store.base import MAX_KEY_BYTES, MAX_VALUE_BYTES, Put, Store
from kvplane.store.errors import StoreError
from kvplane.store.memory import MemoryStore
from tests.controlplane.harness import SharedStore
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.messages import encoded, make
from tests.fuzz.targets.rpcs import UNARY, PlaneTarget, RpcStreams
from tests.fuzz.virtual import LoopClock
from tests.fuzz.world import CONVERSATIONS, ENGINES, REQUESTS, TENANTS, World, spoiled_json

_TYPES: dict[kinds.Kind, type[Message]] = {
    kinds.SCHEMA: pb.SchemaRecord,
    kinds.LOCATIONS: pb.LocationRecord,
    kinds.TURNS: pb.TurnRecord,
    kinds.CLAIMS: pb.ClaimRecord,
    kinds.HOLDINGS: pb.HoldingRecord,
    kinds.ORDERS: pb.OrderRecord,
    kinds.ENGINES: pb.EngineRecord,
    kinds.LOADS: pb.LoadRecord,
    kinds.EPOCHS: pb.EpochRecord,
    kinds.PULSES: pb.PulseRecord,
    kinds.BEGUN: pb.BegunRecord,
}
_KINDS = tuple(_TYPES)
_DUMPS: dict[kinds.Kind, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    kinds.LOCATIONS: (records.load_location, records.dump_location),
    kinds.CLAIMS: (records.load_claim, records.dump_claim),
    kinds.ENGINES: (records.load_engine, records.dump_engine),
    kinds.TURNS: (records.load_turns, records.dump_turns),
    kinds.EPOCHS: (records.load_epoch, records.dump_epoch),
}


def _holder(chance: Chance) -> m.Holder:
    return m.Holder(chance.pick(ENGINES), chance.pick((1, 2, 1_790_000_000_000)), chance.pick(REQUESTS))


def _key(chance: Chance) -> m.ConversationKey:
    return m.ConversationKey(chance.pick(TENANTS), "m", chance.pick(("", "lora")), chance.pick(CONVERSATIONS))


def store_key(kind: kinds.Kind, chance: Chance) -> bytes:
    """Return a key of a kind of record, as the control plane makes them."""
    key, holder = _key(chance), _holder(chance)
    if kind in (kinds.LOCATIONS, kinds.TURNS):
        return kind.prefix + keys.location(key)[2:]
    if kind is kinds.HOLDINGS:
        return keys.holding(holder)
    if kind is kinds.ORDERS:
        return keys.order(holder)
    if kind is kinds.BEGUN:
        return keys.begun(key, chance.pick(REQUESTS))
    if kind is kinds.SCHEMA:
        return keys.schema()
    return kind.prefix + chance.pick((*ENGINES, "claim", "replica")).encode()


def _descriptor(kind: kinds.Kind) -> Any:
    return _TYPES[kind].DESCRIPTOR


def record(chance: Chance, world: World) -> tuple[kinds.Kind, bytes, bytes]:
    """Return a kind, a key and a value: that belong together, or not."""
    kind = chance.pick(_KINDS)
    key = store_key(kind, chance)
    known = {
        **world.known(),
        "location_key": lambda chance: store_key(kinds.LOCATIONS, chance),
        "turns_key": lambda chance: store_key(kinds.TURNS, chance),
        "deadline_ms": lambda chance: 1_790_000_000_000 + chance.pick((-1, 0, 10_000, 500_000)),
        "reason": lambda chance: 1 + chance.below(7),
    }
    value = encoded(make(_descriptor(kind), chance, known), chance)
    if chance.odds(0.1 + chance.wild):
        key = chance.spoiled(key)[:MAX_KEY_BYTES] or b"l"
    return kind, key, value


class Records(Target):
    """Records and dumps, read by themselves."""

    name = "records"
    share = 3.0

    async def start(self) -> None:
        self._world = World()

    async def once(self, chance: Chance) -> str:
        return await self._dump(chance) if chance.odds(0.1) else self._record(chance)

    def _record(self, chance: Chance) -> str:
        kind, key, raw = record(chance, self._world)
        self.input = (kind.name, key, raw)
        kinds.readable(key)
        dump = _DUMPS.get(kind)
        if dump is not None:
            with contextlib.suppress(UnreadableRecordError):
                value = records.checked(dump[0], raw)
                if dump[0](dump[1](value)) != value:
                    raise Wrong(f"a record of {kind.name} is not what was read once it is written")
        try:
            kind.read(key, raw)
        except UnreadableRecordError:
            return "unreadable"
        except SchemaError:
            return "schema"
        return "read"

    async def _dump(self, chance: Chance) -> str:
        lines: list[Any] = [
            {"kvplane_dump": 1, "schema": 1, "least_reader": 1, "revision": 8, "time_ms": 1_790_000_000_000}
        ]
        found = {key: raw for _, key, raw in (record(chance, self._world) for _ in range(3))}
        for key in sorted(found):
            raw = found[key]
            key64, raw64 = (base64.b64encode(part).decode() for part in (key, raw))
            lines.append({"kind": kinds.kind_of(key).name, "key": key64, "value": raw64})
        lines.append({"records": len(found), "revision": 8})
        if chance.odds(0.5):
            lines = spoiled_json(lines, chance, ("records", "kvplane_dump", "ttl_s"))
        text = [json.dumps(line).encode() + b"\n" for line in (lines if isinstance(lines, list) else [lines])]
        if chance.odds(0.3):
            text = chance.spoiled(b"".join(text)).splitlines(keepends=True)
        self.input = text
        clock = LoopClock()
        try:
            dump = read_dump(text, chance.pick((RESTORED, kinds.ALL)))
            async with MemoryStore(clock) as store:
                await restore_dump(store, clock, dump, turns_kept_ms=3_600_000, force=chance.odds(0.5))
        except DumpError:
            return "no dump"
        except SchemaError:
            return "schema"
        except StoreError as error:
            return type(error).__name__
        return "restored"


async def _put(store: Store, chance: Chance, world: World) -> object:
    """Write a record behind the control plane's back, as what shares its etcd may."""
    kind, key, raw = record(chance, world)
    if key != keys.schema() and len(raw) <= MAX_VALUE_BYTES:
        await store.transact([], [Put(key, raw)])
    return kind.name, key, raw


class StoredValues(PlaneTarget):
    """A control plane over a store that others write to as well, such as etcd: records, then calls."""

    name = "stored"
    share = 2.0
    life = 500

    def store(self, clock: LoopClock) -> Store:
        return SharedStore(MemoryStore(clock))

    async def once(self, chance: Chance) -> str:
        put = await _put(self._store, chance, self.world)
        self.input = put
        chance.wild = 0.0
        status = await self.call(chance.pick(UNARY), chance)
        self.input = (put, self.input)
        return status


class StoredStreams(RpcStreams):
    """The same with streams, which tell of changes."""

    name = "stored-stream"
    share = 0.5
    life = 500

    def store(self, clock: LoopClock) -> Store:
        return SharedStore(MemoryStore(clock))

    async def once(self, chance: Chance) -> str:
        put = await _put(self._store, chance, self.world)
        self.input = put
        chance.wild = 0.0
        status = await super().once(chance)
        self.input = (put, self.input)
        return status
