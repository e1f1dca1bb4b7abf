"""Leases against a model: the record never outlives the blocks, whatever becomes of messages and steps.

The outbox is the real one. The worker takes deadlines over, and frees, only when it works a step off, and
steps are worked off late, in order, several under way. Messages travel for up to the claim timeout, arrive in
any order, and are lost with their stream. Nobody asks blocks back here: the deadlines alone have to do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplane.client.model import Announcement, ConversationKey, Fingerprint, RequestId
from kvplane.client.outbox import Batch, Outbox
from kvplane.connector.leases import Leases

CLAIM_S = 40.0
MAX_AGE_S = 300.0
UNDER_WAY = 3


@dataclass
class Step:
    deadlines: dict[str, float]
    worked_off: bool = False
    freed: list[str] = field(default_factory=list)


class Engine(RuleBasedStateMachine):
    """One engine, its worker, a control plane, and what is on its way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.leases = Leases(monotonic=lambda: self.now, max_age_s=MAX_AGE_S, claim_timeout_s=CLAIM_S)
        self.outbox = Outbox(monotonic=lambda: self.now)
        self.numbers = 0
        self.first: dict[str, float] = {}  # deadlines that go into the next step
        self.ended: dict[str, float] = {}
        self.held: set[str] = set()  # as far as the scheduler knows
        self.steps: deque[Step] = deque()
        self.worker: dict[str, float] = {}
        self.in_place: set[str] = set()  # blocks that have not been freed, in truth
        self.on_way: list[tuple[float, Batch]] = []
        self.record: dict[str, float] = {}
        self.renewed = 0

    # The scheduler

    @rule(ttl=st.floats(1, 100))
    def finish(self, ttl: float) -> None:
        request_id = f"r{self.numbers}"
        self.numbers += 1
        terms = self.leases.begin(request_id, ttl)
        self.first[request_id] = terms.blocks
        self.ended[request_id] = self.now
        self.held.add(request_id)
        self.in_place.add(request_id)
        key, fingerprint = ConversationKey("t", "m", request_id), Fingerprint(1, b"")
        announcement = Announcement(key, RequestId(request_id), 1, 1, 1, b"{}", fingerprint, 0)
        self.outbox.announce(announcement, expires_at=terms.record)

    @rule(data=st.data(), ttl=st.floats(1, 200))
    @precondition(lambda self: self.held)
    def order_renewal(self, data: st.DataObject, ttl: float) -> None:
        self.leases.extend(data.draw(st.sampled_from(sorted(self.held))), ttl)

    @rule()
    @precondition(lambda self: len(self.steps) < UNDER_WAY)
    def begin_step(self) -> None:
        self.first.update(self.leases.take_deadlines())
        self.steps.append(Step(self.first))
        self.first = {}

    @rule()
    @precondition(lambda self: any(not step.worked_off for step in self.steps))
    def work_off_step(self) -> None:
        step = next(step for step in self.steps if not step.worked_off)
        step.worked_off = True
        self.worker.update({name: at for name, at in step.deadlines.items() if name in self.in_place})
        for name, at in list(self.worker.items()):
            if self.now >= at:
                step.freed.append(name)
                del self.worker[name]
                self.in_place.discard(name)

    @rule()
    @precondition(lambda self: self.steps and self.steps[0].worked_off)
    def end_step(self) -> None:
        for name in self.steps.popleft().freed:
            self.held.discard(name)
            self.leases.end(name)
            self.outbox.freed(RequestId(name))
        for name, record in self.leases.step_done().items():
            self.renewed += self.outbox.renew(RequestId(name), expires_at=record)

    # Messages

    @rule()
    def send(self) -> None:
        batch, _ = self.outbox.take()
        self.on_way.append((self.now, batch))

    @rule(data=st.data())
    @precondition(lambda self: self.on_way)
    def arrive(self, data: st.DataObject) -> None:
        """Any message; the control plane renews nothing that it does not have."""
        entry = self.on_way.pop(data.draw(st.integers(0, len(self.on_way) - 1)))
        for announcement in entry[1].announcements:
            self.record[announcement.request_id] = self.now + announcement.ttl_s
        for request_id, left in entry[1].renewals.items():
            if self.record.get(request_id, 0.0) > self.now:
                self.record[request_id] = self.now + left
        for request_id in entry[1].freed:
            self.record.pop(request_id, None)

    @rule(late=st.booleans())
    def lose_stream(self, late: bool) -> None:
        """Everything is said again; what was on its way is lost, or comes all the same."""
        self.outbox.lost(batch for _, batch in self.on_way)
        if not late:
            self.on_way.clear()
        self.outbox.restart()

    @rule(seconds=st.one_of(st.floats(0.001, 1), st.floats(1, 60)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.on_way = [(sent, batch) for sent, batch in self.on_way if self.now - sent <= CLAIM_S]

    @invariant()
    def the_record_never_outlives_the_blocks(self) -> None:
        for request_id, deadline in self.record.items():
            assert deadline <= self.now or request_id in self.in_place

    @invariant()
    def no_lease_is_older_than_it_may_be(self) -> None:
        for request_id, at in self.worker.items():
            assert at <= self.ended[request_id] + MAX_AGE_S + 15 + CLAIM_S + 1e-6

    def teardown(self) -> None:
        """In the end everything is free."""
        self.now += MAX_AGE_S + 100
        for _ in range(2 * UNDER_WAY):
            if len(self.steps) < UNDER_WAY:
                self.begin_step()
            if any(not step.worked_off for step in self.steps):
                self.work_off_step()
            if self.steps[0].worked_off:
                self.end_step()
        assert not self.in_place
        assert len(self.leases) == 0


Engine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestEngine = Engine.TestCase
