"""The Turns stream: many operations at once over one stream, answers coalesced into few messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import structlog

from kvplane.controlplane import convert, eager, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import InvalidFieldError, status_of
from kvplane.controlplane.turns import BegunTurn
from kvplane.v1 import location_pb2 as pb

log = structlog.get_logger(__name__)

MAX_OUTSTANDING = 512
"""Operations of one stream that are under way or whose answer is not taken; then it is not read further."""


class Operations(Protocol):
    """How a stream's operations are made: each performed, then its answer written; see LocationServicer."""

    async def perform_lookup(self, request: pb.LookupLocationRequest) -> m.Found | m.MissReason:
        """Perform a lookup."""

    async def perform_begin(self, request: pb.BeginTurnRequest) -> BegunTurn:
        """Perform a begin-turn."""

    async def perform_claim(self, request: pb.ClaimLocationRequest) -> m.Claim | m.MissReason:
        """Perform a claim."""

    async def perform_release(self, request: pb.ReleaseLocationRequest) -> m.ReleaseOutcome:
        """Perform a release."""

    def write_known(self, answer: pb.LookupLocationResponse, known: m.Found | m.MissReason) -> None:
        """Write the answer to a lookup."""

    def write_begun(self, answer: pb.BeginTurnResponse, begun: BegunTurn) -> None:
        """Write the answer to a begin-turn."""

    def write_claimed(self, answer: pb.ClaimLocationResponse, outcome: m.Claim | m.MissReason) -> None:
        """Write the answer to a claim."""


_Outcome = m.Found | m.MissReason | BegunTurn | m.Claim | m.ReleaseOutcome


class _Stream:
    """One stream: what is under way, and the answers that are ready to go."""

    def __init__(self, operations: Operations, start: eager.Start[None]) -> None:
        self._operations = operations
        self._start = start
        self._room = MAX_OUTSTANDING
        self._has_room = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._ready = pb.TurnsResponse()
        self._changed = asyncio.Event()
        self._finished = False
        self._failure: Exception | None = None

    async def _perform(self, operation: pb.TurnsOperation) -> None:
        """Make one operation and put its answer among those that are ready."""
        make, kind = self._operations, operation.WhichOneof("operation")
        try:
            if kind == "begin_turn":
                begun = await make.perform_begin(operation.begin_turn)
                make.write_begun(self._ready.results.add(id=operation.id).begin_turn, begun)
            elif kind == "claim":
                outcome = await make.perform_claim(operation.claim)
                make.write_claimed(self._ready.results.add(id=operation.id).claim, outcome)
            elif kind == "lookup":
                known = await make.perform_lookup(operation.lookup)
                make.write_known(self._ready.results.add(id=operation.id).lookup, known)
            elif kind == "release":
                released = convert.outcome_out(await make.perform_release(operation.release))
                self._ready.results.add(id=operation.id).release.outcome = released
            else:
                raise InvalidFieldError("operation", "must be one of lookup, begin_turn, claim, release")
        except Exception as error:
            code, message, reason, _ = status_of(error, f"turns-{operation.id}")
            if reason == "INTERNAL":
                log.error("rpc_failed", rpc="Turns", request_id=f"turns-{operation.id}", exc_info=error)
            failed = self._ready.results.add(id=operation.id).error
            failed.code, failed.message, failed.reason = code.value[0], message, reason

    async def _read(self, requests: AsyncIterator[pb.TurnsRequest]) -> None:
        try:
            async for request in requests:
                operations = request.operations
                validate.batch("operations", len(operations), least=1)
                for number, operation in enumerate(operations, 1):
                    if not number % eager.SLICE:
                        await asyncio.sleep(0)  # what never waits would hold up all others
                    while self._room <= 0:
                        self._has_room.clear()
                        self._changed.set()
                        await self._has_room.wait()
                    self._room -= 1
                    begun = self._start(self._perform(operation))
                    if begun is not None:
                        self._running.add(begun)
                        begun.add_done_callback(self._done)
                if self._ready.results:
                    self._changed.set()
            if self._running:
                await asyncio.wait(self._running)
        except Exception as error:
            self._failure = error
        self._finished = True
        self._changed.set()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()

    async def serve(self, requests: AsyncIterator[pb.TurnsRequest]) -> AsyncIterator[pb.TurnsResponse]:
        """Perform all operations; yield answers as long as the caller takes them."""
        reading = asyncio.create_task(self._read(requests))
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._ready.results:
                    answer, self._ready = self._ready, pb.TurnsResponse()
                    count = len(answer.results)
                    yield answer
                    self._room += count
                    self._has_room.set()
                if self._failure is not None:
                    raise self._failure
                if self._finished and not self._ready.results and not self._running:
                    return
        finally:
            tasks = [reading, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def multiplexed(
    operations: Operations, requests: AsyncIterator[pb.TurnsRequest], start: eager.Start[None]
) -> AsyncIterator[pb.TurnsResponse]:
    """Perform operations as they come, concurrently; answer with all results that are ready, together."""
    return _Stream(operations, start).serve(requests)
