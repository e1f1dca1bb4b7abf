"""Any order of announcing, claiming, withdrawing, superseding, expiring: a history against a model.

The model is an engine's view, which is the truth: which holders' blocks still exist, and who was allowed to
read them. What must never happen: two readers of one holder, a hit on blocks that the engine was allowed to
free, a hit below the margin, an older turn over a newer one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvplane.controlplane import model as m
from kvplane.controlplane.errors import DomainError
from tests.controlplane.harness import Rig, announcement, key, running

CONVERSATIONS = st.sampled_from(["a", "b"])
ENGINES = st.sampled_from(["d1", "d2"])


class History(RuleBasedStateMachine):
    turns = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.context = running()
        self.rig: Rig = self.run(self.context.__aenter__())
        self.engines: dict[str, m.Engine] = {}
        self.ttl_ends: dict[m.Holder, float] = {}
        self.turn_of: dict[m.Holder, int] = {}
        self.may_free: set[m.Holder] = set()
        self.readers: dict[m.Holder, str] = {}
        self.newest: dict[str, int] = {}
        self.count = 0

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def teardown(self) -> None:
        self.run(self.context.__aexit__(None, None, None))
        self.loop.close()

    @rule(engine_id=ENGINES)
    def start_engine(self, engine_id: str) -> None:
        """A new incarnation; the blocks of the one before are no more."""
        for holder in self.ttl_ends:
            if holder.engine_id == engine_id:
                self.may_free.add(holder)
        self.engines[engine_id] = self.run(self.rig.engine(engine_id))

    @rule(target=turns, conversation=CONVERSATIONS)
    def begin(self, conversation: str) -> tuple[str, int]:
        self.count += 1
        return conversation, self.run(self.rig.begin(f"begin{self.count}", key(conversation)))

    @rule(turn=turns, engine_id=ENGINES, ttl_s=st.sampled_from([5.0, 12.0, 60.0, 400.0]))
    def announce(self, turn: tuple[str, int], engine_id: str, ttl_s: float) -> None:
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        self.count += 1
        conversation, number = turn
        holder = m.Holder(engine_id, engine.engine_epoch, f"q{self.count}")
        value = announcement(holder.request_id, number, conversation=key(conversation), ttl_s=ttl_s)
        try:
            result = self.run(self.rig.announce(engine, value))
        except DomainError:
            return
        newest = self.newest.get(conversation, 0)
        if result.outcome is m.AnnounceOutcome.SUPERSEDED:
            assert number < newest
            return
        assert result.outcome is m.AnnounceOutcome.ACCEPTED
        assert number >= newest
        self.newest[conversation] = number
        self.ttl_ends[holder] = self.rig.clock.monotonic() + ttl_s
        self.turn_of[holder] = number

    @rule(conversation=CONVERSATIONS, owner=st.sampled_from(["r1", "r2"]))
    def claim(self, conversation: str, owner: str) -> None:
        self.count += 1
        token = f"claim{self.count}"
        outcome = self.run(self.rig.claim(token, owner, key(conversation)))
        if isinstance(outcome, m.MissReason):
            return
        holder = outcome.location.holder
        assert holder not in self.readers, "a second reader"
        assert holder not in self.may_free, "blocks that may be gone"
        assert self.ttl_ends[holder] - self.rig.clock.monotonic() >= 9.99, "too late"
        assert self.turn_of[holder] == self.newest[conversation], "an older turn"
        assert outcome.location.key == key(conversation)
        self.readers[holder] = token

    @rule(engine_id=ENGINES, data=st.data())
    def withdraw(self, engine_id: str, data: Any) -> None:
        engine = self.engines.get(engine_id)
        mine = [h for h in self.ttl_ends if engine and h.engine_epoch == engine.engine_epoch]
        mine = [holder for holder in mine if holder.engine_id == engine_id]
        if not mine:
            return
        holder = data.draw(st.sampled_from(mine))
        outcome = self.run(self.rig.plane.releases.withdraw(holder))
        if outcome is m.ReleaseOutcome.CLAIMED:
            assert holder in self.readers
        else:
            self.may_free.add(holder)

    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        if self.readers:
            holder = data.draw(st.sampled_from(sorted(self.readers, key=str)))
            claim = self.run(self.rig.plane.claims._ledger.claim(self.readers[holder]))
            if claim.value is not None:
                self.run(self.rig.plane.releases.finish_claim(claim.value.claim_id, claim.value.owner))

    @rule(conversation=CONVERSATIONS)
    def end(self, conversation: str) -> None:
        self.run(self.rig.plane.releases.end_conversation(key(conversation)))

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 30.0]))
    def wait(self, seconds: float) -> None:
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
                holder = m.Holder(engine.spec.engine_id, engine.engine_epoch, request_id)
                if reason in (m.ReleaseReason.CLAIM_FINISHED, m.ReleaseReason.CLAIM_TIMEOUT):
                    assert holder in self.readers
                else:
                    assert holder not in self.readers, f"freed under a reader: {reason.name}"
                self.may_free.add(holder)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
