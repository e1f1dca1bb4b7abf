"""One decision for all who ask the same of one thing while the decision before is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[K, Q, A]):
    """Puts questions about one key together. Who finds none under way asks at once, and alone.

    `decide` gets a key and questions, and returns as many answers; it is not called again for a key before
    it has returned. What it raises, all of them get.
    """

    __slots__ = ("_decide", "_tasks", "_waiting")

    def __init__(self, decide: Callable[[K, Sequence[Q]], Awaitable[Sequence[A]]]) -> None:
        self._decide = decide
        self._waiting: dict[K, list[tuple[Q, asyncio.Future[A]]]] = {}
        """By key that is being decided on: who has come since."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, key: K, question: Q) -> A:
        """Return the answer to a question. Raises what `decide` raises."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
            waiting.append((question, answer))
            return await answer
        self._waiting[key] = []
        try:
            return (await self._decide(key, (question,)))[0]
        finally:
            self._next(key)

    def _next(self, key: K) -> None:
        waiting = [(question, answer) for question, answer in self._waiting[key] if not answer.done()]
        if not waiting:
            del self._waiting[key]
            return
        self._waiting[key] = []
        # Of its own, as any of them may be cancelled; and none of their traces is everybody's.
        task = asyncio.create_task(self._answer(key, waiting), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, key: K, waiting: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            given = await self._decide(key, [question for question, _ in waiting])
        except asyncio.CancelledError:
            for _, answer in waiting:
                answer.cancel()
            raise
        except Exception as error:
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for (_, answer), value in zip(waiting, given, strict=True):
                if not answer.done():
                    answer.set_result(value)
        finally:
            self._next(key)
