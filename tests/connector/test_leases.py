from __future__ import annotations

import math

import pytest

from kvplane.connector.leases import Leases, Terms


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def leases(time: Time) -> Leases:
    return Leases(monotonic=time, max_age_s=600, claim_timeout_s=40)


def test_each_deadline_leaves_time_for_what_the_one_before_allows(leases: Leases) -> None:
    terms = leases.begin("a", 30)
    assert terms == Terms(idle=1030, record=1045, blocks=1085)
    # A session announces 5 s less than `record`: at 1030 there are the 10 s left that a claim needs.


def test_idle_exactly_at_its_end_and_only_once(leases: Leases, time: Time) -> None:
    leases.begin("late", 60)
    leases.begin("a", 30)
    time.now = 1029.9
    assert leases.idle() == []
    time.now = 1030
    assert leases.idle() == ["a"]
    assert leases.idle() == []
    leases.end("late")
    time.now = 2000
    assert leases.idle() == []


def test_renewed_from_now_and_never_shortened(leases: Leases, time: Time) -> None:
    leases.begin("a", 30)
    time.now = 1010
    assert not leases.extend("a", 20.9)  # less than a second more
    assert leases.extend("a", 40)
    time.now = 1049.9
    assert leases.idle() == []
    time.now = 1050
    assert leases.idle() == ["a"]
    assert not leases.extend("unknown", 40)


def test_the_maximum_age_counts_from_the_turns_end(leases: Leases, time: Time) -> None:
    leases.begin("a", 30)
    last = leases.last_possible()
    time.now = 1500
    assert leases.extend("a", 400)
    assert leases.take_deadlines() == {"a": last}
    time.now = 1599
    assert not leases.extend("a", 400)
    time.now = 1600
    assert leases.idle() == ["a"]
    assert Leases(monotonic=time, max_age_s=10).begin("b", 30).idle == 1610


def test_no_longer_than_the_control_plane_grants(time: Time) -> None:
    leases = Leases(monotonic=time, max_age_s=3600, longest_s=480)
    assert leases.begin("a", 480).idle == 1470  # on record until 1480
    assert leases.extend("a", math.inf) is False
    time.now = 1100
    assert leases.extend("a", math.inf)
    assert leases.take_deadlines() == {"a": 1100 + 470 + 15 + 40}


def test_the_record_is_renewed_when_the_step_with_the_deadline_is_done(leases: Leases, time: Time) -> None:
    leases.begin("a", 30)
    leases.take_deadlines()
    leases.take_deadlines()  # two steps under way, as under async scheduling
    leases.extend("a", 60)
    assert leases.take_deadlines() == {"a": 1115}
    assert leases.take_deadlines() == {}
    assert [leases.step_done() for _ in range(4)] == [{}, {}, {"a": 1075}, {}]


def test_renewed_at_every_step_the_record_follows(leases: Leases, time: Time) -> None:
    leases.begin("a", 30)
    said = list[float]()
    for _ in range(5):
        time.now += 2
        leases.extend("a", 30)
        leases.take_deadlines()
        leases.step_done()
        said += leases.step_done().values()  # more often than there are steps
    assert said == []
    for _ in range(5):
        time.now += 2
        leases.extend("a", 30)
        leases.take_deadlines()
        said += leases.step_done().values()
    assert said == [time.now - 8 + 45 + 2 * step for step in range(5)]


def test_freed_before_the_step_was_done_nothing_is_renewed(leases: Leases, time: Time) -> None:
    leases.begin("a", 30)
    leases.extend("a", 60)
    leases.take_deadlines()
    assert leases.end("a")
    assert leases.step_done() == {}
    leases.begin("b", 30)
    leases.extend("b", 60)
    leases.end("b")
    assert leases.take_deadlines() == {}
    time.now = 2000
    assert not leases.end("b")


def test_freed_at_its_deadline_is_not_in_time(leases: Leases, time: Time) -> None:
    time.now = leases.begin("a", 30).blocks
    assert not leases.end("a")


def test_ended_and_renewed_leases_leave_nothing_behind(leases: Leases, time: Time) -> None:
    for number in range(1000):
        leases.begin(f"r{number}", 30)
        for _ in range(3):
            time.now += 2
            leases.extend(f"r{number}", 30)
        leases.end(f"r{number}")
    assert len(leases) == 0
    assert len(leases._ends) <= 64
