"""A fleet of real processes over real etcd, broken in every way that we know of, under traffic.

Fixed seeds choose which part is hit. After each fault the whole history up to then is checked: see
checker.py.
"""

from __future__ import annotations

import time
from random import Random

import pytest

from tests.robustness.faults import FAULTS
from tests.robustness.fleet import Fleet, report

pytestmark = [pytest.mark.robustness, pytest.mark.timeout(180)]

RECOVERS_WITHIN_S = 15.0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_makes_requests_cold_and_nothing_worse(fleet: Fleet, name: str) -> None:
    break_it, seconds = FAULTS[name]
    before = fleet.verdict()
    break_it(fleet, seconds, Random(f"short/{name}"))
    mended = time.monotonic()
    recovered = fleet.until_hit(mended, RECOVERS_WITHIN_S)
    time.sleep(0.5)
    verdict = fleet.verdict()
    new = [violation for violation in verdict.violations if violation not in before.violations]
    assert not new, "\n".join(f"{violation.rule}: {violation.text}" for violation in new[:10])
    assert fleet.ended() == [], "a process ended by itself"
    assert verdict.grants > before.grants, "claims are granted again"
    assert verdict.hits > before.hits, "requests are hits again"
    gap = max(length for fault, length in verdict.gaps.items() if fault.startswith(name))
    print(f"{name}: a hit {recovered - mended:.2f} s after its end, longest gap {gap:.2f} s")


def test_the_history_holds_what_the_suite_is_for(fleet: Fleet) -> None:
    """Without faults everything happens: claims won, lost and timed out, turns superseded, blocks freed."""
    fleet.until_hit(time.monotonic(), RECOVERS_WITHIN_S)
    ends = time.monotonic() + 30.0
    wanted = {"claim_hits", "miss_claimed", "withdrawn_released", "ordered_superseded", "announced_accepted"}
    while not wanted <= set((verdict := fleet.verdict()).counts):
        assert time.monotonic() < ends, report(verdict)
        time.sleep(0.2)
    assert verdict.attempts > verdict.grants > 0
    assert verdict.counts["answers_of_another_question"] == 0
