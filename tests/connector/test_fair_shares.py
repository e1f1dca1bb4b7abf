"""Fair shares of what an engine retains: nobody is pushed below its own, and one alone has all."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplane.connector.fairness import FairShares
from kvplane.connector.retention import Retention, State

TOTAL = 400


class Engine:
    """A retention whose withdrawals are answered at once, and whose blocks are all different."""

    def __init__(self, **weights: float) -> None:
        self.now = 0.0
        self.retention = Retention(TOTAL, fraction=0.5, floor=0.0, monotonic=lambda: self.now)
        self.retention.shares.weights = weights
        self.worths: dict[str, float] = {}
        self.retention.worth = lambda request_id, alone: self.worths.get(request_id, 1.0)
        self.numbers, self.blocks = itertools.count(), itertools.count()
        self.tenants: dict[str, str] = {}

    def take(self, tenant: str, size: int, *, worth: float = 1.0, owner: str = "") -> str | None:
        """Retain a conversation; returns its request, None if it was refused."""
        request_id = f"{tenant}-{next(self.numbers)}"
        blocks = [next(self.blocks) for _ in range(size)]
        if self.retention.refusal(blocks, tenant):
            return None
        self.worths[request_id], self.tenants[request_id] = worth, tenant
        self.retention.retain(request_id, owner or request_id, blocks, tenant)
        self.settle()
        return request_id

    def settle(self) -> list[str]:
        gone = self.retention.take_withdrawals()
        for request_id in gone:
            self.retention.withdrawn(request_id, claimed=False)
            self.retention.freed(request_id)
        return gone

    def left(self, tenant: str) -> list[str]:
        return [each for each in self.retention.request_ids() if self.tenants[each] == tenant]


def test_one_tenant_alone_may_use_all() -> None:
    engine = Engine()
    for _ in range(20):
        engine.take("only", 10)
    assert engine.retention.kept_blocks == engine.retention.budget == 200
    assert not engine.retention.shares.several


@pytest.mark.parametrize("quiet", [1, 5, 10])
@pytest.mark.parametrize("sizes", [(10, 10), (1, 30), (3, 7)])
def test_a_tenant_a_hundred_times_as_noisy_takes_nothing_of_a_quiet_ones_share(
    quiet: int, sizes: tuple[int, int]
) -> None:
    engine, random = Engine(), Random(quiet)
    for _ in range(50):
        engine.take("noisy", 10, worth=100.0)
    mine = []
    for _ in range(quiet):
        mine.append(engine.take("quiet", 10, worth=0.0))
        for _ in range(100):
            engine.take("noisy", random.randint(*sizes), worth=100.0)
    assert engine.left("quiet") == mine
    assert 200 - 30 <= engine.retention.kept_blocks <= 200  # and the noisy one uses the rest


def test_who_comes_late_gets_room_from_who_has_more() -> None:
    engine = Engine()
    for _ in range(20):
        engine.take("first", 10, worth=5.0)
    for count in range(1, 16):
        engine.take("second", 10, worth=1.0)
        assert len(engine.left("second")) == min(count, 10)
    assert len(engine.left("first")) == 10


def test_room_that_nobody_else_wants_goes_to_who_does() -> None:
    engine = Engine()
    engine.take("small", 10)
    for _ in range(30):
        engine.take("large", 10)
    assert engine.retention.kept_blocks == 200
    assert len(engine.left("small")) == 1


def test_shares_go_by_weight() -> None:
    engine = Engine(gold=3.0)
    for _ in range(60):
        for tenant in ("gold", "plain"):
            engine.take(tenant, 5)
    assert engine.retention.shares.used("gold") == pytest.approx(150, abs=5)
    assert engine.retention.shares.used("plain") == pytest.approx(50, abs=5)


def test_a_large_conversation_does_not_drive_small_ones_of_others_below_their_share() -> None:
    engine = Engine()
    mine = [engine.take("quiet", 20) for _ in range(5)]
    assert engine.take("noisy", 140, worth=1e9) is not None
    assert engine.left("quiet") == mine
    assert engine.left("noisy") == []  # it was more than its share: itself it went
    assert engine.take("noisy", 100) is not None
    assert len(engine.left("noisy")) == 1


def test_the_last_conversation_of_who_is_just_above_stays_while_another_has_several() -> None:
    engine = Engine()
    mine = engine.take("quiet", 105, worth=0.0)  # of a share of 100
    for _ in range(20):
        engine.take("noisy", 19, worth=1.0)  # the sixth brings it above its own
    assert engine.left("quiet") == [mine]


def test_with_more_tenants_than_room_worth_decides_and_not_size() -> None:
    engine, random = Engine(), Random(1)
    worths = list(range(1, 201))
    random.shuffle(worths)
    for number, worth in enumerate(worths):
        engine.take(f"t{number}", 2 if worth % 2 else 8, worth=float(worth))
    left = [engine.worths[each] for each in engine.retention.request_ids()]
    assert len(left) > 30
    assert sum(worth > 100 for worth in left) >= 0.9 * len(left)
    assert sum(worth % 2 == 0 for worth in left) > 0.35 * len(left)


def test_those_in_use_go_before_what_is_below_its_share() -> None:
    engine = Engine()
    mine = [engine.take("quiet", 10) for _ in range(9)]
    for number in range(11):
        engine.retention.busy(f"busy{number}", True)
        engine.take("noisy", 10, owner=f"busy{number}")
    engine.retention.relieve(0, wanted_blocks=100, spare="busy0")
    engine.settle()
    assert engine.left("quiet") == mine[-len(engine.left("quiet")) :]
    assert len(engine.left("quiet")) >= 4
    assert len(engine.left("noisy")) <= 5


def test_what_is_on_its_way_out_leaves_room_for_who_has_less() -> None:
    engine = Engine()
    retention = engine.retention
    engine.take("quiet", 10)
    refused = list[str]()
    for number in itertools.count():
        blocks = [next(engine.blocks) for _ in range(10)]
        reason = retention.refusal(blocks, "noisy")
        if reason:
            refused.append(reason)
            break
        retention.retain(f"n{number}", f"n{number}", blocks, "noisy")  # nobody answers withdrawals
    assert refused == ["over_share"]
    assert retention.held_blocks < retention.ceiling
    assert retention.refusal([next(engine.blocks) for _ in range(10)], "quiet") == ""


def test_a_tenant_that_went_has_no_share_after_two_minutes() -> None:
    engine = Engine()
    first = engine.take("gone", 10)
    assert first is not None
    engine.take("stays", 10)
    shares = engine.retention.shares
    assert (shares.several, shares.share("stays", 200)) == (True, 100)
    engine.retention.withdraw(first)
    engine.settle()
    engine.now = 120.0
    engine.take("stays", 10)
    assert shares.share("stays", 200) == 100  # it may be back any moment
    engine.now = 120.1
    engine.take("stays", 10)
    assert (shares.several, shares.share("stays", 200)) == (False, 200)
    engine.take("back", 10)
    assert shares.several
    assert (shares.used("stays"), shares.used("back")) == (30, 10)


def test_who_holds_some_keeps_a_share_for_as_long() -> None:
    engine = Engine()
    engine.take("idle", 10)
    for minute in range(10):
        engine.now = 60.0 * minute
        engine.take("stays", 10)
    assert engine.retention.shares.share("stays", 200) == 100
    assert engine.retention.shares.used("idle") == 10


def test_a_prefix_counts_once_for_each_tenant() -> None:
    engine = Engine()
    common = range(1000, 1050)
    for number in range(3):
        engine.retention.retain(f"a{number}", f"a{number}", [*common, number], "a")
    engine.retention.retain("b", "b", [*common, 7], "b")
    assert (engine.retention.shares.used("a"), engine.retention.shares.used("b")) == (53, 51)


def test_only_who_is_within_its_share_is_so() -> None:
    engine = Engine()
    mine = engine.take("quiet", 10)
    assert mine is not None
    assert not engine.retention.is_within_share(mine)  # alone there are no shares
    last = [engine.take("noisy", 10) for _ in range(19)][-1]
    assert last is not None
    assert engine.retention.is_within_share(mine)
    assert not engine.retention.is_within_share(last)
    assert not engine.retention.is_within_share("nobody")


def test_nothing_is_counted_while_there_is_one_tenant() -> None:
    asked = list[int]()

    def holdings() -> list[tuple[str, list[int]]]:
        asked.append(1)
        return [("a", [1, 2])]

    shares = FairShares(holdings, lambda: 0.0)
    shares.add("a", [1, 2])
    shares.add("a", [3])
    shares.remove("a", [3])
    assert (asked, shares.used("a")) == ([], 0)
    shares.add("b", [4])
    assert (asked, shares.used("a"), shares.used("b")) == ([1], 2, 1)


TENANTS = ("a", "b", "c", "d")
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.5, "d": 0.4}


class Tenants(RuleBasedStateMachine):
    """Whatever tenants retain: none below its share loses a conversation while another is above its own."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(**WEIGHTS)
        self.retention = self.engine.retention
        self.size: dict[str, int] = {}
        self.newest: dict[str, str] = {}
        self.owner: dict[str, str] = {}
        self.wanting: set[str] = set()

    @initialize(many=st.booleans())
    def begin(self, many: bool) -> None:
        """At times so many that victims are drawn from samples."""
        for number in range(150 if many else 0):
            self.retain(TENANTS[number % 2], number, 1, 1.0)

    def used(self, tenant: str) -> int:
        """What a tenant holds that is to stay, as the model has it."""
        return sum(size for request, size in self.size.items() if self.engine.tenants[request] == tenant)

    def share(self, tenant: str, room: float) -> float:
        return room * WEIGHTS[tenant] / sum(WEIGHTS[each] for each in self.wanting)

    def lose(self, room: float) -> None:
        """Take over what was withdrawn, one after the other."""
        gone = self.retention.take_withdrawals()
        for request_id in gone:
            tenant = self.engine.tenants[request_id]
            if len(self.wanting) > 1 and self.newest[self.owner[request_id]] == request_id:
                assert any(self.used(each) > self.share(each, room) for each in self.wanting)
                assert self.used(tenant) > self.share(tenant, room) - 1e-6, "its share was its own"
            del self.size[request_id]
            self.retention.withdrawn(request_id, claimed=False)
            self.retention.freed(request_id)

    @rule(
        tenant=st.sampled_from(TENANTS),
        owner=st.integers(0, 30),
        size=st.integers(1, 60),
        worth=st.floats(0, 100),
    )
    def retain(self, tenant: str, owner: int, size: int, worth: float) -> None:
        self.wanting.add(tenant)
        request_id, blocks = f"r{next(self.engine.numbers)}", [next(self.engine.blocks) for _ in range(size)]
        if self.retention.refusal(blocks, tenant):
            return
        self.engine.worths[request_id], self.engine.tenants[request_id] = worth, tenant
        self.size[request_id] = size
        self.owner[request_id] = f"{tenant}{owner}"
        self.newest[f"{tenant}{owner}"] = request_id
        self.retention.retain(request_id, f"{tenant}{owner}", blocks, tenant)
        self.lose(self.retention.budget)

    @rule(free=st.integers(0, 60), wanted=st.integers(0, 120), owner=st.integers(0, 30))
    def press(self, free: int, wanted: int, owner: int) -> None:
        self.retention.relieve(free, wanted_blocks=wanted, spare=f"a{owner}")
        self.lose(self.retention.kept_blocks)  # what is left is no more than the room that was aimed at

    @rule(tenant=st.sampled_from(TENANTS), owner=st.integers(0, 30), running=st.booleans())
    def come_or_go(self, tenant: str, owner: int, running: bool) -> None:
        self.retention.busy(f"{tenant}{owner}", running)

    @rule(number=st.integers(0, 200))
    def read(self, number: int) -> None:
        if self.size:
            request_id = list(self.size)[number % len(self.size)]
            self.retention.freed(request_id)
            del self.size[request_id]

    @invariant()
    def counts_agree(self) -> None:
        assert self.retention.kept_blocks == sum(self.size.values())
        assert all(self.retention.state(request_id) is State.RETAINED for request_id in self.size)
        if self.retention.shares.several:
            assert [self.retention.shares.used(each) for each in TENANTS] == [
                self.used(each) for each in TENANTS
            ]

    @invariant()
    def all_room_may_be_used(self) -> None:
        assert self.retention.kept_blocks <= self.retention.budget


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=40)
