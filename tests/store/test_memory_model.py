"""The store in memory against a model that is too simple to be wrong: hypothesis looks for a difference."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplane.store import Compare, Delete, Event, EventBatch, KeyValue, Operation, Put
from kvplane.store.errors import CompactedError, FutureRevisionError, LeaseNotFoundError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock

KEYS = st.sampled_from([b"a", b"a/", b"a/1", b"a/2", b"b", b"\xff", b"\xff\xff"])
PREFIXES = st.sampled_from([b"", b"a", b"a/", b"b", b"c", b"\xff"])
VALUES = st.binary(max_size=2)
TTLS = st.sampled_from([1, 2, 3, 5])
LEASES = st.integers(0, 5)


@dataclass
class Model:
    """All that a store is: its keys, what happened, and until when (ms) leases last."""

    items: dict[bytes, KeyValue] = field(default_factory=dict)
    revision: int = 1
    history: list[EventBatch] = field(default_factory=list)
    oldest: int = 1
    now_ms: int = 0
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By id: (deadline, ttl)."""

    def write(self, operations: list[Operation]) -> None:
        revision = self.revision + 1
        events = []
        for operation in operations:
            previous = self.items.pop(operation.key, None)
            if isinstance(operation, Put):
                created = revision if previous is None else previous.create_revision
                current = KeyValue(operation.key, operation.value, created, revision, operation.lease_id)
                self.items[operation.key] = current
                events.append(Event(operation.key, current, previous))
            elif previous is not None:
                events.append(Event(operation.key, None, previous))
        if events:
            self.revision = revision
            self.history.append(EventBatch(revision, tuple(events)))

    def end_lease(self, lease_id: int) -> None:
        del self.leases[lease_id]
        self.write([Delete(key) for key, item in sorted(self.items.items()) if item.lease_id == lease_id])

    def below(self, prefix: bytes, from_revision: int) -> list[EventBatch]:
        told = []
        for batch in self.history:
            events = tuple(event for event in batch.events if event.key.startswith(prefix))
            if events and batch.revision >= from_revision:
                told.append(EventBatch(batch.revision, events))
        return told


class MemoryStoreMachine(RuleBasedStateMachine):
    """Does the same to a store and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.model = Model()
        self.granted: list[int] = []

    @initialize()
    def open(self) -> None:
        self.watch = self.store.watch(b"a")
        self.live = self.runner.get_loop().create_task(self.follow())
        self.told: list[EventBatch] = []
        self.runner.run(self.clock.advance(0))

    async def follow(self) -> None:
        async for batch in self.watch:
            self.told.append(batch)

    def lease(self, number: int) -> int:
        """Return the id of a lease that is, or was, or (number 0) none, or never will be."""
        if number == 0:
            return 0
        return self.granted[-number] if number <= len(self.granted) else 1_000_000

    @rule(
        writes=st.dictionaries(KEYS, st.none() | st.tuples(VALUES, LEASES), max_size=4),
        right=st.lists(KEYS, max_size=2),
        wrong=st.lists(st.tuples(KEYS, st.integers(0, 20)), max_size=1),
    )
    def transact(
        self,
        writes: dict[bytes, tuple[bytes, int] | None],
        right: list[bytes],
        wrong: list[tuple[bytes, int]],
    ) -> None:
        model = self.model
        operations: list[Operation] = []
        for key, write in writes.items():
            operations.append(Delete(key) if write is None else Put(key, write[0], self.lease(write[1])))
        compares = [Compare(key, self.mod_revision(key)) for key in right]
        compares += [Compare(key, revision) for key, revision in wrong]
        holds = all(compare.mod_revision == self.mod_revision(compare.key) for compare in compares)
        leases = {o.lease_id for o in operations if isinstance(o, Put)} - {0}
        if holds and not leases <= model.leases.keys():
            with pytest.raises(LeaseNotFoundError):
                self.runner.run(self.store.transact(compares, operations))
            return
        if holds:
            model.write(operations)
        done = self.runner.run(self.store.transact(compares, operations))
        assert (done.succeeded, done.revision) == (holds, model.revision)

    def mod_revision(self, key: bytes) -> int:
        return self.model.items[key].mod_revision if key in self.model.items else 0

    @rule(ttl_s=TTLS)
    def grant_lease(self, ttl_s: int) -> None:
        lease = self.runner.run(self.store.grant_lease(ttl_s))
        assert lease.lease_id not in self.granted
        self.granted.append(lease.lease_id)
        ttl_ms = max(ttl_s, 2) * 1000
        assert lease.ttl_s * 1000 == ttl_ms
        self.model.leases[lease.lease_id] = (self.model.now_ms + ttl_ms, ttl_ms)

    @rule(number=LEASES)
    def keep_lease(self, number: int) -> None:
        lease_id = self.lease(number)
        if lease_id not in self.model.leases:
            with pytest.raises(LeaseNotFoundError):
                self.runner.run(self.store.keep_lease(lease_id))
            return
        ttl_ms = self.model.leases[lease_id][1]
        assert self.runner.run(self.store.keep_lease(lease_id)).ttl_s * 1000 == ttl_ms
        self.model.leases[lease_id] = (self.model.now_ms + ttl_ms, ttl_ms)

    @rule(number=LEASES)
    def revoke_lease(self, number: int) -> None:
        lease_id = self.lease(number)
        self.runner.run(self.store.revoke_lease(lease_id))
        if lease_id in self.model.leases:
            self.model.end_lease(lease_id)

    @rule(ms=st.sampled_from([1, 500, 999, 1000, 2000, 7000]), paused=st.booleans())
    def pass_time(self, ms: int, paused: bool) -> None:
        self.model.now_ms += ms
        if paused:
            self.clock.jump(ms / 1000)
        else:
            self.runner.run(self.clock.advance(ms / 1000))
        due = sorted((deadline, lease_id) for lease_id, (deadline, _) in self.model.leases.items())
        for deadline, lease_id in due:
            if deadline <= self.model.now_ms:
                self.model.end_lease(lease_id)

    @rule(prefix=PREFIXES, after=KEYS | st.just(b""), limit=st.integers(1, 8))
    def scan(self, prefix: bytes, after: bytes, limit: int) -> None:
        matching = [
            item for key, item in sorted(self.model.items.items()) if key.startswith(prefix) and key > after
        ]
        page = self.runner.run(self.store.scan(prefix, after=after, limit=limit))
        assert page.items == tuple(matching[:limit])
        assert (page.more, page.revision) == (len(matching) > limit, self.model.revision)

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        assert self.runner.run(self.store.get(key)) == self.model.items.get(key)

    @rule(back=st.integers(0, 3))
    def compact(self, back: int) -> None:
        revision = max(1, self.model.revision - back)
        self.runner.run(self.store.compact(revision))
        self.model.oldest = max(self.model.oldest, revision)

    @rule(prefix=PREFIXES, back=st.integers(-3, 12))
    def replay(self, prefix: bytes, back: int) -> None:
        model = self.model
        from_revision = max(1, model.revision - back)
        self.runner.run(self.store.get(b"a"))  # after a pause, leases that are due have ended
        watch = self.store.watch(prefix, from_revision=from_revision)
        error = (
            CompactedError
            if from_revision < model.oldest
            else FutureRevisionError
            if from_revision > model.revision + 1
            else None
        )
        if error is not None:
            with pytest.raises(error):
                self.runner.run(anext(watch))  # type: ignore[arg-type] # a coroutine, in fact
            return
        expected = model.below(prefix, from_revision)

        async def read() -> list[EventBatch]:
            return [await anext(watch) for _ in expected]

        assert self.runner.run(read()) == expected

    @invariant()
    def told_live(self) -> None:
        self.runner.run(self.clock.advance(0))
        assert self.told == self.model.below(b"a", 0)

    def teardown(self) -> None:
        async def end() -> None:
            self.live.cancel()
            await asyncio.wait([self.live])
            await self.store.aclose()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        self.runner.run(end())
        self.runner.close()


MemoryStoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMemoryStoreMachine = MemoryStoreMachine.TestCase
