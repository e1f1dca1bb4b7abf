from __future__ import annotations

import pytest

from kvplane.connector.retention import Retention, State


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def retention(time: Time) -> Retention:
    return Retention(100, fraction=0.5, floor=0.1, monotonic=time)


def blocks(start: int, count: int = 10) -> list[int]:
    return list(range(start, start + count))


def fill(retention: Retention, count: int = 5) -> None:
    for number in range(count):
        retention.retain(f"r{number}", f"c{number}", blocks(number * 10))


def test_limits(retention: Retention) -> None:
    assert (retention.budget, retention.floor, retention.ceiling) == (50, 10, 75)
    assert Retention(100, fraction=1.0, floor=0.1, monotonic=Time()).ceiling == 100
    assert Retention(100, fraction=0.0, floor=0.1, monotonic=Time()).refusal([1]) == "larger_than_budget"


def test_exactly_the_budget_stays(retention: Retention) -> None:
    fill(retention)
    assert retention.kept_blocks == 50
    assert retention.take_withdrawals() == []


def test_beyond_the_budget_the_oldest_is_withdrawn(retention: Retention) -> None:
    fill(retention, 6)
    assert retention.take_withdrawals() == ["r0"]
    assert retention.state("r0") is State.WITHDRAWING
    assert retention.take_frees() == []  # not before it is agreed
    retention.withdrawn("r0", claimed=False)
    assert retention.take_frees() == ["r0"]
    assert retention.held_blocks == 60
    assert retention.freed("r0")
    assert retention.held_blocks == 50
    assert not retention.freed("r0")


def test_shared_blocks_count_once(retention: Retention) -> None:
    for turn in range(20):
        retention.retain(f"r{turn}", "c", blocks(0, 30 + turn))
    assert retention.held_blocks == retention.kept_blocks == 49
    assert retention.take_withdrawals() == []


def test_a_superseded_turn_goes_before_older_ones(retention: Retention) -> None:
    retention.retain("a1", "a", blocks(0))
    retention.retain("b1", "b", blocks(10))
    retention.retain("b2", "b", blocks(20))
    retention.retain("c1", "c", blocks(30, 25))
    assert retention.take_withdrawals() == ["b1"]


def test_what_comes_in_goes_last(retention: Retention) -> None:
    retention.retain("a", "a", blocks(0, 40))
    retention.retain("b", "b", blocks(40, 50 - 10))
    assert retention.take_withdrawals() == ["a"]
    assert retention.state("b") is State.RETAINED


def test_larger_than_the_budget_is_refused(retention: Retention) -> None:
    assert retention.refusal(blocks(0, 50)) == ""
    assert retention.refusal(blocks(0, 51)) == "larger_than_budget"
    assert retention.refusal([1] * 1000) == ""
    assert retention.refusal([]) == "no_blocks"


def test_the_ceiling_holds_while_nothing_is_agreed(retention: Retention) -> None:
    for number in range(20):
        if not retention.refusal(blocks(number * 10)):
            retention.retain(f"r{number}", f"c{number}", blocks(number * 10))
    assert retention.held_blocks == 70
    assert retention.refusal(blocks(500)) == "over_budget"
    assert retention.refusal(blocks(0)) == ""  # shared with what is held


def test_a_claimed_one_stays_until_freed_or_ordered(retention: Retention, time: Time) -> None:
    fill(retention, 6)
    retention.withdrawn("r0", claimed=True)
    retention.tick(time.now)
    assert retention.state("r0") is State.CLAIMED
    assert retention.take_frees() == []
    retention.release("r0")
    retention.release("r0")
    assert retention.take_frees() == ["r0"]


def test_a_claimed_one_is_asked_for_again_when_its_claim_must_be_over(
    retention: Retention, time: Time
) -> None:
    retention.retain("a", "a", blocks(0))
    retention.claimed("a")
    time.now += 34.9
    retention.tick(time.now)
    assert retention.take_withdrawals() == []
    time.now += 0.1
    retention.tick(time.now)
    retention.tick(time.now)
    assert retention.take_withdrawals() == []  # a tick works a few times a second
    time.now += 0.25
    retention.tick(time.now)
    assert retention.take_withdrawals() == ["a"]
    retention.withdrawn("a", claimed=False)
    assert retention.take_frees() == ["a"]


def test_out_of_contact_for_long_nothing_needs_an_agreement(retention: Retention, time: Time) -> None:
    fill(retention, 7)
    retention.withdrawn("r1", claimed=True)
    contact = time.now
    time.now += 40
    retention.tick(contact)
    assert retention.take_frees() == []  # exactly then a reader may just be ending
    time.now += 0.3
    retention.tick(contact)
    assert retention.take_frees() == ["r0", "r1"]
    assert retention.state("r2") is State.RETAINED  # worth keeping: it will be announced again


def test_after_a_new_incarnation_nothing_is_freed_for_a_claim_timeout(
    retention: Retention, time: Time
) -> None:
    fill(retention, 6)
    retention.hold()
    retention.withdrawn("r0", claimed=False)
    time.now += 29.9
    retention.tick(time.now)
    assert retention.take_frees() == []
    time.now += 0.3
    retention.tick(time.now)
    assert retention.take_frees() == ["r0"]


def test_below_the_floor_the_oldest_go(retention: Retention) -> None:
    fill(retention)
    retention.relieve(10)
    assert retention.take_withdrawals() == []
    retention.relieve(9)
    assert retention.take_withdrawals() == ["r0"]
    retention.relieve(9)
    assert retention.take_withdrawals() == []  # ten are coming
    retention.relieve(0)
    assert retention.take_withdrawals() == []
    retention.withdrawn("r0", claimed=True)
    retention.relieve(0)
    assert retention.take_withdrawals() == ["r1"]  # a reader's blocks come too late


def test_for_a_waiting_request_as_much_goes_as_it_needs(retention: Retention) -> None:
    fill(retention)
    retention.relieve(15, wanted_blocks=35)
    assert retention.take_withdrawals() == ["r0", "r1"]


def test_for_a_waiting_request_something_goes_even_if_the_sum_says_there_is_room(
    retention: Retention,
) -> None:
    fill(retention)
    retention.relieve(36, wanted_blocks=35)
    assert retention.take_withdrawals() == ["r0"]
    retention.relieve(36, wanted_blocks=35)
    assert retention.take_withdrawals() == []


def test_plenty_of_room_means_it_waits_for_something_else(retention: Retention) -> None:
    fill(retention)
    retention.relieve(100, wanted_blocks=35)
    assert retention.take_withdrawals() == []


def test_the_waiting_conversation_goes_last(retention: Retention) -> None:
    fill(retention)
    retention.relieve(0, wanted_blocks=20, spare="c0")
    assert retention.take_withdrawals() == ["r1", "r2"]


def test_blocks_shared_with_others_give_no_room(retention: Retention) -> None:
    retention.retain("a", "a", blocks(0))
    retention.retain("b", "b", blocks(0))
    retention.retain("c", "c", blocks(10))
    retention.relieve(9)
    assert retention.take_withdrawals() == ["a", "b"]


def test_withdraw_and_withdraw_all(retention: Retention) -> None:
    fill(retention, 3)
    retention.withdraw("r1")
    retention.withdraw("r1")
    retention.withdraw("unknown")
    retention.withdraw_all()
    assert retention.take_withdrawals() == ["r1", "r0", "r2"]
    assert retention.request_ids() == ["r0", "r1", "r2"]
    assert retention.kept_blocks == 0


def test_answers_that_nobody_waits_for_change_nothing(retention: Retention) -> None:
    retention.retain("a", "a", blocks(0))
    retention.withdrawn("a", claimed=False)
    retention.withdrawn("unknown", claimed=True)
    retention.release("unknown")
    retention.claimed("unknown")
    assert retention.state("a") is State.RETAINED
    assert retention.state("unknown") is None
    assert "a" in retention
    assert len(retention) == 1


def test_read_before_it_was_withdrawn(retention: Retention) -> None:
    fill(retention, 6)
    assert retention.freed("r0")
    retention.withdrawn("r0", claimed=False)
    assert retention.take_frees() == []
    assert retention.held_blocks == 50
