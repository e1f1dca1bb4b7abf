"""The Turns stream: many operations at once over one stream, answers coalesced into few messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

import structlog

from kvplane.controlplane import convert, eager, traced, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.callers import CURRENT
from kvplane.controlplane.errors import InvalidFieldError, status_of
from kvplane.controlplane.tally import CallTally, Tally
from kvplane.controlplane.turns import BegunTurn
from kvplane.tracing.context import CURRENT as SPAN
from kvplane.tracing.context import Tracer, trace_id_of
from kvplane.v1 import location_pb2 as pb

log = structlog.get_logger(__name__)

MAX_OUTSTANDING = 512
"""Operations of one stream that are under way; then it is not read further."""


Write = Callable[[pb.TurnsResponse], Awaitable[None]]


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

    async def perform_touch(self, request: pb.TouchConversationRequest) -> m.Touched:
        """Perform a touch."""

    def write_known(self, answer: pb.LookupLocationResponse, known: m.Found | m.MissReason) -> None:
        """Write the answer to a lookup."""

    def write_begun(
        self, answer: pb.BeginTurnResponse, begun: BegunTurn, request: pb.BeginTurnRequest
    ) -> None:
        """Write the answer to a begin-turn."""

    def write_claimed(self, answer: pb.ClaimLocationResponse, outcome: m.Claim | m.MissReason) -> None:
        """Write the answer to a claim."""


MAX_ANSWER_BYTES = 3 * 1024 * 1024
"""Larger answers go as several messages; a single result has at most about 1.3 MB.

gRPC's clients take 4 MiB unless told otherwise.
"""


class _Stream:
    """One stream: what is under way, and the answers that are ready to go."""

    def __init__(
        self,
        operations: Operations,
        start: eager.Start[None],
        write: Write,
        tally: Tally | None,
        taken: Mapping[str, CallTally] | None,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._operations = operations
        self._tally = tally or Tally()
        self._taken = taken
        self._start = start
        self._write = write
        self._caller = CURRENT.get()
        self._running: set[asyncio.Task[None]] = set()
        self._ready = pb.TurnsResponse()
        self._ready_bytes = 0  # of what may be large in it
        self._writer: asyncio.Task[None] | None = None
        self._is_writing = False

    async def _perform(self, operation: pb.TurnsOperation) -> None:
        """Make one operation and put its answer among those that are ready."""
        make, kind = self._operations, operation.WhichOneof("operation")
        taken = None if self._taken is None or kind is None else self._taken[kind]
        began = 0.0 if taken is None else taken.begin()
        try:
            if self._caller is not None and kind:
                self._caller.require_operation(kind, operation)
            if kind == "begin_turn":
                begun = await make.perform_begin(operation.begin_turn)
                answer = self._ready.results.add(id=operation.id).begin_turn
                make.write_begun(answer, begun, operation.begin_turn)
                if isinstance(begun.known, m.Found):
                    self._ready_bytes += _large_bytes(begun.known.location)
            elif kind == "claim":
                outcome = await make.perform_claim(operation.claim)
                make.write_claimed(self._ready.results.add(id=operation.id).claim, outcome)
                if isinstance(outcome, m.Claim):
                    self._ready_bytes += _large_bytes(outcome.location)
            elif kind == "lookup":
                known = await make.perform_lookup(operation.lookup)
                make.write_known(self._ready.results.add(id=operation.id).lookup, known)
                if isinstance(known, m.Found):
                    self._ready_bytes += _large_bytes(known.location)
            elif kind == "release":
                released = convert.outcome_out(await make.perform_release(operation.release))
                self._ready.results.add(id=operation.id).release.outcome = released
            elif kind == "touch":
                touched = await make.perform_touch(operation.touch)
                convert.write_touched(self._ready.results.add(id=operation.id).touch, touched)
            else:
                raise InvalidFieldError(
                    "operation", "must be one of lookup, begin_turn, claim, release, touch"
                )
        except Exception as error:
            if (span := SPAN.get()) is not None:
                span.tell(problem=type(error).__name__)
            code, message, reason, _ = status_of(error, f"turns-{operation.id}")
            self._tally.refused(reason)
            if taken is not None:
                taken.ended(code.name)
            if reason == "INTERNAL":
                trace_id = trace_id_of(operation.traceparent) or None
                named = {"rpc": "Turns", "request_id": f"turns-{operation.id}", "trace_id": trace_id}
                log.error("rpc_failed", **named, exc_info=error)
            failed = self._ready.results.add(id=operation.id).error
            failed.code, failed.message, failed.reason = code.value[0], message, reason
        else:
            if taken is not None:
                taken.done(began)

    async def serve(self, requests: AsyncIterator[pb.TurnsRequest]) -> None:
        """Perform operations as they come and write their answers, as long as the caller takes them."""
        try:
            async for request in requests:
                operations = request.operations
                validate.batch("operations", len(operations), least=1)
                for number, operation in enumerate(operations, 1):
                    if self._ready_bytes >= MAX_ANSWER_BYTES:
                        await self._flush()  # else one message of lookups would be answered by gigabytes
                    if not number % eager.SLICE:
                        await asyncio.sleep(0)  # what never waits would hold up all others
                    while len(self._running) >= MAX_OUTSTANDING:
                        await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    if self._tracer.records and operation.traceparent:
                        begun = self._start(traced.operation(self._tracer, self._perform, operation))
                        traced.left()
                    else:
                        begun = self._start(self._perform(operation))
                    if begun is not None:
                        self._running.add(begun)
                        begun.add_done_callback(self._done)
                await self._flush()
            while self._running:
                await asyncio.wait(self._running)
                await self._flush()
        finally:
            tasks = [*self._running] if self._writer is None else [self._writer, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Have the answer written, with those that come in the same turn of the loop."""
        self._running.discard(task)
        if self._writer is None and not self._is_writing and not task.cancelled():
            self._writer = asyncio.create_task(self._write_ready())

    async def _flush(self) -> None:
        """Write what is ready. A caller that does not take its answers is not read from meanwhile."""
        if self._writer is not None:
            await self._writer
        await self._write_ready()

    async def _write_ready(self) -> None:
        """Write what is ready, and what becomes so meanwhile; one at a time."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while self._ready.results:
                answer, self._ready = self._ready, pb.TurnsResponse()
                self._ready_bytes = 0
                for part in _parts(answer):
                    await self._write(part)
        finally:
            self._is_writing, self._writer = False, None


def _large_bytes(location: m.Location) -> int:
    """Return the size of what may be large of a location."""
    return len(location.kv_transfer_params) + len(location.fingerprint.chain)


def _parts(answer: pb.TurnsResponse) -> list[pb.TurnsResponse]:
    """Return an answer in messages of a size that callers take."""
    if len(answer.results) <= 1 or answer.ByteSize() <= MAX_ANSWER_BYTES:
        return [answer]
    middle = len(answer.results) // 2
    halves = (answer.results[:middle], answer.results[middle:])
    return [part for half in halves for part in _parts(pb.TurnsResponse(results=half))]


async def multiplexed(
    operations: Operations,
    requests: AsyncIterator[pb.TurnsRequest],
    write: Write,
    start: eager.Start[None],
    tally: Tally | None = None,
    taken: Mapping[str, CallTally] | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Perform operations as they come, concurrently; answer with all results that are ready, together.

    Refusals are counted in `tally`, and operations by kind in `taken`, if given. Those that give a trace are
    done under it, by spans of `tracer`.
    """
    await _Stream(operations, start, write, tally, taken, tracer or Tracer()).serve(requests)
