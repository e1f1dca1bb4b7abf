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


def test_new_incarnations_without_end_hold_nothing_that_was_agreed_on(
    retention: Retention, time: Time
) -> None:
    """A caller that resets the cache again until it succeeds begins one each time."""
    fill(retention, 6)
    retention.hold()
    retention.withdrawn("r0", claimed=False)
    for _ in range(6):
        assert retention.take_frees() == []
        time.now += 5.1
        retention.hold()
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
    assert retention.take_withdrawals() == ["c"]  # asking "a" back would bring nothing
    retention.withdrawn("c", claimed=True)
    retention.relieve(9)
    assert retention.take_withdrawals() == ["a", "b"]


class Worths:
    """Worths by request; remembers how many blocks each was said to hold alone."""

    def __init__(self, retention: Retention, **worths: float) -> None:
        self.worths = worths
        self.alone: dict[str, int] = {}
        self.calls = 0
        retention.worth = self

    def __call__(self, request_id: str, blocks: int) -> float:
        self.calls += 1
        self.alone[request_id] = blocks
        return self.worths.get(request_id, 100.0)


def test_what_is_worth_least_goes_first(retention: Retention) -> None:
    Worths(retention, r0=5, r1=3, r2=4, r3=9, r4=3)
    fill(retention)
    retention.relieve(0, wanted_blocks=40)
    assert retention.take_withdrawals() == ["r1", "r4", "r2", "r0"]


def test_superseded_goes_before_what_is_worth_less(retention: Retention) -> None:
    Worths(retention, b1=9, b2=9, a1=1)
    retention.retain("a1", "a", blocks(0))
    retention.retain("b1", "b", blocks(10))
    retention.retain("b2", "b", blocks(20))
    retention.relieve(9)
    assert retention.take_withdrawals() == ["b1"]
    retention.relieve(-1)
    assert retention.take_withdrawals() == ["a1"]


def test_worth_counts_blocks_that_would_come_free(retention: Retention) -> None:
    worths = Worths(retention)
    retention.retain("a", "a", blocks(0, 10))
    retention.retain("b", "b", blocks(4, 10))
    retention.retain("c", "c", blocks(0, 6))
    retention.retain("d", "d", blocks(20, 5))
    retention.relieve(10, wanted_blocks=11)
    assert worths.alone == {"a": 0, "b": 4, "c": 0, "d": 5}


def test_a_conversation_with_a_request_here_goes_late(retention: Retention) -> None:
    Worths(retention, r0=1, r1=2, r2=3, r3=4, r4=5)
    fill(retention)
    retention.busy("c0", True)
    retention.busy("c0", True)
    retention.busy("c1", True)
    retention.busy("c0", False)
    assert retention.is_busy("r0")
    retention.relieve(0, wanted_blocks=20, spare="c1")
    assert retention.take_withdrawals() == ["r2", "r3"]
    retention.relieve(0, wanted_blocks=50, spare="c1")
    assert retention.take_withdrawals() == ["r4", "r0", "r1"]  # or the request would wait for ever
    retention.busy("c0", False)
    assert not retention.is_busy("r0")
    assert not retention.is_busy("unknown")


def test_choosing_looks_at_samples_only(time: Time) -> None:
    retention = Retention(20_000, fraction=1, floor=0, monotonic=time)
    worths = Worths(retention, **{f"r{number}": float(number) for number in range(2000)})
    for number in range(2000):
        retention.retain(f"r{number}", number, [2 * number, 2 * number + 1])
    retention.busy(5, True)
    retention.relieve(0, wanted_blocks=200)
    victims = [int(victim[1:]) for victim in retention.take_withdrawals()]
    assert len(victims) == 100
    assert 5 not in victims
    assert max(victims) < 600  # the fourth of 64 is not of the worse two thirds
    assert worths.calls <= 64 * 30


def test_if_all_of_a_sample_are_busy_it_looks_further(time: Time) -> None:
    retention = Retention(20_000, fraction=1, floor=0, monotonic=time)
    for number in range(1000):
        retention.retain(f"r{number}", number, [number])
        if number != 777:
            retention.busy(number, True)
    retention.relieve(0, wanted_blocks=1)
    assert retention.take_withdrawals() == ["r777"]


def test_while_a_request_waits_for_blocks_nothing_more_is_retained(retention: Retention) -> None:
    retention.relieve(4, wanted_blocks=5)
    assert retention.refusal(blocks(0)) == "request_waits"
    retention.relieve(5, wanted_blocks=5)
    assert retention.refusal(blocks(0)) == ""
    retention.relieve(4)
    assert retention.refusal(blocks(0)) == ""


def test_what_new_requests_take_is_kept_free_ahead(retention: Retention, time: Time) -> None:
    fill(retention)
    retention.demand.take(12)
    retention.demand.take(6)
    retention.relieve(18)
    assert retention.take_withdrawals() == []
    time.now += 1
    retention.relieve(15)
    assert retention.take_withdrawals() == ["r0"]
    time.now += 120
    retention.withdrawn("r0", claimed=True)
    retention.relieve(10)
    assert retention.take_withdrawals() == []
    retention.demand.take(1000)
    retention.relieve(25)  # a quarter of the pool is the most
    assert retention.take_withdrawals() == []
    retention.relieve(24)
    assert retention.take_withdrawals() == ["r1"]


def test_pressed_for_two_seconds_after_blocks_were_asked_back(retention: Retention, time: Time) -> None:
    fill(retention)
    assert not retention.pressed
    retention.relieve(9)
    time.now += 1.9
    assert retention.pressed
    time.now += 0.1
    assert not retention.pressed
    retention.retain("r8", "c8", blocks(80))
    retention.retain("r9", "c9", blocks(90))
    assert retention.pressed


def test_blocks_come_free_soon_once_agreed(retention: Retention, time: Time) -> None:
    fill(retention, 1)
    retention.withdraw("r0")
    assert not retention.frees_soon
    retention.withdrawn("r0", claimed=False)
    assert retention.frees_soon
    time.now += 1  # for how long a running request may be made to wait for them
    assert not retention.frees_soon
    retention.retain("r1", "c1", blocks(0))
    retention.release("r1")
    assert retention.frees_soon
    retention.freed("r0")
    retention.freed("r1")
    assert not retention.frees_soon


def test_a_late_reader_is_given_time(retention: Retention, time: Time) -> None:
    retention.retain("a", "a", blocks(0))
    retention.release("a", linger_s=30)
    retention.release("a")
    time.now += 29.9
    retention.tick(time.now)
    assert retention.take_frees() == []
    time.now += 0.3
    retention.tick(time.now)
    assert retention.take_frees() == ["a"]


def test_a_direct_turns_blocks_are_counted_once(retention: Retention) -> None:
    retention.retain("a1", "a", blocks(0, 20))
    retention.busy("a", True)
    retention.retain("a2", "a", blocks(0, 25))
    retention.busy("a", False)
    assert (retention.kept_blocks, retention.held_blocks) == (25, 25)
    retention.release("a1")
    assert retention.take_frees() == ["a1"]
    retention.freed("a1")
    assert (retention.kept_blocks, retention.held_blocks) == (25, 25)


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
