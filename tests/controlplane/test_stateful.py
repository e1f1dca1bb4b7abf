"""Any order of announcing, claiming, withdrawing, superseding, expiring, re-registering: against a model.

The model is the engines' view, which is the truth: which requests' blocks exist, who was let to read them.
What must never happen: a reader let in while an earlier one may still read, a hit on blocks that the engine
was allowed to free or below the margin, an order or an agreement to free under a reader, an older turn over a
newer one. A reader may read until it finishes, or until its claim's timeout and grace have passed, whatever
happened to the claim's record meanwhile; and never longer than the life of the blocks, and the grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvplane.controlplane import model as m
from kvplane.controlplane.errors import DomainError
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from tests.controlplane.harness import Rig, SharedStore, announcement, key, replica, running

CONVERSATIONS = st.sampled_from(["a", "b"])
ENGINES = st.sampled_from(["d1", "d2"])


CLAIM_TIMEOUT_S, GRACE_S = 30.0, 10.0


@dataclass
class Blocks:
    """One request's blocks on a live engine process."""

    engine_id: str
    conversation: str
    turn: int
    ttl_ends: float
    may_free: bool = False
    read_until: float = 0.0
    token: str = ""


class History(RuleBasedStateMachine):
    turns = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.context = self.start()
        self.rig: Rig = self.run(self.context.__aenter__())
        self.engines: dict[str, m.Engine] = {}
        self.hold_until: dict[str, float] = {}
        self.blocks: dict[str, Blocks] = {}
        self.newest: dict[str, int] = {}
        self.over: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        self.recorded: list[Blocks] = []
        self.count = 0

    def start(self) -> AbstractAsyncContextManager[Rig]:
        return running()

    def is_behind(self) -> bool:
        return False

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def teardown(self) -> None:
        self.run(self.context.__aexit__(None, None, None))
        self.loop.close()

    @property
    def now(self) -> float:
        return self.rig.clock.monotonic()

    def next(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def held(self, engine_id: str) -> list[str]:
        return [name for name, blocks in self.blocks.items() if blocks.engine_id == engine_id]

    def end_turn(self, conversation: str, turn: int) -> None:
        """A turn's location was claimed or given up: it is never on record again."""
        self.over[conversation] = max(turn, self.over.get(conversation, 0))

    def free(self, request_id: str, why: str) -> None:
        """The engine was told that it may free; it does."""
        blocks = self.blocks[request_id]
        assert blocks.read_until <= self.now, f"freed under a reader: {why}"
        blocks.may_free = True

    @rule(engine_id=ENGINES)
    def start_engine(self, engine_id: str) -> None:
        """A new process; the blocks of the one before are no more."""
        for request_id in self.held(engine_id):
            del self.blocks[request_id]
        self.engines[engine_id] = self.run(self.rig.engine(engine_id))
        self.hold_until[engine_id] = 0.0

    @rule(engine_id=ENGINES)
    def register_again(self, engine_id: str) -> None:
        """The same process under a new epoch, after it lost its lease: it announces again what it holds."""
        if engine_id not in self.engines:
            return
        self.engines[engine_id] = self.run(self.rig.engine(engine_id))
        self.hold_until[engine_id] = self.now + CLAIM_TIMEOUT_S + GRACE_S
        for request_id in self.held(engine_id):
            blocks = self.blocks[request_id]
            if not blocks.may_free and blocks.ttl_ends > self.now:
                self.announce_blocks(request_id, blocks, reannounced=True)

    @rule(target=turns, conversation=CONVERSATIONS)
    def begin(self, conversation: str) -> tuple[str, int]:
        turn = self.run(self.rig.begin(self.next("begin"), key(conversation)))
        self.begun[conversation] = turn
        return conversation, turn

    @rule(turn=turns, engine_id=ENGINES, ttl_s=st.sampled_from([5.0, 12.0, 60.0, 400.0]))
    def announce(self, turn: tuple[str, int], engine_id: str, ttl_s: float) -> None:
        if engine_id in self.engines:
            conversation, number = turn
            blocks = Blocks(engine_id, conversation, number, self.now + ttl_s)
            self.announce_blocks(self.next("q"), blocks)

    def announce_blocks(self, request_id: str, blocks: Blocks, *, reannounced: bool = False) -> None:
        value = announcement(
            request_id,
            blocks.turn,
            conversation=key(blocks.conversation),
            ttl_s=blocks.ttl_ends - self.now,
            reannounced=reannounced,
        )
        try:
            result = self.run(self.rig.announce(self.engines[blocks.engine_id], value))
        except DomainError:
            return
        newest = self.newest.get(blocks.conversation, 0)
        if result.outcome is m.AnnounceOutcome.SUPERSEDED:
            expired = [
                other.turn
                for other in self.recorded
                if other.conversation == blocks.conversation and other.ttl_ends <= self.now
            ]
            over = max(self.over.get(blocks.conversation, 0), *expired, 0)
            assert blocks.turn < newest or blocks.turn <= over
            return
        assert result.outcome is m.AnnounceOutcome.ACCEPTED
        assert blocks.turn >= newest
        assert blocks.turn > self.over.get(blocks.conversation, 0), "back from the dead"
        self.newest[blocks.conversation] = blocks.turn
        self.recorded.append(blocks)
        self.blocks[request_id] = blocks

    @rule(conversation=CONVERSATIONS, owner=st.sampled_from(["r1", "r2"]))
    def claim(self, conversation: str, owner: str) -> None:
        token = self.next("claim")
        outcome = self.run(self.rig.claim(token, owner, key(conversation)))
        if isinstance(outcome, m.MissReason):
            return
        blocks = self.blocks[outcome.location.holder.request_id]
        assert blocks.read_until <= self.now, "a second reader"
        assert not blocks.may_free, "blocks that may be gone"
        assert blocks.ttl_ends - self.now >= 9.99, "too late"
        assert blocks.turn == self.newest[conversation], "an older turn"
        assert blocks.conversation == conversation
        life_s = min(CLAIM_TIMEOUT_S, blocks.ttl_ends - self.now) + GRACE_S
        blocks.read_until, blocks.token = self.now + life_s, token
        self.end_turn(conversation, blocks.turn)

    @rule(engine_id=ENGINES, data=st.data())
    def withdraw(self, engine_id: str, data: Any) -> None:
        mine = self.held(engine_id)
        if not mine or self.now < self.hold_until[engine_id]:
            return
        request_id = data.draw(st.sampled_from(mine))
        holder = m.Holder(engine_id, self.engines[engine_id].engine_epoch, request_id)
        outcome = self.run(self.rig.plane.releases.withdraw(holder))
        if outcome is not m.ReleaseOutcome.CLAIMED:
            self.free(request_id, "withdrawn")
        if outcome is m.ReleaseOutcome.RELEASED:
            self.end_turn(self.blocks[request_id].conversation, self.blocks[request_id].turn)

    @rule(conversation=CONVERSATIONS, ttl_s=st.sampled_from([1.0, 60.0, 10_000.0]), turn=st.none() | turns)
    def touch(self, conversation: str, ttl_s: float, turn: tuple[str, int] | None) -> None:
        """A wish moves no deadline, and is for no longer than a record may live."""
        before = self.rig.plane.locations.lookup(key(conversation))
        touched = self.run(self.rig.touch(ttl_s, key(conversation), turn[1] if turn else 0))
        if touched.remaining_ms is not None:
            assert touched.noted
            assert 0 < touched.remaining_ms <= 480_000
            assert self.newest[conversation] > self.over.get(conversation, 0), "kept from beyond"
        after = self.rig.plane.locations.lookup(key(conversation))
        if isinstance(after, m.Found):
            assert after.location.wanted_until_ms <= self.rig.clock.now_ms() + 480_000
            if isinstance(before, m.Found) and not self.is_behind():
                assert after.location.deadline_ms == before.location.deadline_ms

    @rule(engine_id=ENGINES, ttl_s=st.sampled_from([5.0, 60.0, 400.0]), data=st.data())
    def renew(self, engine_id: str, ttl_s: float, data: Any) -> None:
        """The engine keeps blocks for longer, or shorter, and says so."""
        mine = self.held(engine_id)
        if mine:
            request_id = data.draw(st.sampled_from(mine))
            holder = m.Holder(engine_id, self.engines[engine_id].engine_epoch, request_id)
            blocks = self.blocks[request_id]
            granted_s = self.run(self.rig.plane.locations.renew(holder, ttl_s))
            if granted_s is not None:
                assert not blocks.may_free, "renewed what may be gone"
                assert blocks.ttl_ends > self.now, "revived"
                assert blocks.turn > self.over.get(blocks.conversation, 0), "renewed under a reader"
                blocks.ttl_ends = self.now + granted_s

    @rule(engine_id=ENGINES, data=st.data())
    def read(self, engine_id: str, data: Any) -> None:
        """A reader reads: the engine frees, and reports it."""
        mine = [name for name in self.held(engine_id) if self.blocks[name].read_until > self.now]
        if mine:
            request_id = data.draw(st.sampled_from(mine))
            del self.blocks[request_id]
            holder = m.Holder(engine_id, self.engines[engine_id].engine_epoch, request_id)
            self.run(self.rig.plane.releases.freed(holder))

    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        """A reader says that it is done."""
        open_claims = [name for name, blocks in self.blocks.items() if blocks.read_until > self.now]
        if open_claims:
            blocks = self.blocks[data.draw(st.sampled_from(open_claims))]
            claim = self.rig.plane.claims._ledger.claim(blocks.token)
            blocks.read_until = 0.0
            if claim.value is not None:
                self.run(self.rig.plane.releases.finish_claim(blocks.token, claim.value.owner))

    @rule(conversation=CONVERSATIONS)
    def end(self, conversation: str) -> None:
        found = self.rig.plane.locations.lookup(key(conversation))
        outcome = self.run(self.rig.plane.releases.end_conversation(key(conversation)))
        if conversation in self.begun:
            self.end_turn(conversation, self.begun[conversation])
        if outcome is not m.ReleaseOutcome.RELEASED:
            assert isinstance(found, m.MissReason) or self.is_behind(), "what was on offer was released"

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        async def pass_time() -> None:
            left = seconds
            while left > 0:
                await self.rig.clock.advance(min(3.0, left))
                left -= 3.0
                for engine in self.engines.values():
                    await self.rig.plane.engines.renew(engine.spec.engine_id, engine.engine_epoch)

        self.run(pass_time())

    @invariant()
    def orders_free_nothing_under_a_reader(self) -> None:
        for engine in self.engines.values():
            for request_id, reason in self.run(self.rig.orders(engine)).items():
                if request_id in self.blocks:
                    self.free(request_id, reason.name)


class FleetHistory(History):
    """The same over three replicas, each of which may be behind: its watch brings nothing for a while."""

    def start(self) -> AbstractAsyncContextManager[Rig]:
        return self.replicas()

    @asynccontextmanager
    async def replicas(self) -> AsyncIterator[Rig]:
        clock = ManualClock()
        async with AsyncExitStack() as stack:
            memory = await stack.enter_async_context(MemoryStore(clock))
            self.stores = [SharedStore(memory) for _ in range(3)]
            planes = [await stack.enter_async_context(replica(store, clock)) for store in self.stores]
            self.planes = planes
            yield Rig(planes[0], clock, memory)

    def is_behind(self) -> bool:
        return not all(store.watching.is_set() for store in self.stores)

    @rule(number=st.integers(0, 2))
    def talk_to(self, number: int) -> None:
        self.rig.plane = self.planes[number]

    @rule(number=st.integers(0, 2))
    def fall_behind(self, number: int) -> None:
        self.stores[number].watching.clear()

    @rule(number=st.integers(0, 2))
    def catch_up(self, number: int) -> None:
        self.stores[number].watching.set()
        self.run(settle())

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """A replica that is behind for long gives no answers, which another test shows: so all catch up."""
        for number in range(3):
            self.catch_up(number)
        self.pass_time(seconds)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFleetHistory = FleetHistory.TestCase
TestFleetHistory.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
