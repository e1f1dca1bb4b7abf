from __future__ import annotations

import pytest

from kvplane.connector.breaker import MAX_HOLD_S, PeerBreaker


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def breaker(time: Time) -> PeerBreaker:
    return PeerBreaker(time)


def fail(breaker: PeerBreaker, times: int = 3, peer: str = "d") -> list[bool]:
    return [breaker.failed(peer) for _ in range(times)]


def test_the_third_failure_within_a_minute_opens_it(breaker: PeerBreaker, time: Time) -> None:
    assert breaker.admits("d")
    assert fail(breaker) == [False, False, True]
    assert not breaker.admits("d")
    assert breaker.held() == {"d"}
    assert breaker.admits("another")


def test_failures_far_apart_do_not(breaker: PeerBreaker, time: Time) -> None:
    for _ in range(10):
        assert fail(breaker, 1) == [False]
        time.now += 31
    assert breaker.admits("d")


def test_a_success_between_forgets(breaker: PeerBreaker) -> None:
    fail(breaker, 2)
    breaker.succeeded("d")
    assert len(breaker) == 0
    assert fail(breaker, 2) == [False, False]


def test_one_probe_after_the_hold_and_success_closes(breaker: PeerBreaker, time: Time) -> None:
    fail(breaker)
    time.now += 9.9
    assert not breaker.admits("d")
    time.now += 0.1
    assert breaker.held() == frozenset()
    assert breaker.admits("d")
    assert not breaker.admits("d"), "one probe at a time"
    assert breaker.held() == {"d"}
    breaker.succeeded("d")
    assert breaker.admits("d")
    assert breaker.admits("d")


def test_each_failed_probe_doubles_the_hold_up_to_five_minutes(breaker: PeerBreaker, time: Time) -> None:
    fail(breaker)
    holds = [10.0]
    for _ in range(7):
        time.now += holds[-1]
        assert breaker.admits("d")
        assert breaker.failed("d")
        held = 0.0
        while breaker.held():
            time.now += 5
            held += 5
        time.now -= held
        holds.append(held)
    assert holds == [10, 20, 40, 80, 160, 300, 300, 300]
    assert breaker.opened == 8
    assert holds[-1] == MAX_HOLD_S


def test_reads_begun_before_it_opened_do_not_count_again(breaker: PeerBreaker, time: Time) -> None:
    fail(breaker)
    assert fail(breaker, 5) == [False] * 5
    time.now += 10
    assert breaker.admits("d")


def test_a_probe_that_did_not_read_lets_the_next_one_through(breaker: PeerBreaker, time: Time) -> None:
    fail(breaker)
    time.now += 10
    assert breaker.admits("d")
    breaker.unused("d")
    assert breaker.admits("d")
    breaker.unused("never heard of")


def test_a_probe_that_is_never_heard_of_again_is_no_bar(breaker: PeerBreaker, time: Time) -> None:
    fail(breaker)
    time.now += 10
    assert breaker.admits("d")
    time.now += 60
    assert breaker.admits("d")


def test_memory_is_bounded_and_the_longest_without_failure_go(breaker: PeerBreaker) -> None:
    fail(breaker, peer="first")
    for number in range(1023):
        fail(breaker, 1, f"d{number}")
    assert fail(breaker, 1, "first") == [False]  # used again: not the oldest any more
    fail(breaker, 1, "one more")
    assert len(breaker) == 1024
    assert not breaker.admits("first")
