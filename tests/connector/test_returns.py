"""How soon conversations come back, learned online, and the leases that follow."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.connector.returns import Returns, Traits, lease_class

MAX, MIN = 480.0, 20.0
FIRST = lease_class(Traits("t", 1, 3000, 100))
LATER = lease_class(Traits("t", 5, 3000, 100, idle_s=60.0))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def play(
    engines: list[Returns],
    clock: Clock,
    gap_of: Callable[[int, Random], float | None],
    *,
    turns: int,
    tenant: str = "t",
    every_s: float = 0.5,
    classes: tuple[int, ...] = (FIRST,),
    seed: int = 1,
    sticky: bool = False,
) -> None:
    """Turns end one after the other; each comes back after a gap or not, on an engine picked at random."""
    random = Random(seed)
    back: list[tuple[float, int, int, float]] = []
    start = clock.now
    for turn in range(turns):
        due = start + turn * every_s
        while back and back[0][0] <= due:
            at, engine, number, idle_s = heapq.heappop(back)
            clock.now = at
            engines[engine].returned(tenant, number, idle_s)
        clock.now = due
        number = random.choice(classes)
        engine = random.randrange(len(engines))
        engines[engine].ttl_s(tenant, number, tokens=3100, blocks=194)
        engines[engine].retained(tenant, number, tokens=3100, blocks=194)
        gap = gap_of(number, random)
        if gap is not None:
            other = engine if sticky else random.randrange(len(engines))
            heapq.heappush(back, (due + gap, other, number, gap))


def lease(returns: Returns, number: int = FIRST, tenant: str = "t") -> float:
    return returns.ttl_s(tenant, number, tokens=3100, blocks=194)


def make(clock: Clock, **more: float) -> Returns:
    return Returns(monotonic=clock, max_ttl_s=MAX, min_ttl_s=MIN, explore=more.pop("explore", 0.0), **more)  # type: ignore[arg-type]


def test_cold_start_is_the_longest_lease() -> None:
    clock = Clock()
    returns = make(clock)
    assert lease(returns) == MAX
    returns.retained("t", FIRST, tokens=3100, blocks=194)
    assert lease(returns) == MAX


def test_leases_end_soon_after_conversations_come_back() -> None:
    clock = Clock()
    returns = make(clock)
    play([returns], clock, lambda _, random: random.uniform(1, 12), turns=2000)
    assert lease(returns) == MIN


def test_conversations_that_never_come_back_are_not_kept() -> None:
    clock = Clock()
    returns = make(clock)
    play([returns], clock, lambda *_: None, turns=3000)
    assert lease(returns) == MIN


def test_classes_are_told_apart() -> None:
    clock = Clock()
    returns = make(clock)
    play(
        [returns],
        clock,
        lambda number, random: random.uniform(100, 300) if number == LATER else None,
        turns=4000,
        classes=(FIRST, LATER),
    )
    assert lease(returns, FIRST) == MIN
    assert 280 <= lease(returns, LATER) <= 360
    worths = [returns.worth("t", n, idle_s=50.0, tokens=3100, blocks=194) for n in (FIRST, LATER)]
    assert worths[1] > 20 * worths[0]


@pytest.mark.parametrize("sticky", [True, False])
def test_any_engine_may_see_the_return(sticky: bool) -> None:
    clock = Clock()
    engines = [make(clock) for _ in range(3)]
    play(
        engines,
        clock,
        lambda _, random: random.uniform(50, 100) if random.random() < 0.3 else None,
        turns=9000,
        every_s=0.2,
        sticky=sticky,
    )
    for engine in engines:
        assert 90 <= lease(engine) <= 130


numbers = st.one_of(st.floats(), st.integers(-(10**30), 10**30))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 2000), numbers, numbers, numbers), max_size=60))
def test_bad_numbers_are_taken_as_the_nearest(calls: list[tuple[int, int, float, float, float]]) -> None:
    clock = Clock()
    returns = make(clock)
    for which, number, a, b, step in calls:
        clock.now += min(100.0, step) if step > 0 else 0.0
        if which == 0:
            returns.retained("t", number, tokens=a, blocks=b)  # type: ignore[arg-type]
        elif which == 1:
            returns.returned("t", number, a)
        elif which == 2:
            returns.ended("t", number, a, read=step > 1)
        ttl = returns.ttl_s("t", number, tokens=a, blocks=b)  # type: ignore[arg-type]
        assert MIN <= ttl <= MAX
        assert 0 <= returns.worth("t", number, idle_s=a, tokens=b, blocks=step) < float("inf")  # type: ignore[arg-type]
