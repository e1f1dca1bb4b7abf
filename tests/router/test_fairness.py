"""Nobody takes what all need: meters, shares, and whose turn it is in a line."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.admission import TENANT, Admission, AdmissionLimits, OverloadedError
from kvplane.router.shares import Shares
from kvplane.router.tenancy.meters import Meter, Meters
from kvplane.router.tenancy.model import Quota
from tests.router.rig import until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def begun(meter: Meter) -> bool:
    try:
        meter.begin()
    except OverloadedError as error:
        return (error.status, 1 <= error.retry_after_s <= 60) != (429, True)
    return True


def test_a_rate_lets_a_burst_through_and_then_so_many_a_second() -> None:
    clock = Clock()
    meter = Meter(Quota(requests_per_s=4, burst=6), 1, clock)
    assert [begun(meter) for _ in range(8)] == [True] * 6 + [False] * 2
    clock.now += 0.25
    assert [begun(meter) for _ in range(2)] == [True, False]
    clock.now += 1000
    assert [begun(meter) for _ in range(8)] == [True] * 6 + [False] * 2


def test_retry_after_says_when() -> None:
    clock = Clock()
    meter = Meter(Quota(requests_per_s=0.1), 1, clock)
    meter.begin()
    with pytest.raises(OverloadedError) as caught:
        meter.begin()
    clock.now += caught.value.retry_after_s - 1
    assert not begun(meter)
    clock.now += 1
    assert begun(meter)


def test_processes_have_parts_of_a_limit() -> None:
    clock = Clock()
    meters = [
        Meter(Quota(requests_per_s=8, burst=8, concurrent=5, tokens_per_minute=400), 4, clock)
        for _ in range(4)
    ]
    for meter in meters:
        assert [begun(meter) for _ in range(3)] == [True, True, False]
        meter.end()
        meter.end()
        meter.spend(100)
        with pytest.raises(OverloadedError):
            meter.spend(1)
    clock.now += 1
    # Eight a second are two in each.
    assert all([begun(meter) for _ in range(3)] == [True, True, False] for meter in meters)


def test_tokens_may_be_overdrawn_once_and_come_back() -> None:
    clock = Clock()
    meter = Meter(Quota(tokens_per_minute=60), 1, clock)
    meter.spend(180)
    with pytest.raises(OverloadedError) as caught:
        meter.spend(1)
    assert caught.value.retry_after_s == 60
    clock.now += 121.5
    meter.spend(1)


def test_a_changed_limit_holds_at_once_and_an_unchanged_one_keeps_what_was_used() -> None:
    clock = Clock()
    meters = Meters(1, clock)
    first = meters.of("a", Quota(requests_per_s=1))
    assert [begun(first) for _ in range(2)] == [True, False]
    assert meters.of("a", Quota(requests_per_s=1)) is first
    assert not begun(first)
    assert begun(meters.of("a", Quota(requests_per_s=2)))
    assert begun(meters.of("a", Quota()))


def test_meters_that_would_allow_as_much_if_new_are_dropped() -> None:
    clock = Clock()
    meters = Meters(1, clock)
    used, running, idle = (meters.of(name, Quota(requests_per_s=1)) for name in ("used", "running", "idle"))
    used.begin()
    used.end()
    running.begin()
    meters.prune()
    assert meters.of("used", Quota(requests_per_s=1)) is used
    clock.now += 10
    meters.prune()
    assert meters.of("running", Quota(requests_per_s=1)) is running
    assert meters.of("idle", Quota(requests_per_s=1)) is not idle
    assert meters.of("used", Quota(requests_per_s=1)) is not used


def test_one_tenant_gets_most_and_never_all() -> None:
    shares = Shares(100)
    while shares.may_take("noisy"):
        shares.take("noisy")
    assert shares.taken == 80
    # Whoever comes finds something, and none crowds out the next.
    for name in ("b", "c"):
        assert shares.may_take(name)
        while shares.may_take(name):
            shares.take(name)
    assert shares.taken < 100
    for _ in range(80):
        shares.give("noisy")
    assert shares.may_take("b")


def test_without_tenants_everything_may_be_taken() -> None:
    shares = Shares(3)
    for _ in range(3):
        assert shares.may_take("")
        shares.take("")
    assert not shares.may_take("")
    assert Shares(0).may_take("a", 1 << 40)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.booleans()), max_size=100))
def test_what_is_given_back_can_be_taken_again(steps: list[tuple[str, int, bool]]) -> None:
    shares, held = Shares(100), Counter[str]()
    for name, amount, takes in steps:
        if takes and shares.may_take(name, amount):
            shares.take(name, amount)
            held[name] += amount
        elif not takes:
            shares.give(name, given := min(amount, held[name]))
            held[name] -= given
        assert shares.taken == held.total() <= 100


@dataclass(eq=False)
class Engine:
    outstanding: int = 0


async def served(
    order: list[str], admission: Admission, engine: Engine, tenant: str, kind: str = "d"
) -> None:
    TENANT.set(tenant)
    await admission.place(kind, lambda: engine)
    engine.outstanding += 1
    order.append(tenant)
    await asyncio.sleep(0)
    engine.outstanding -= 1
    admission.freed()


@pytest.mark.parametrize("kinds", [("d", "d"), ("d", "e")], ids=["one-line", "two-lines"])
async def test_tenants_take_turns_however_many_requests_one_has(kinds: tuple[str, str]) -> None:
    """Also where their requests wait in different lines for the same engine."""
    engine, order = Engine(1), list[str]()
    admission = Admission(AdmissionLimits(max_engine_requests=1, max_queued=1000), lambda: 0.0)
    tasks = [asyncio.create_task(served(order, admission, engine, "noisy", kinds[0])) for _ in range(50)]
    await until(lambda: admission.queued == 50)
    tasks += [asyncio.create_task(served(order, admission, engine, "quiet", kinds[1])) for _ in range(3)]
    await until(lambda: admission.queued == 53)
    engine.outstanding = 0
    admission.freed()
    await asyncio.gather(*tasks)
    assert len(order) == 53
    assert max(index for index, name in enumerate(order) if name == "quiet") <= 6, order[:10]
    assert admission.queued == 0


async def test_one_that_comes_late_is_not_behind_all_who_wait() -> None:
    engine, order = Engine(1), list[str]()
    admission = Admission(AdmissionLimits(max_engine_requests=1), lambda: 0.0)
    tasks = [asyncio.create_task(served(order, admission, engine, "noisy")) for _ in range(30)]
    await until(lambda: admission.queued == 30)
    engine.outstanding = 0
    admission.freed()
    await until(lambda: len(order) >= 10)
    came_at = len(order)
    tasks.append(asyncio.create_task(served(order, admission, engine, "late")))
    await asyncio.gather(*tasks)
    assert order.index("late") <= came_at + 3


async def test_a_noisy_tenant_leaves_places_in_the_queue_and_in_the_router() -> None:
    engine = Engine(1)
    limits = AdmissionLimits(max_engine_requests=1, max_queued=10, max_requests=20)
    admission = Admission(limits, lambda: 0.0)

    async def waits(tenant: str) -> None:
        TENANT.set(tenant)
        await admission.place("d", lambda: engine)

    noisy = [asyncio.create_task(waits("noisy")) for _ in range(20)]
    await until(lambda: sum(task.done() for task in noisy) == 12)
    assert admission.queued == 8
    quiet = asyncio.create_task(waits("quiet"))
    await until(lambda: admission.queued == 9)
    for task in (*noisy, quiet):
        task.cancel()
    ended = await asyncio.gather(*noisy, quiet, return_exceptions=True)
    assert sum(isinstance(error, OverloadedError) for error in ended) == 12
    assert admission.queued == 0

    async def comes(tenant: str, leave: asyncio.Event) -> None:
        TENANT.set(tenant)
        async with admission:
            await leave.wait()

    leave = asyncio.Event()
    many = [asyncio.create_task(comes("noisy", leave)) for _ in range(30)]
    await until(lambda: admission.requests == 16)
    one = asyncio.create_task(comes("quiet", leave))
    await until(lambda: admission.requests == 17)
    leave.set()
    await asyncio.gather(*many, one, return_exceptions=True)
    assert admission.requests == 0
