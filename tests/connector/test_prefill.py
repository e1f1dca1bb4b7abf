from __future__ import annotations

import pytest

from kvplane.connector.envelope import Outcome
from kvplane.connector.prefill import PrefillLedger
from kvplane.connector.pull import PullPlan


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def ledger(time: Time) -> PrefillLedger:
    return PrefillLedger(time)


def report(ledger: PrefillLedger) -> tuple[object, ...]:
    told = ledger.report("r", 1000)
    assert told["prompt_tokens"] == 1000
    assert len(ledger) == 0
    return told["outcome"], told["reused_tokens"], told["matched_tokens"], told["local_tokens"]


def test_a_request_without_an_offer_is_cold(ledger: PrefillLedger) -> None:
    ledger.arrive("r")
    ledger.asked("r", 32, 0)
    ledger.allocated("r", 0)
    assert report(ledger) == ("cold", 0, 0, 32)


def test_an_unknown_request_is_cold(ledger: PrefillLedger) -> None:
    assert report(ledger) == ("cold", 0, 0, 0)


def test_what_was_pulled_is_what_was_allocated(ledger: PrefillLedger) -> None:
    ledger.planned("r", PullPlan(640, [[1]]))
    ledger.asked("r", 0, 640)  # asked, and there was no room
    ledger.asked("r", 64, 576)
    ledger.allocated("r", 576, {1, 2})
    ledger.allocated("r", 0)  # again once the blocks have come
    ledger.received(["r", "other"], set(), set())
    assert report(ledger) == ("pulled", 576, 640, 64)
    assert ledger.outcomes == {"pulled": 1}


def test_a_local_hit(ledger: PrefillLedger) -> None:
    ledger.planned("r", PullPlan(640, [[1]]))
    ledger.asked("r", 640, 0)
    ledger.allocated("r", 0)
    assert report(ledger) == ("local_hit", 0, 640, 640)


def test_below_threshold(ledger: PrefillLedger) -> None:
    ledger.planned("r", PullPlan(640, [[1]]))
    ledger.asked("r", 608, 0)
    ledger.allocated("r", 0)
    assert report(ledger) == ("below_threshold", 0, 640, 608)


def test_prompt_logprobs_keep_vllm_from_pulling(ledger: PrefillLedger) -> None:
    ledger.planned("r", PullPlan(640, [[1]]))
    ledger.asked("r", 0, 640)
    ledger.allocated("r", 0)
    assert report(ledger) == ("cold", 0, 640, 0)


def test_nothing_to_pull_keeps_its_reason(ledger: PrefillLedger) -> None:
    ledger.planned("r", PullPlan(0, [[]], Outcome.MISMATCH, "other_tokens"))
    ledger.asked("r", 0, 0)
    ledger.allocated("r", 0)
    assert report(ledger) == ("mismatch", 0, 0, 0)
    assert ledger.outcomes == {"mismatch:other_tokens": 1}


@pytest.mark.parametrize(("failed", "invalid"), [({"r"}, set()), (set(), {2, 9})])
def test_a_failed_read_is_no_reuse(ledger: PrefillLedger, failed: set[str], invalid: set[int]) -> None:
    ledger.planned("r", PullPlan(640, [[1]]))
    ledger.asked("r", 0, 640)
    ledger.allocated("r", 640, {1, 2})
    ledger.received(["r"], failed, invalid)
    assert report(ledger) == ("failed", 0, 640, 0)


def test_one_pull_per_request_whatever_becomes_of_it(ledger: PrefillLedger) -> None:
    ledger.planned("r", PullPlan(640, [[1]]))
    assert ledger.may_pull("r")
    ledger.asked("r", 0, 640)
    assert ledger.may_pull("r")
    ledger.allocated("r", 640)
    assert not ledger.may_pull("r")
    ledger.asked("r", 0, 0)  # preempted: what was pulled is gone
    ledger.allocated("r", 0)
    assert report(ledger) == ("cold", 0, 640, 0)
    assert ledger.outcomes == {"cold:preempted": 1}


def test_how_long_a_request_has_waited(ledger: PrefillLedger, time: Time) -> None:
    ledger.arrive("r")
    time.now += 7
    ledger.arrive("r")
    assert ledger.waited("r") == 7
    ledger.forget("r")
    ledger.forget("r")
    assert ledger.waited("r") == 0
