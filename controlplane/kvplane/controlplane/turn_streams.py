"""The Turns stream: many operations at once over one stream, answers coalesced into few messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

import structlog

from kvplane.controlplane import validate
from kvplane.controlplane.errors import InvalidFieldError, status_of
from kvplane.v1 import location_pb2 as pb

log = structlog.get_logger(__name__)

MAX_OUTSTANDING = 256
"""Operations of one stream that are under way or whose answer is not taken; then it is not read further."""


class Operations(Protocol):
    """The unary handlers that a stream's operations are given to."""

    def LookupLocation(
        self, request: pb.LookupLocationRequest, context: None
    ) -> Awaitable[pb.LookupLocationResponse]:
        """See the protos."""

    def BeginTurn(self, request: pb.BeginTurnRequest, context: None) -> Awaitable[pb.BeginTurnResponse]:
        """See the protos."""

    def ClaimLocation(
        self, request: pb.ClaimLocationRequest, context: None
    ) -> Awaitable[pb.ClaimLocationResponse]:
        """See the protos."""

    def ReleaseLocation(
        self, request: pb.ReleaseLocationRequest, context: None
    ) -> Awaitable[pb.ReleaseLocationResponse]:
        """See the protos."""


async def _perform(handlers: Operations, operation: pb.TurnsOperation) -> pb.TurnsResult:
    kind = operation.WhichOneof("operation")
    try:
        if kind == "lookup":
            return pb.TurnsResult(
                id=operation.id, lookup=await handlers.LookupLocation(operation.lookup, None)
            )
        if kind == "begin_turn":
            answer = await handlers.BeginTurn(operation.begin_turn, None)
            return pb.TurnsResult(id=operation.id, begin_turn=answer)
        if kind == "claim":
            return pb.TurnsResult(id=operation.id, claim=await handlers.ClaimLocation(operation.claim, None))
        if kind == "release":
            released = await handlers.ReleaseLocation(operation.release, None)
            return pb.TurnsResult(id=operation.id, release=released)
        raise InvalidFieldError("operation", "must be one of lookup, begin_turn, claim, release")
    except Exception as error:
        code, message, reason, _ = status_of(error, f"turns-{operation.id}")
        if reason == "INTERNAL":
            log.error("rpc_failed", rpc="Turns", request_id=f"turns-{operation.id}", exc_info=error)
        failed = pb.TurnsError(code=code.value[0], message=message, reason=reason)
        return pb.TurnsResult(id=operation.id, error=failed)


async def multiplexed(
    handlers: Operations, requests: AsyncIterator[pb.TurnsRequest]
) -> AsyncIterator[pb.TurnsResponse]:
    """Perform operations as they come, concurrently; answer with all results that are ready, together."""
    ready: list[pb.TurnsResult] = []
    changed = asyncio.Event()
    slots = asyncio.Semaphore(MAX_OUTSTANDING)
    running: set[asyncio.Task[None]] = set()
    failure: list[Exception] = []
    finished = False

    async def perform(operation: pb.TurnsOperation) -> None:
        ready.append(await _perform(handlers, operation))
        changed.set()

    async def read() -> None:
        nonlocal finished
        try:
            async for request in requests:
                validate.batch("operations", len(request.operations), least=1)
                for operation in request.operations:
                    await slots.acquire()
                    task = asyncio.create_task(perform(operation))
                    running.add(task)
                    task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        except Exception as error:
            failure.append(error)
        finished = True
        changed.set()

    reading = asyncio.create_task(read())
    try:
        while True:
            await changed.wait()
            changed.clear()
            if ready:
                results, ready[:] = list(ready), []
                yield pb.TurnsResponse(results=results)
                for _ in results:
                    slots.release()
            if failure:
                raise failure[0]
            if finished and not ready:
                return
    finally:
        tasks = [reading, *running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
