"""Retention against a model of the fleet: a control plane, readers, an engine that frees when told."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvplane.connector.retention import Retention, State

TOTAL = 60
LEASE_S, CLAIM_S = 10.0, 30.0


class Fleet(RuleBasedStateMachine):
    """The plane knows which requests are on record; a reader holds some until it is done or timed out."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.contact = 0.0
        self.connected = True
        self.retention = Retention(
            TOTAL,
            fraction=0.5,
            floor=0.1,
            monotonic=lambda: self.now,
            lease_ttl_s=LEASE_S,
            claim_timeout_s=CLAIM_S,
        )
        self.blocks: dict[str, set[int]] = {}  # held by the engine
        self.on_record: set[str] = set()
        self.readers: dict[str, float] = {}  # until
        self.claims: set[str] = set()  # of those, the ones the plane knows of: not after a new incarnation
        self.quarantined_until = 0.0
        self.asked: list[str] = []
        self.somebody_waits = False
        self.here: set[int] = set()  # owners with a request that waits or runs
        self.owners: dict[str, int] = {}
        self.latest: dict[int, str] = {}
        self.worths: dict[str, float] = {}
        self.retention.worth = self.worth
        self.numbers = 0

    @initialize(target=requests)
    def first(self) -> str:
        return "r-none"

    @rule(target=requests, owner=st.integers(0, 5), start=st.integers(0, 50), count=st.integers(1, 40))
    def finish(self, owner: int, start: int, count: int) -> str:
        request_id = f"r{self.numbers}"
        self.numbers += 1
        wanted = set(range(start, min(TOTAL, start + count)))
        held = set().union(*self.blocks.values()) if self.blocks else set()
        if not self.connected:
            return request_id
        reason = self.retention.refusal(wanted)
        assert bool(reason) == (
            not wanted
            or self.somebody_waits
            or len(wanted) > self.retention.budget
            or len(held | wanted) > self.retention.ceiling
        )
        if not reason:
            self.blocks[request_id] = wanted
            self.retention.retain(request_id, owner, list(wanted))
            self.owners[request_id] = owner
            self.latest[owner] = request_id
            self.on_record.add(request_id)
        return request_id

    @rule(request=requests)
    @precondition(lambda self: self.connected)
    def claim(self, request: str) -> None:
        if request in self.on_record and self.now >= self.quarantined_until:
            self.on_record.remove(request)
            self.claims.add(request)
            self.readers[request] = self.now + CLAIM_S

    @rule(request=consumes(requests))
    def read(self, request: str) -> None:
        if self.readers.pop(request, None) is not None:
            self.free(request)

    @rule(free=st.integers(0, TOTAL), wanted=st.integers(0, 20))
    def press(self, free: int, wanted: int) -> None:
        """Blocks are short. Those of conversations with a request here go only if no others are left."""
        before = self.standing()
        self.retention.relieve(free, wanted_blocks=wanted)
        self.somebody_waits = wanted > free
        kept = self.standing()
        gone = before - kept
        if any(self.owners[request] in self.here and self.newest(request) for request in gone):
            assert not any(self.owners[r] not in self.here or not self.newest(r) for r in kept)

    @rule(owner=st.integers(0, 5))
    def come_or_go(self, owner: int) -> None:
        """A conversation's request arrives, or ends."""
        coming = owner not in self.here
        self.retention.busy(owner, coming)
        self.here ^= {owner}

    @rule(request=requests, worth=st.floats(0, 10))
    def learn(self, request: str, worth: float) -> None:
        self.worths[request] = worth

    def worth(self, request: str, alone: int) -> float:
        assert alone == len(self.alone(request)), "what would come free"
        return self.worths.get(request, 1.0)

    def alone(self, request: str) -> set[int]:
        """Blocks that no other request holds that is to stay or has a reader."""
        staying = (State.RETAINED, State.CLAIMED)
        others = [
            blocks for r, blocks in self.blocks.items() if r != request and self.retention.state(r) in staying
        ]
        return self.blocks[request] - set().union(*others)

    def standing(self) -> set[str]:
        return {r for r in self.blocks if self.retention.state(r) is State.RETAINED}

    def newest(self, request: str) -> bool:
        return self.latest[self.owners[request]] == request

    @rule()
    @precondition(lambda self: self.connected)
    def answer(self) -> None:
        """The plane answers all withdrawals, and the engine acts on the answers."""
        self.asked += self.retention.take_withdrawals()
        for request in self.asked:
            self.on_record.discard(request)
            self.retention.withdrawn(request, claimed=request in self.claims)
        self.asked.clear()
        self.contact = self.now
        self.act()

    @rule()
    def act(self) -> None:
        self.retention.tick(self.contact)
        self.asked += self.retention.take_withdrawals()
        for request in self.retention.take_frees():
            assert request not in self.readers, "freed under a reader"
            assert request not in self.on_record, "freed while on offer"
            self.free(request)

    @rule(seconds=st.floats(0.1, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.connected:
            self.contact = self.now
        elif self.now - self.contact > LEASE_S:
            self.on_record.clear()  # the engine's lease ended
        for request, until in list(self.readers.items()):
            if self.now >= until:
                del self.readers[request]
                self.claims.discard(request)

    @rule()
    @precondition(lambda self: self.connected)
    def lose(self) -> None:
        self.connected = False

    @rule()
    @precondition(lambda self: not self.connected)
    def come_back(self) -> None:
        """Within the lease as before; after it as a new incarnation, with what is held announced again."""
        self.connected = True
        if self.now - self.contact > LEASE_S:
            self.retention.hold()
            self.claims.clear()
            self.quarantined_until = self.now + CLAIM_S
            for request in self.blocks:
                if self.retention.state(request) is State.RETAINED:
                    self.on_record.add(request)
        self.contact = self.now

    @rule()
    @precondition(lambda self: self.connected)
    def new_incarnation(self) -> None:
        self.lose()
        self.wait(LEASE_S + 0.1)
        self.come_back()

    @rule()
    @precondition(lambda self: self.connected)
    def reset(self) -> None:
        """The engine's cache is cleared: everything is asked back."""
        self.retention.withdraw_all()
        self.answer()

    @rule(request=requests)
    @precondition(lambda self: self.connected)
    def order(self, request: str) -> None:
        """A newer turn took its place: the plane orders it freed, unless a reader has it."""
        if request in self.on_record:
            self.on_record.remove(request)
            self.retention.release(request)

    @rule()
    def expire(self) -> None:
        """The engine's own deadline: the oldest goes, if nobody reads it (the margins see to that)."""
        for request in self.blocks:
            if request not in self.readers:
                self.on_record.discard(request)
                self.free(request)
                return

    def free(self, request: str) -> None:
        self.retention.freed(request)
        self.blocks.pop(request, None)

    @invariant()
    def counts_distinct_blocks(self) -> None:
        held = set().union(*self.blocks.values()) if self.blocks else set()
        assert self.retention.held_blocks == len(held) <= self.retention.ceiling
        staying = [blocks for r, blocks in self.blocks.items() if self.retention.state(r) is State.RETAINED]
        assert self.retention.kept_blocks == len(set().union(*staying) if staying else set())
        assert self.retention.kept_blocks <= self.retention.budget
        assert set(self.retention.request_ids()) == set(self.blocks)
        for request in self.blocks:
            assert self.retention.is_busy(request) == (self.owners[request] in self.here)

    def teardown(self) -> None:
        """Everything asked back is free in the end, and nothing is left behind."""
        self.connected = True
        self.retention.withdraw_all()
        for _ in range(400):
            self.wait(0.3)
            self.readers = {r: until for r, until in self.readers.items() if until > self.now}
            self.answer()
        assert not self.blocks
        assert self.retention.held_blocks == 0


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase
