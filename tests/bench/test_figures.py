"""What is made of the rounds' figures."""

from __future__ import annotations

import pytest

from kvplane.bench.figures import Cpu, Of, Row, Target, mean_cpu, percentile


def row(*rounds: float, against: tuple[float, ...] = (), target: Target | None = None) -> Row:
    return Row("b", "c", "/s", rounds, against, target, Cpu(0.5, 0.1))


def test_a_row_is_told_by_its_median() -> None:
    told = row(8.0, 100.0, 10.0)
    assert told.value == 10.0
    assert told.spread == pytest.approx(4.6)
    assert told.per_core == 20.0


def test_ratio_and_difference_are_medians_of_rounds_not_of_sides() -> None:
    told = row(10.0, 40.0, 90.0, against=(10.0, 20.0, 30.0))
    assert told.ratio == 2.0
    assert told.difference == 20.0


def test_without_a_comparison_there_is_no_ratio_and_no_verdict_on_it() -> None:
    told = row(1.0, target=Target(2, at_most=True, of=Of.RATIO))
    assert (told.ratio, told.difference, told.met) == (None, None, None)
    assert row(1.0).met is None


@pytest.mark.parametrize(
    ("target", "met", "shown"),
    [
        (Target(30, at_most=False), True, ">= 30"),
        (Target(30.1, at_most=False), False, ">= 30.1"),
        (Target(30, at_most=True), True, "<= 30"),
        (Target(1.5, at_most=True, of=Of.RATIO), True, "<= 1.5x"),
        (Target(1.4, at_most=True, of=Of.RATIO), False, "<= 1.4x"),
        (Target(10, at_most=True, of=Of.DIFFERENCE), True, "<= +10"),
        (Target(9, at_most=True, of=Of.DIFFERENCE), False, "<= +9"),
    ],
)
def test_targets_are_met_at_their_bound(target: Target, met: bool, shown: str) -> None:
    told = row(30.0, against=(20.0,), target=target)
    assert told.met is met
    assert str(target) == shown
    assert told.as_json()["met"] is met


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1000, 0, -1)]
    assert percentile(values, 0.5) == 501
    assert percentile(values, 0.999) == 1000
    assert percentile([7.0], 0.999) == 7.0


def test_cpu_shares_are_averaged() -> None:
    assert mean_cpu([Cpu(0.5, 0.25), Cpu(1.0, 0.75)]) == Cpu(0.75, 0.5)
