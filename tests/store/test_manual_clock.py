"""The clock that tests move."""

from __future__ import annotations

import asyncio

import pytest

from kvplane.store.clock import Clock
from kvplane.store.testing import ManualClock


async def test_stands_still_until_advanced() -> None:
    clock: Clock = (manual := ManualClock(start_ms=5_000))
    assert (clock.now_ms(), clock.monotonic()) == (5_000, 0)
    await manual.advance(1.5)
    assert (clock.now_ms(), clock.monotonic()) == (6_500, 1.5)
    for _ in range(10):
        await manual.advance(0.1)
    assert clock.now_ms() == 7_500
    assert clock.monotonic() == 2.5, "ten tenths are one"


@pytest.mark.parametrize("seconds", [0, -1])
async def test_sleeping_for_nothing_returns(seconds: float) -> None:
    clock = ManualClock()
    await clock.sleep(seconds)
    assert clock.sleepers == 0


async def test_wakes_in_order_each_at_its_own_time() -> None:
    clock, woken = ManualClock(), list[tuple[str, float]]()

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("late", 3), ("first", 1), ("second", 1), ("between", 2), ("beyond", 3.001)):
            group.create_task(sleep(name, seconds))
        await clock.advance(3)
        assert woken == [("first", 1), ("second", 1), ("between", 2), ("late", 3)]
        assert clock.sleepers == 1
        await clock.advance(0.001)
    assert woken[-1] == ("beyond", 3.001)


async def test_exactly_due_wakes_and_a_moment_earlier_does_not() -> None:
    clock = ManualClock()
    task = asyncio.ensure_future(clock.sleep(10))
    await clock.advance(9.999999999)
    assert not task.done()
    await clock.advance(0.000000001)
    assert task.done()


async def test_who_sleeps_again_within_the_span_wakes_again() -> None:
    clock, ticks = ManualClock(), list[float]()

    async def tick() -> None:
        while True:
            await clock.sleep(1)
            ticks.append(clock.monotonic())

    task = asyncio.ensure_future(tick())
    await clock.advance(4.5)
    assert ticks == [1, 2, 3, 4]
    task.cancel()
    await asyncio.wait([task])
    assert clock.sleepers == 0
    await clock.advance(10)
    assert ticks == [1, 2, 3, 4]


async def test_jump_lets_nobody_run_before_time_has_passed() -> None:
    clock, seen = ManualClock(), list[float]()

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        seen.append(clock.monotonic())

    tasks = [asyncio.ensure_future(sleep(seconds)) for seconds in (2, 1, 6)]
    await clock.advance(0)
    clock.jump(5)
    assert seen == []
    await clock.advance(0)
    assert seen == [5, 5]
    await clock.advance(1)
    await asyncio.gather(*tasks)


async def test_time_does_not_run_backward() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="backward"):
        await clock.advance(-1)
    with pytest.raises(ValueError, match="backward"):
        clock.jump(-0.1)
