"""Coroutines that are started at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvplane.controlplane import eager


async def done(value: int) -> int:
    return value


async def waits(event: asyncio.Event, value: int) -> int:
    await event.wait()
    await asyncio.sleep(0)
    return value


async def fails() -> int:
    raise ZeroDivisionError


async def test_what_does_not_wait_is_done_at_once() -> None:
    assert eager.now(done(7)) == 7
    with pytest.raises(ZeroDivisionError):
        eager.now(fails())


async def test_what_waits_becomes_a_task_that_goes_on() -> None:
    event = asyncio.Event()
    task = eager.now(waits(event, 7))
    assert isinstance(task, asyncio.Task)
    event.set()
    assert await task == 7


async def test_a_task_of_the_rest_can_be_cancelled_and_its_coroutine_hears_of_it() -> None:
    heard: list[str] = []

    async def careful() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    task = eager.now(careful())
    assert isinstance(task, asyncio.Task)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == ["cancelled"]


async def test_an_error_after_waiting_is_the_tasks() -> None:
    async def fails_later() -> int:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    task = eager.now(fails_later())
    assert isinstance(task, asyncio.Task)
    with pytest.raises(ZeroDivisionError):
        await task


@pytest.mark.parametrize("start", [eager.now, eager.later])
async def test_gathered_results_keep_their_order(start: Any) -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    coroutines = [waits(event, number) if number % 3 else done(number) for number in range(50)]
    assert await eager.gather(coroutines, start) == list(range(50))


@pytest.mark.parametrize("start", [eager.now, eager.later])
async def test_an_error_is_raised_when_what_has_begun_is_finished(start: Any) -> None:
    finished: list[int] = []

    async def work() -> int:
        await asyncio.sleep(0)
        finished.append(1)
        return 1

    with pytest.raises(ZeroDivisionError):
        await eager.gather([work(), fails(), done(1)], start)
    assert finished == [1]


async def test_cancelling_a_gathering_cancels_what_it_waits_for() -> None:
    event, ended = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        try:
            return await waits(event, 1)
        finally:
            ended.set()

    gathering = asyncio.create_task(eager.gather([work()], eager.now))
    await asyncio.sleep(0)
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert ended.is_set()


@pytest.mark.parametrize("what", ["an event", "a turn of the loop", "what is there already"])
async def test_a_task_of_the_rest_that_is_cancelled_before_it_runs_is_cancelled_where_it_waits(
    what: str,
) -> None:
    heard: list[str] = []
    there: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def careful() -> None:
        try:
            if what == "an event":
                await asyncio.Event().wait()
            elif what == "a turn of the loop":
                await asyncio.sleep(0)
            else:
                await there
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)  # not possible in a coroutine that is merely closed
            heard.append("cleaned up")

    task = eager.now(careful())
    assert isinstance(task, asyncio.Task)
    there.set_result(None)
    task.cancel()
    await asyncio.wait((task,), timeout=5)
    assert task.cancelled()
    assert heard == ["cancelled", "cleaned up"]
