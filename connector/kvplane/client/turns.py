"""A router's operations over one Turns stream: cheaper than single calls, and few messages when busy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from kvplane.client import convert
from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneError, ControlPlaneUnavailableError, from_rpc_error, from_status
from kvplane.client.logs import get_logger, trace
from kvplane.tracing.context import CURRENT
from kvplane.v1 import location_pb2 as pb

T = TypeVar("T")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
SILENCE_S = 1.0
"""A stream that owes answers and gives none for so long is left for another, perhaps to another replica."""
_MAX_OPERATIONS = 1024
"""In one message, as the API has it."""
_MAX_BYTES = 2 * 1024 * 1024
"""In one message, which may have 4 MiB; a single operation has at most about 1 MB."""
_log = get_logger("kvplane.turns")


class _Asked:
    """An operation without an answer yet, sent or waiting to be."""

    __slots__ = ("answer", "operation", "tries")

    def __init__(self, operation: pb.TurnsOperation, answer: asyncio.Future[pb.TurnsResult]) -> None:
        self.operation = operation
        self.answer = answer
        self.tries = 0


class TurnsStream:
    """Begin-turn, lookup, claim, release and touch, as ControlPlaneClient has them, over one stream.

    The stream is opened with the first operation and again after each loss. What was sent without an answer
    is then sent once more, which is safe: turns and claims are idempotent by their request ids, lookups and
    releases by nature. Operations asked for in one turn of the event loop go in one message. Belongs to one
    event loop; every method raises a ControlPlaneError, ControlPlaneUnavailableError after `timeout_s`.

    Args:
        open_stream: opens the bidirectional call, see ControlPlaneClient.open_turns.
        timeout_s: for an operation that sets no other.
    """

    def __init__(self, open_stream: Callable[[], Any], *, timeout_s: float = 2.0) -> None:
        self._open_stream = open_stream
        self._timeout_s = timeout_s
        self._asked: dict[int, _Asked] = {}
        self._waiting: list[_Asked] = []
        self._number = 0
        self._wake = asyncio.Event()
        self._run: asyncio.Task[None] | None = None
        self._answered = False
        self._owing_since: float | None = None  # sent then, and nothing heard since
        self._speaking: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream; operations under way fail as unavailable. Idempotent."""
        self._closed = True
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
            self._run = None
        self._fail_all(ControlPlaneUnavailableError("the client is closed"))

    async def lookup_location(
        self,
        key: m.ConversationKey,
        *,
        fingerprint: m.Fingerprint | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> m.Location | m.MissReason:
        """See ControlPlaneClient."""
        operation = pb.TurnsOperation(id=self._next_id())
        convert.write_key(operation.lookup.key, key)
        if fingerprint is not None:
            operation.lookup.fingerprint.MergeFrom(convert.fingerprint_to_wire(fingerprint))
        if turn_group:
            operation.lookup.turn_group = turn_group
        answer = (await self._ask(operation, timeout_s)).lookup
        if answer.HasField("location"):
            return convert.location_from_wire(answer.location)
        return convert.miss_from_wire(answer.miss_reason)

    async def begin_turn(
        self,
        key: m.ConversationKey,
        request_id: str,
        *,
        wait_s: float | None = None,
        fingerprint: m.Fingerprint | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> m.BegunTurn:
        """See ControlPlaneClient."""
        operation = pb.TurnsOperation(id=self._next_id())
        begin = operation.begin_turn
        convert.write_key(begin.key, key)
        begin.request_id = request_id
        if wait_s is not None:
            convert.write_duration(begin.wait, wait_s)
        if fingerprint is not None:
            begin.fingerprint.MergeFrom(convert.fingerprint_to_wire(fingerprint))
        if turn_group:
            begin.turn_group = turn_group
        return convert.begun_from_wire((await self._ask(operation, timeout_s)).begin_turn, key)

    async def claim_location(
        self,
        key: m.ConversationKey,
        request_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> m.Claim | m.MissReason:
        """See ControlPlaneClient."""
        operation = pb.TurnsOperation(id=self._next_id())
        claim = operation.claim
        convert.write_key(claim.key, key)
        claim.request_id, claim.owner, claim.turn = request_id, owner, turn
        claim.reader_engine_id = reader_engine_id
        if wait_s is not None:
            convert.write_duration(claim.wait, wait_s)
        answer = (await self._ask(operation, timeout_s)).claim
        if answer.HasField("claim"):
            return convert.claim_from_wire(answer.claim)
        return convert.miss_from_wire(answer.miss_reason)

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        """See ControlPlaneClient."""
        operation = pb.TurnsOperation(id=self._next_id())
        finish = operation.release.finish_claim
        finish.claim_id, finish.owner = claim_id, owner
        return convert.release_outcome_from_wire((await self._ask(operation, None)).release.outcome)

    async def end_conversation(self, key: m.ConversationKey) -> m.ReleaseOutcome:
        """See ControlPlaneClient."""
        operation = pb.TurnsOperation(id=self._next_id())
        convert.write_key(operation.release.end_conversation.key, key)
        return convert.release_outcome_from_wire((await self._ask(operation, None)).release.outcome)

    async def touch_conversation(
        self, key: m.ConversationKey, ttl_s: float, *, turn: int = 0, timeout_s: float | None = None
    ) -> m.Touched:
        """See ControlPlaneClient."""
        operation = pb.TurnsOperation(id=self._next_id())
        touch = operation.touch
        convert.write_key(touch.key, key)
        touch.turn = turn
        convert.write_duration(touch.ttl, ttl_s)
        return convert.touched_from_wire((await self._ask(operation, timeout_s)).touch)

    def _next_id(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, operation: pb.TurnsOperation, timeout_s: float | None) -> pb.TurnsResult:
        if self._closed:
            raise ControlPlaneUnavailableError("the client is closed")
        if (span := CURRENT.get()) is not None:
            operation.traceparent = span.traceparent
        loop = asyncio.get_running_loop()
        asked = _Asked(operation, loop.create_future())
        self._asked[operation.id] = asked
        self._waiting.append(asked)
        self._wake.set()
        if self._run is None:
            context = copy_context()
            context.run(CURRENT.set, None)  # the stream is for all requests
            self._run = loop.create_task(self._stay_connected(), name="turns-stream", context=context)
        seconds = timeout_s or self._timeout_s
        deadline = loop.call_later(seconds, self._too_late, asked, seconds)
        try:
            result = await asked.answer
        finally:
            deadline.cancel()
            self._asked.pop(operation.id, None)
        if result.HasField("error"):
            raise from_status(result.error.code, result.error.message, result.error.reason)
        return result

    def _too_late(self, asked: _Asked, seconds: float) -> None:
        if not asked.answer.done():
            asked.answer.set_exception(ControlPlaneUnavailableError(f"no answer within {seconds:g} s"))
        since = self._owing_since
        if since is not None and self._speaking is not None:
            silent_s = asyncio.get_running_loop().time() - since
            if silent_s >= SILENCE_S:  # a server may hang while its connection lives
                self._owing_since = None
                self._speaking.cancel()

    def _fail_all(self, error: ControlPlaneError) -> None:
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(error)
        self._waiting.clear()

    async def _stay_connected(self) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            await self._wake.wait()
            self._answered = False
            self._speaking = asyncio.get_running_loop().create_task(self._live(), name="turns-read")
            try:
                await asyncio.shield(self._speaking)
            except asyncio.CancelledError:
                if self._closed or not self._speaking.cancelled():
                    self._speaking.cancel()
                    await asyncio.gather(self._speaking, return_exceptions=True)
                    raise
                self._ask_again(ControlPlaneUnavailableError(f"no answers for {SILENCE_S:g} s"))
            except ControlPlaneError as error:
                self._ask_again(error)
            except Exception as error:  # a fault of ours must not leave callers waiting for good
                _log.error("turns_stream_fault", error=type(error).__name__, trace=trace(error))
                self._ask_again(ControlPlaneUnavailableError(f"fault: {type(error).__name__}"))
            delay_s = FIRST_RETRY_S if self._answered else min(2 * delay_s, LAST_RETRY_S)
            await asyncio.sleep(delay_s)

    def _ask_again(self, error: ControlPlaneError) -> None:
        """After a stream broke: what was sent twice has failed, the rest is sent again."""
        again = list[_Asked]()
        for asked in self._asked.values():
            if asked.answer.done():
                continue
            if asked.tries >= 2:
                asked.answer.set_exception(error)
            else:
                again.append(asked)
        self._waiting = again
        if again:
            self._wake.set()

    async def _live(self) -> None:
        """Speak on one stream until it ends. Raises a ControlPlaneError."""
        stream, self._owing_since = self._open_stream(), None
        writer = asyncio.get_running_loop().create_task(self._write(stream), name="turns-write")
        try:
            while True:
                message = await stream.read()
                if message is grpc.aio.EOF:
                    break
                self._answered, self._owing_since = True, None
                for result in message.results:
                    asked = self._asked.get(result.id)
                    if asked is not None and not asked.answer.done():
                        asked.answer.set_result(result)
            code = await stream.code()
            raise ControlPlaneUnavailableError(f"the stream ended: {code.name}")
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            writer.cancel()
            stream.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, stream: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns why
            while True:
                await self._wake.wait()
                self._wake.clear()
                waiting, self._waiting = self._waiting, []
                due = [asked for asked in waiting if not asked.answer.done()]
                for message in _messages(due):
                    if self._owing_since is None:
                        self._owing_since = asyncio.get_running_loop().time()
                    await stream.write(message)


def _messages(due: list[_Asked]) -> Iterator[pb.TurnsRequest]:
    """Put operations into messages of the number and size that the API takes."""
    operations, size = list[pb.TurnsOperation](), 0
    for asked in due:
        bytes_ = asked.operation.ByteSize()
        if operations and (len(operations) == _MAX_OPERATIONS or size + bytes_ > _MAX_BYTES):
            yield pb.TurnsRequest(operations=operations)
            operations, size = [], 0
        asked.tries += 1
        operations.append(asked.operation)
        size += bytes_
    if operations:
        yield pb.TurnsRequest(operations=operations)
