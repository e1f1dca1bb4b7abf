"""Operations through the Turns stream, made before they are sent, checked after they are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvplane.bench.payload import Conversations
from kvplane.bench.rig import DEADLINE_S, BenchError
from kvplane.v1 import location_pb2

METHOD = "/kvplane.v1.LocationService/Turns"
_operation, _request = location_pb2.TurnsOperation, location_pb2.TurnsRequest
KINDS: dict[str, Callable[[int, Conversations, int], location_pb2.TurnsOperation]] = {
    "lookup": lambda id, made, number: _operation(id=id, lookup=made.lookup(number)),
    "begin_turn": lambda id, made, number: _operation(id=id, begin_turn=made.begin(number)),
    "claim": lambda id, made, number: _operation(id=id, claim=made.claim(number)),
}
Retained = tuple[Conversations, int]
"""A conversation: the set it is of, and its number there."""


@dataclass(slots=True)
class Work:
    """Operations to do: of conversation i first `first[i]`, and once that is answered `then[i]`, if any.

    Operation 2i is the first, 2i + 1 the second. Each is a whole TurnsRequest; joined they are one too.
    """

    on: Sequence[Retained]
    first: list[bytes]
    then: list[bytes]
    answers: list[bytes] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    taken: int = 0

    def take(self) -> int | None:
        """Take the next conversation."""
        if self.taken == len(self.first):
            return None
        self.taken += 1
        return self.taken - 1

    @property
    def operations(self) -> int:
        """Number of operations in all."""
        return len(self.first) + len(self.then)

    def anew(self) -> Work:
        """Return the same work, undone."""
        return Work(self.on, self.first, self.then)


def work(on: Sequence[Retained], first: str, then: str = "") -> Work:
    """Make the operations on some conversations, of one or two of KINDS."""

    def made(kind: str, offset: int) -> list[bytes]:
        make = KINDS[kind]
        return [
            _request(operations=[make(2 * index + offset, made, number)]).SerializeToString()
            for index, (made, number) in enumerate(on)
        ]

    return Work(on, made(first, 0), made(then, 1) if then else [])


async def one_by_one(call: Any, todo: Work) -> None:
    """Do all of it, one operation in flight."""
    clock, latencies, answers = time.perf_counter, todo.latencies_s, todo.answers
    async with asyncio.timeout(DEADLINE_S + todo.operations / 100):
        for messages in zip(todo.first, todo.then, strict=True) if todo.then else zip(todo.first):
            for message in messages:
                began = clock()
                await call.write(message)
                answer = await call.read()
                latencies.append(clock() - began)
                if answer is grpc.aio.EOF:
                    raise BenchError("the Turns stream ended")
                answers.append(answer)


async def at_once(calls: Sequence[Any], todo: Work, in_flight: int) -> None:
    """Do all of it, `in_flight` operations in flight, evenly over the streams."""
    async with asyncio.timeout(DEADLINE_S + todo.operations / 100), asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(_Stream(call, todo).run(in_flight // len(calls)))


class _Stream:
    """One stream's end: answers are read as they come, what follows from them is sent together."""

    def __init__(self, call: Any, todo: Work) -> None:
        self._call = call
        self._todo = todo
        self._pending: list[bytes] = []
        self._changed = asyncio.Event()
        self._outstanding = 0
        self._sent_at: dict[int, float] = {}

    async def run(self, in_flight: int) -> None:
        now = time.perf_counter()
        for _ in range(in_flight):
            self._begin_next(now)
        self._changed.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write())
            tasks.create_task(self._read())

    def _begin_next(self, now: float) -> None:
        number = self._todo.take()
        if number is not None:
            self._pending.append(self._todo.first[number])
            self._sent_at[2 * number] = now
            self._outstanding += 1

    async def _write(self) -> None:
        while self._outstanding:
            await self._changed.wait()
            self._changed.clear()
            if self._pending:
                message, self._pending = b"".join(self._pending), []
                await self._call.write(message)

    async def _read(self) -> None:
        todo, sent_at, parse = self._todo, self._sent_at, location_pb2.TurnsResponse.FromString
        then = todo.then
        while self._outstanding:
            raw = await self._call.read()
            if raw is grpc.aio.EOF:
                raise BenchError("the Turns stream ended")
            now = time.perf_counter()
            todo.answers.append(raw)
            for result in parse(raw).results:
                number = result.id
                todo.latencies_s.append(now - sent_at.pop(number))
                if number & 1 or not then:
                    self._outstanding -= 1
                    self._begin_next(now)
                else:
                    self._pending.append(then[number >> 1])
                    sent_at[number + 1] = now
            self._changed.set()


def check(todo: Work) -> None:
    """Raise BenchError unless each operation was answered once, with its conversation's location."""
    seen = set[int]()
    for raw in todo.answers:
        for result in location_pb2.TurnsResponse.FromString(raw).results:
            made, number = todo.on[result.id >> 1]
            if result.id in seen or not _is_right(result, made, number):
                raise BenchError(f"operation {result.id} was answered wrongly: {str(result)[:300]}")
            seen.add(result.id)
    if len(seen) != todo.operations:
        raise BenchError(f"{len(seen)} of {todo.operations} operations were answered")


def _is_right(result: location_pb2.TurnsResult, made: Conversations, number: int) -> bool:
    kind = result.WhichOneof("result")
    if kind == "claim":
        location = result.claim.claim.location
        right = result.claim.claim.claim_id == made.claim_id(number)
    elif kind == "begin_turn":
        location = result.begin_turn.location
        right = result.begin_turn.turn > made.turn
    else:
        location, right = result.lookup.location, kind == "lookup"
    request_id = made.request_id(number)
    return (
        right
        and location.request_id == request_id
        and location.turn == made.turn
        and location.key == made.key(number)
        and request_id.encode() in location.kv_transfer_params
    )
