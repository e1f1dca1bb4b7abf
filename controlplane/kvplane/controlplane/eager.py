"""Starting coroutines at once: most operations on a store in memory never wait, and need no task then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

SLICE = 16
"""Operations in a row, each some 50 us, after which others get their turn."""


class _Rest(Coroutine[Any, Any, T]):
    """The rest of a coroutine that was started by hand and waits for `awaited`; for a task to run.

    A coroutine around it would do, but for a task that is cancelled before its first step: that never enters
    what it was to run, which would be closed some time later, in the middle of what it waits for.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._is_begun = False

    def send(self, value: Any) -> Any:
        """Have the task wait for what is awaited, then go on."""
        if self._is_begun:
            return self._coroutine.send(value)
        self._is_begun = True
        return self._awaited

    def throw(self, *error: Any) -> Any:
        """Pass an exception on. Before the first step it can only be that the task was cancelled."""
        if self._is_begun or self._awaited is None or not self._awaited.cancel():
            self._is_begun = True
            return self._coroutine.throw(*error)
        self._is_begun = True
        return self._awaited  # which is cancelled, and says so

    def close(self) -> None:
        """End it."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()


Start = Callable[[Coroutine[Any, Any, T]], "T | asyncio.Task[T]"]
"""How coroutines are started: `now` or `later`."""


def now(coroutine: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
    """Run a coroutine up to where it waits; returns its result, or a task of what is left.

    Raises what it raises. Until it first waits, the caller's task is the current one: so not for what cares,
    as asyncio.timeout does. (Python 3.12 has eager tasks, for which that is no matter.)
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    return asyncio.get_running_loop().create_task(_Rest(coroutine, awaited))


def later(coroutine: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
    """Make a task of a coroutine."""
    return asyncio.get_running_loop().create_task(coroutine)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]], start: Start[T]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    Those that have begun are finished before the first error is raised; the rest are not begun.
    """
    outcomes: list[T | asyncio.Task[T]] = []
    error: Exception | None = None
    tasks = list[asyncio.Task[T]]()
    left = iter(coroutines)
    try:
        for number, coroutine in enumerate(left, 1):
            try:
                outcomes.append(outcome := start(coroutine))
            except Exception as raised:
                error = raised
                break
            if isinstance(outcome, asyncio.Task):
                tasks.append(outcome)
            if not number % SLICE:
                await asyncio.sleep(0)  # what never waits would hold up all others
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        for coroutine in left:
            coroutine.close()
    if tasks:
        error = error or next((e for task in tasks if isinstance(e := task.exception(), Exception)), None)
    if error is not None:
        raise error
    return [outcome.result() if isinstance(outcome, asyncio.Task) else outcome for outcome in outcomes]
