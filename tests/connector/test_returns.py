"""How soon conversations come back, learned online, and the leases that follow."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.connector.habits import Cohorts, bin_edges
from kvplane.connector.price import Curve
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


def worth(returns: Returns, tenant: str) -> float:
    return returns.worth(tenant, FIRST, idle_s=30.0, tokens=3100, blocks=194)


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


def test_a_fleet_without_classes_learns_from_what_was_read_and_given_up() -> None:
    """Kaplan-Meier: a lease given up early says nothing of later, and must not look like a lost turn."""
    clock, random = Clock(), Random(4)
    returns = make(clock)
    for _ in range(4000):
        clock.now += 0.5
        gap = random.uniform(100, 200) if random.random() < 0.5 else 1e9
        lived = random.choice((30.0, 480.0))  # half of them are given up after 30 s
        returns.retained("t", FIRST, tokens=3100, blocks=194)
        returns.ended("t", FIRST, min(gap, lived), read=gap <= lived)
    assert 190 <= lease(returns) <= 270


def test_what_is_read_counts_once_where_classes_come_back() -> None:
    clock, random = Clock(), Random(5)
    told, both = make(clock), make(clock)
    for _ in range(3000):
        clock.now += 0.5
        for returns in (told, both):
            returns.retained("t", FIRST, tokens=3100, blocks=194)
        if random.random() < 0.3:
            idle_s = random.uniform(20, 60)
            for returns in (told, both):
                returns.returned("t", FIRST, idle_s)
            both.ended("t", FIRST, idle_s, read=True)
        else:
            both.ended("t", FIRST, 20.0, read=False)
    assert lease(told) == lease(both)


def test_habits_that_change_are_learned_anew() -> None:
    clock = Clock()
    returns = make(clock)
    play([returns], clock, lambda _, random: random.uniform(1, 12), turns=1500)
    assert lease(returns) == MIN
    clock.now += 1.0
    play([returns], clock, lambda _, random: random.uniform(150, 250), turns=1500)
    assert lease(returns) >= 240


def test_a_flood_of_one_tenant_does_not_move_a_grown_up_other() -> None:
    clock = Clock()
    returns = make(clock)
    play([returns], clock, lambda _, random: random.uniform(60, 120), turns=2500, tenant="calm")
    clock.now += 2 * MAX
    for _ in range(1000):  # all that is pending goes through, a bit with each call
        lease(returns, tenant="calm")
    before = [lease(returns, tenant="calm"), worth(returns, "calm")]
    play([returns], clock, lambda *_: None, turns=6000, tenant="flood", every_s=0.05)
    assert [lease(returns, tenant="calm"), worth(returns, "calm")] == before
    assert before[0] > MIN


def test_a_new_tenant_is_taken_to_be_like_the_others() -> None:
    clock = Clock()
    returns = make(clock)
    play([returns], clock, lambda _, random: random.uniform(60, 120), turns=2500, tenant="old")
    assert worth(returns, "new") == pytest.approx(worth(returns, "old"), rel=0.3)


def test_quick_returns_alone_shorten_no_lease_before_slow_ones_can_have_been_seen() -> None:
    clock = Clock()
    returns, began = make(clock), clock.now
    while clock.now < began + MAX - 1:
        returns.retained("t", FIRST, tokens=3100, blocks=194)
        assert lease(returns) == MAX
        clock.now += 0.5
        returns.returned("t", FIRST, 0.5)
    clock.now += 10
    assert lease(returns) == MIN


def test_chance_comes_from_the_seed() -> None:
    clock = Clock()
    runs = [make(clock, explore=0.3, seed=seed) for seed in (1, 1, 2)]
    leases = list[list[float]]()
    for returns in runs:
        play([returns], clock, lambda _, random: random.uniform(1, 12), turns=1500)
        leases.append([lease(returns) for _ in range(200)])
        clock.now = 1000.0
    assert leases[0] == leases[1] != leases[2]
    assert 0.2 < leases[0].count(MAX) / 200 < 0.4


def test_memory_is_bounded() -> None:
    clock, random = Clock(), Random(6)
    returns = make(clock, max_tenants=4)
    cohorts = Cohorts(bin_edges(MAX, MIN), limit=500)
    for number in range(20_000):
        clock.now += 0.005
        cohorts.add(f"t{number % 50}", number % 1024, clock.now)
        if number % 5 == 0:
            cohorts.back(f"t{number % 50}", random.randrange(1024), random.uniform(0, 50), clock.now)
        if number % 20 == 0:
            returns.retained(f"t{number}", number % 1024, tokens=100, blocks=7)
            returns.returned(f"t{number}", number % 1024, 1.0)
    assert len(cohorts) <= 500
    assert returns.tenants == 4
    clock.now += 2 * MAX
    while cohorts.take(clock.now):
        pass
    assert len(cohorts) == 0


chances = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(chances, st.floats(0, 2), st.floats(1, 10))
def test_a_higher_price_never_gives_a_longer_lease(chances: list[float], price: float, factor: float) -> None:
    curve = Curve((20.0, 60.0, 200.0, 480.0), chances, 20.0)
    assert 20.0 <= curve.ttl_s(price * factor) <= curve.ttl_s(price) <= 480.0
    assert curve.brought == sorted(curve.brought, reverse=True)
    assert all(0 <= curve.rate(idle_s) < float("inf") for idle_s in (0.0, 60.0, 479.0, 480.0, 1e9))


@given(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 10**5))
def test_more_tokens_in_fewer_blocks_are_worth_more(
    idle_s: float, tokens: int, blocks: int, more: int
) -> None:
    returns = make(Clock())
    one = returns.worth("t", FIRST, idle_s=idle_s, tokens=tokens, blocks=blocks)
    assert returns.worth("t", FIRST, idle_s=idle_s, tokens=tokens + more, blocks=blocks) >= one
    assert returns.worth("t", FIRST, idle_s=idle_s, tokens=tokens, blocks=blocks + more) <= one


@given(st.integers(), st.integers(), st.integers(), st.text(max_size=12), st.none() | st.floats())
def test_every_turn_has_a_class(
    turn: int, prompt: int, reply: int, finish: str, idle_s: float | None
) -> None:
    assert 0 <= lease_class(Traits("t", turn, prompt, reply, finish, idle_s)) < 1024


def test_classes_are_what_the_fleet_agreed_on() -> None:
    """They cross versions: none of these may ever change."""
    assert lease_class(Traits("t", 1, 100, 10)) == 0
    assert lease_class(Traits("t", 2, 1024, 32, idle_s=0.0)) == 1 << 7 | 1 << 4 | 1 << 2 | 1
    assert lease_class(Traits("t", 6, 9000, 31, "length", 30.0)) == 4 << 7 | 4 << 4 | 2 << 2 | 2
    assert lease_class(Traits("t", 400, 10**6, 9, "tool_calls", 120.0)) == 1023


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_ttl_s": 481.0},
        {"max_ttl_s": float("nan")},
        {"keep_share": 1.1},
        {"explore": -0.1},
        {"max_tenants": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    settings = {"max_ttl_s": MAX, "min_ttl_s": MIN, **wrong}
    with pytest.raises(ValueError, match=name):
        Returns(monotonic=Clock(), **settings)  # type: ignore[arg-type]
