"""The checker can fail: each rule against a history in which it is broken, and a history in which none is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.robustness import history as h
from tests.robustness.checker import Limits, check

PLACE = h.Place("d", 1, "q1")
LIMITS = Limits(min_remaining_s=10, staleness_s=2, engine_lease_s=10, lease_slack_s=4)


def announced(
    place: h.Place = PLACE, *, turn: int = 5, at: float = 10.0, ttl_s: float = 60.0
) -> list[h.Event]:
    return [
        h.Announcing(place, "c", turn, at + ttl_s, at),
        h.Announced(place, "accepted", at + 0.1),
    ]


def granted(place: h.Place = PLACE, *, at: float = 20.0, claim_id: str = "k1", turn: int = 5) -> h.Granted:
    return h.Granted(place, "c", turn, claim_id, "r1", 30.0, 40.0, at, at + 0.1, "one")


def offered(place: h.Place = PLACE, *, at: float = 20.0, turn: int = 5) -> h.Offered:
    return h.Offered(place, "c", turn, 40.0, at, at + 0.1, "one")


def begun(turn: int, at: float, request_id: str) -> h.Begun:
    return h.Begun("c", request_id, turn, at, at + 0.1)


def request(outcome: str, at: float) -> h.Request:
    return h.Request(outcome, "a cause", at, at + 0.01)


REGISTERED = h.Registered("d", 1, 1.0, 1.1)
SOUND: list[h.Event] = [
    REGISTERED,
    begun(5, 9.0, "b1"),
    *announced(),
    offered(),
    granted(),
    granted(at=20.05),
    h.Finishing("k1", 25.0),
    h.MayFree(PLACE, "claim_finished", 25.1),
    h.Counted({"claims_decided": 7, "miss": 5}, 25.2),
    h.Counted({"claims_decided": 3}, 26.0),
    request("hit", 27.0),
    h.Fault("pause", 27.5, 29.0, 5.0),
    request("cold", 29.5),
    request("hit", 30.0),
    request("hit", 36.0),
]


def test_a_sound_history_has_no_violations_and_right_figures() -> None:
    verdict = check(SOUND, LIMITS)
    assert verdict.violations == []
    assert (verdict.attempts, verdict.counts["miss"], verdict.grants, verdict.offers) == (10, 5, 2, 1)
    assert (verdict.hits, verdict.cold, verdict.failed) == (3, 1, 0)
    assert verdict.least_life_s == pytest.approx(49.85)
    assert verdict.least_margin_s == pytest.approx(49.95)
    assert verdict.gaps == {"pause": pytest.approx(3.0)}
    assert verdict.longest_gap_s == pytest.approx(6.0)
    assert verdict.recoveries == {"pause": pytest.approx(1.01)}


BROKEN: dict[str, tuple[str, list[h.Event]]] = {
    "two claims of one place": ("double_claim", [*announced(), granted(), granted(at=21, claim_id="k2")]),
    "one claim id of two owners": (
        "double_claim",
        [*announced(), granted(), replace(granted(at=21), owner="r2")],
    ),
    "a repeated claim names another place": (
        "double_claim",
        [
            *announced(),
            *announced(h.Place("d", 1, "q2"), turn=6, at=20.5),
            granted(),
            granted(h.Place("d", 1, "q2"), at=21, turn=6),
        ],
    ),
    "a second reader under another epoch": (
        "double_claim",
        [
            *announced(),
            granted(),
            h.Registered("d", 2, 21.0, 21.1),
            *announced(h.Place("d", 2, "q1"), at=22.0),
            granted(h.Place("d", 2, "q1"), at=30, claim_id="k2"),
        ],
    ),
    "freed under the reader of an older epoch": (
        "freed_under_reader",
        [
            *announced(),
            granted(),
            h.Registered("d", 2, 21.0, 21.1),
            *announced(h.Place("d", 2, "q1"), at=22.0),
            h.MayFree(h.Place("d", 2, "q1"), "released", 30.0),
        ],
    ),
    "offered though claimed": ("double_claim", [*announced(), granted(), offered(at=22.2)]),
    "never announced": ("invented", [granted()]),
    "announced for another turn": ("invented", [*announced(turn=4), granted()]),
    "announced after it was handed out": ("invented", [*announced(at=30), granted()]),
    "past its deadline": ("late margin", [*announced(ttl_s=10.0), granted()]),
    "offered past its deadline": ("late margin", [*announced(ttl_s=10.0), offered()]),
    "past a deadline that a renewal made shorter": (
        "late margin",
        [*announced(), h.Renewing(PLACE, 19.5, 15), h.Renewed(PLACE, True, 15.1), granted()],
    ),
    "less life left than promised": ("margin", [*announced(ttl_s=17.9), granted()]),
    "an older epoch claimed": ("stale_epoch", [*announced(), h.Registered("d", 2, 19, 19.9), granted()]),
    "an older epoch offered": ("stale_epoch", [*announced(), h.Registered("d", 2, 17, 17.9), offered()]),
    "an epoch twice": ("stale_epoch", [REGISTERED, h.Registered("d", 1, 2.0, 2.1)]),
    "claimed after it was withdrawn": (
        "freed",
        [*announced(), h.MayFree(PLACE, "released", 19.9), granted()],
    ),
    "offered after it was withdrawn": ("freed", [*announced(), h.MayFree(PLACE, "nothing", 17.9), offered()]),
    "freed under a reader": (
        "freed_under_reader",
        [*announced(), granted(), h.MayFree(PLACE, "claim_timeout", 49.9)],
    ),
    "withdrawn while it is claimed": (
        "freed_under_reader",
        [*announced(), granted(), h.MayFree(PLACE, "released", 20.05)],
    ),
    "freed before the reader finished": (
        "freed_under_reader",
        [*announced(), granted(), h.MayFree(PLACE, "released", 24.9), h.Finishing("k1", 25.0)],
    ),
    "an older turn claimed": (
        "older_turn",
        [*announced(), *announced(h.Place("e", 1, "q2"), turn=6, at=19.0), granted()],
    ),
    "an older turn accepted": (
        "older_turn",
        [*announced(h.Place("e", 1, "q2"), turn=6, at=5.0), *announced()],
    ),
    "a turn number goes back": ("turn_order", [begun(6, 9.0, "b1"), begun(5, 9.2, "b2")]),
    "a turn number is given again": ("turn_order", [begun(6, 9.0, "b1"), begun(6, 9.2, "b2")]),
    "a turn number is given to two at once": ("turn_order", [begun(6, 9.0, "b1"), begun(6, 9.05, "b2")]),
    "a dead engine is offered": (
        "dead_engine",
        [*announced(), h.Died("d", 20.0), offered(at=34.1)],
    ),
    "a request failed": ("failed_request", [request("failed", 9.0)]),
    "no hit in time": (
        "recovery",
        [h.Fault("pause", 1.0, 2.0, 5.0), request("hit", 7.5)],
    ),
    "no hit at all": ("recovery", [h.Fault("pause", 1.0, 2.0, 5.0), request("cold", 7.5)]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_finds_what_breaks_it_and_nothing_else(case: str) -> None:
    rule, events = BROKEN[case]
    verdict = check(events, LIMITS)
    assert {violation.rule for violation in verdict.violations} == set(rule.split()), verdict.violations


SOUND_TOO: dict[str, list[h.Event]] = {
    "a claim id again, after it was finished": [
        *announced(),
        *announced(h.Place("d", 1, "q2"), turn=6, at=20.5),
        granted(),
        h.Finishing("k1", 20.8),
        granted(h.Place("d", 1, "q2"), at=21, turn=6),
    ],
    "offered within the staleness": [*announced(), h.MayFree(PLACE, "released", 19.0), offered()],
    "claimed while the withdrawal was under way": [
        *announced(),
        granted(),
        h.Finishing("k1", 20.2),
        h.MayFree(PLACE, "nothing", 20.3),
    ],
    "freed once the claim is over": [*announced(), granted(), h.MayFree(PLACE, "claim_timeout", 50.01)],
    "a longer life, said but not acknowledged": [
        *announced(ttl_s=12.0),
        h.Renewing(PLACE, 70.0, 15.0),
        granted(at=21.0),
    ],
    "another epoch registered meanwhile": [*announced(), h.Registered("d", 2, 20.0, 20.05), granted()],
    "an older turn while the newer was announced": [
        *announced(),
        *announced(h.Place("e", 1, "q2"), turn=6, at=19.95),
        granted(),
    ],
    "a repeated begin-turn": [begun(6, 9.0, "b1"), begun(6, 9.2, "b1")],
    "numbers given at the same time in any order": [begun(6, 9.0, "b1"), begun(5, 9.05, "b2")],
    "another fault before the first recovered": [
        h.Fault("one", 1.0, 2.0, 5.0),
        h.Fault("two", 3.0, 9.0, 5.0),
        request("hit", 9.5),
        request("hit", 19.5),
    ],
}


@pytest.mark.parametrize("case", SOUND_TOO)
def test_what_may_happen_is_no_violation(case: str) -> None:
    assert check(SOUND_TOO[case], LIMITS).violations == []


def test_a_history_comes_back_from_its_files_whatever_was_cut_short(tmp_path: Path) -> None:
    recorder = h.Recorder(tmp_path / "one.jsonl")
    events = [event for event in SOUND if not isinstance(event, h.Counted)]
    for event in events:
        recorder.record(event)
    recorder.count("claim_attempts", 4)
    recorder.count("claim_attempts", 3)
    recorder.close()
    with (tmp_path / "two.jsonl").open("w") as cut:
        cut.write('{"kind": "Died", "engine_id": "d", "at": 1.0}\n{"kind": "Di')
    reader = h.Reader(tmp_path)
    found = reader.new()
    counted = [event for event in found if isinstance(event, h.Counted)]
    assert [event.counts for event in counted] == [{"claim_attempts": 7}]
    assert [event for event in found if not isinstance(event, h.Counted)] == [*events, h.Died("d", 1.0)]
    assert reader.new() == []
    with (tmp_path / "two.jsonl").open("a") as cut:
        cut.write('ed", "engine_id": "e", "at": 2.0}\n')
    assert reader.new() == [h.Died("e", 2.0)]
