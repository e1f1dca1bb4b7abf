"""The router's stream of operations: against a real server, and against one that fails as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import (
    ControlPlaneError,
    ControlPlaneUnavailableError,
    InvalidFieldError,
    NotOwnerError,
)
from kvplane.client.turns import SILENCE_S, TurnsStream
from kvplane.v1 import location_pb2 as pb

KEY = m.ConversationKey("t", "m", "c")
Answer = Callable[[pb.TurnsRequest], pb.TurnsResponse | None]


class FakeStream:
    """One stream's client end. `answer` gives what is answered to a message, None for nothing."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.sent: list[pb.TurnsRequest] = []
        self.answers: asyncio.Queue[object] = asyncio.Queue()
        self.cancelled = False

    async def write(self, request: pb.TurnsRequest) -> None:
        self.sent.append(request)
        answer = self.answer(request)
        if answer is not None:
            self.answers.put_nowait(answer)

    async def read(self) -> object:
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        self.cancelled = True

    def break_(self) -> None:
        metadata = grpc.aio.Metadata()
        self.answers.put_nowait(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "gone"))


def numbered(request: pb.TurnsRequest) -> pb.TurnsResponse:
    """Answer every operation as a begun turn whose number is the operation's id."""
    results = [
        pb.TurnsResult(id=operation.id, begin_turn=pb.BeginTurnResponse(turn=operation.id, miss_reason=1))  # type: ignore[arg-type]
        for operation in request.operations
    ]
    return pb.TurnsResponse(results=results)


class Fakes:
    """Opens fake streams, each with the next answer, the last one for good."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.streams: list[FakeStream] = []

    def __call__(self) -> FakeStream:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.streams.append(FakeStream(answer))
        return self.streams[-1]


@pytest.fixture
async def opened() -> AsyncIterator[list[TurnsStream]]:
    """Streams to close at the end."""
    streams = list[TurnsStream]()
    yield streams
    for stream in streams:
        await stream.aclose()


async def test_operations_asked_together_go_in_one_message(opened: list[TurnsStream]) -> None:
    fakes = Fakes(numbered)
    opened.append(turns := TurnsStream(fakes))
    assert not fakes.streams  # nothing is opened before it is needed
    begun = await asyncio.gather(*(turns.begin_turn(KEY, f"r{number}") for number in range(50)))
    assert [turn.turn for turn in begun] == list(range(1, 51))
    (stream,) = fakes.streams
    assert [len(request.operations) for request in stream.sent] == [50]
    assert {turn.miss for turn in begun} == {m.MissReason.UNKNOWN_CONVERSATION}


async def test_touches_and_fingerprints_as_single_calls_have_them(opened: list[TurnsStream]) -> None:
    def answer(request: pb.TurnsRequest) -> pb.TurnsResponse:
        (operation,) = request.operations
        kind = operation.WhichOneof("operation")
        if kind == "touch":
            touched = pb.TouchConversationResponse(noted=True)
            touched.remaining.FromMilliseconds(1500)
            return pb.TurnsResponse(results=[pb.TurnsResult(id=operation.id, touch=touched)])
        if kind == "lookup":
            known = pb.LookupLocationResponse(miss_reason=1)  # type: ignore[arg-type]
            return pb.TurnsResponse(results=[pb.TurnsResult(id=operation.id, lookup=known)])
        begun = pb.BeginTurnResponse(turn=7, miss_reason=1, turn_index=3, last_lease_class=5)  # type: ignore[arg-type]
        begun.key.tenant_id, begun.key.model, begun.key.conversation_id = "t", "m", "auto/1"
        begun.idle.FromMilliseconds(1500)
        return pb.TurnsResponse(results=[pb.TurnsResult(id=operation.id, begin_turn=begun)])

    fakes = Fakes(answer)
    opened.append(turns := TurnsStream(fakes))
    assert await turns.touch_conversation(KEY, 2.5, turn=9) == m.Touched(True, 1.5)
    scope, prompt = m.ConversationKey("t", "m", ""), m.Fingerprint(64, b"x" * 16)
    assert await turns.lookup_location(scope, fingerprint=prompt) is m.MissReason.UNKNOWN_CONVERSATION
    begun = await turns.begin_turn(scope, "r", fingerprint=prompt)
    assert begun.key == m.ConversationKey("t", "m", "auto/1")
    assert (begun.turn_index, begun.idle_s, begun.lease_class) == (3, 1.5, 4)
    touch, lookup, begin = [request.operations[0] for request in fakes.streams[0].sent]
    assert (touch.touch.turn, touch.touch.ttl.ToMilliseconds()) == (9, 2500)
    for fingerprint in (lookup.lookup.fingerprint, begin.begin_turn.fingerprint):
        assert (fingerprint.chunk_tokens, fingerprint.chain) == (64, b"x" * 16)


async def test_a_message_has_at_most_1024_operations(opened: list[TurnsStream]) -> None:
    fakes = Fakes(numbered)
    opened.append(turns := TurnsStream(fakes))
    await asyncio.gather(*(turns.begin_turn(KEY, f"r{number}") for number in range(2500)))
    assert [len(request.operations) for request in fakes.streams[0].sent] == [1024, 1024, 452]


async def test_a_message_has_at_most_some_megabytes(opened: list[TurnsStream]) -> None:
    fakes = Fakes(numbered)
    opened.append(turns := TurnsStream(fakes))
    chain = m.Fingerprint(64, bytes((1 << 20) - 512))
    await asyncio.gather(*(turns.begin_turn(KEY, f"r{n}", fingerprint=chain) for n in range(40)))
    sizes = [request.ByteSize() for request in fakes.streams[0].sent]
    assert len(sizes) == 20
    assert max(sizes) < 4 * 2**20


async def test_a_stream_that_owes_answers_for_long_is_left(opened: list[TurnsStream]) -> None:
    fakes = Fakes(lambda _: None, numbered)
    opened.append(turns := TurnsStream(fakes))
    with pytest.raises(ControlPlaneUnavailableError):
        await turns.begin_turn(KEY, "r1", timeout_s=0.01)  # not silent for long enough to say so
    assert len(fakes.streams) == 1
    assert not fakes.streams[0].cancelled
    asked = asyncio.create_task(turns.begin_turn(KEY, "r2", timeout_s=SILENCE_S + 5))
    with pytest.raises(ControlPlaneUnavailableError):
        await turns.begin_turn(KEY, "r3", timeout_s=SILENCE_S)
    assert (await asked).turn  # on the next stream, with nobody's help
    assert fakes.streams[0].cancelled
    assert len(fakes.streams) == 2


@pytest.mark.parametrize("turns_of_the_loop", range(8))
async def test_a_close_that_meets_a_silent_stream_being_left_ends(
    turns_of_the_loop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplane.client.turns.SILENCE_S", 0.05)
    turns = TurnsStream(Fakes(lambda _: None))
    asked = asyncio.create_task(turns.begin_turn(KEY, "r1", timeout_s=60))
    late = asyncio.create_task(turns.begin_turn(KEY, "r2", timeout_s=0.05))
    with pytest.raises(ControlPlaneUnavailableError):
        await late
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await turns.aclose()
    with pytest.raises(ControlPlaneUnavailableError):
        await asked


async def test_silence_without_anything_owed_is_no_silence(opened: list[TurnsStream]) -> None:
    fakes = Fakes(numbered)
    opened.append(turns := TurnsStream(fakes))
    await turns.begin_turn(KEY, "r1")
    fakes.streams[0].answer = lambda _: None
    with pytest.raises(ControlPlaneUnavailableError):
        await turns.begin_turn(KEY, "r2", timeout_s=0.05)
    assert not fakes.streams[0].cancelled


async def test_what_was_sent_without_answer_is_sent_once_more(opened: list[TurnsStream]) -> None:
    fakes = Fakes(lambda _: None, numbered)
    opened.append(turns := TurnsStream(fakes))
    asked = asyncio.create_task(turns.begin_turn(KEY, "r"))
    await _until(lambda: bool(fakes.streams) and bool(fakes.streams[0].sent))
    fakes.streams[0].break_()
    assert (await asked).turn == 1
    first, second = fakes.streams
    assert first.cancelled
    assert first.sent == second.sent  # the same operation, with its request id


async def test_what_failed_twice_has_failed_and_the_rest_goes_on(opened: list[TurnsStream]) -> None:
    fakes = Fakes(lambda _: None, lambda _: None, numbered)
    opened.append(turns := TurnsStream(fakes, timeout_s=60))
    early = asyncio.create_task(turns.begin_turn(KEY, "early"))
    await _until(lambda: bool(fakes.streams) and bool(fakes.streams[0].sent))
    fakes.streams[0].break_()
    await _until(lambda: len(fakes.streams) == 2 and bool(fakes.streams[1].sent))
    late = asyncio.create_task(turns.begin_turn(KEY, "late"))
    await _until(lambda: len(fakes.streams[1].sent) == 2)
    fakes.streams[1].break_()
    with pytest.raises(ControlPlaneUnavailableError, match="gone"):
        await early
    assert (await late).turn == 2


async def test_a_stream_that_ends_without_error_is_opened_again(opened: list[TurnsStream]) -> None:
    fakes = Fakes(lambda _: None, numbered)
    opened.append(turns := TurnsStream(fakes))
    asked = asyncio.create_task(turns.begin_turn(KEY, "r"))
    await _until(lambda: bool(fakes.streams) and bool(fakes.streams[0].sent))
    fakes.streams[0].answers.put_nowait(grpc.aio.EOF)
    assert (await asked).turn == 1


async def test_no_answer_in_time_is_unavailable_and_a_late_one_harmless(
    opened: list[TurnsStream],
) -> None:
    fakes = Fakes(lambda _: None)
    opened.append(turns := TurnsStream(fakes))
    with pytest.raises(ControlPlaneUnavailableError, match=r"within 0\.01 s"):
        await turns.begin_turn(KEY, "r", timeout_s=0.01)
    stream = fakes.streams[0]
    stream.answers.put_nowait(numbered(stream.sent[0]))
    stream.answer = numbered
    assert (await turns.begin_turn(KEY, "r2")).turn == 2


async def test_a_caller_that_goes_away_leaves_nothing(opened: list[TurnsStream]) -> None:
    fakes = Fakes(lambda _: None, numbered)
    opened.append(turns := TurnsStream(fakes))
    asked = asyncio.create_task(turns.begin_turn(KEY, "r"))
    await _until(lambda: bool(fakes.streams) and bool(fakes.streams[0].sent))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    fakes.streams[0].break_()
    assert (await turns.begin_turn(KEY, "r2")).turn == 2
    assert [operation.id for request in fakes.streams[1].sent for operation in request.operations] == [2]


async def test_closing_fails_what_is_under_way(opened: list[TurnsStream]) -> None:
    fakes = Fakes(lambda _: None)
    opened.append(turns := TurnsStream(fakes))
    asked = asyncio.create_task(turns.begin_turn(KEY, "r"))
    await _until(lambda: bool(fakes.streams) and bool(fakes.streams[0].sent))
    await turns.aclose()
    await turns.aclose()
    with pytest.raises(ControlPlaneUnavailableError, match="closed"):
        await asked
    with pytest.raises(ControlPlaneUnavailableError, match="closed"):
        await turns.begin_turn(KEY, "r2")


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (3, "INVALID_FIELD", InvalidFieldError),
        (7, "NOT_CLAIM_OWNER", NotOwnerError),
        (14, "STORE_UNAVAILABLE", ControlPlaneUnavailableError),
        (99, "", ControlPlaneError),
    ],
)
async def test_an_operation_fails_alone(
    opened: list[TurnsStream], code: int, reason: str, kind: type[ControlPlaneError]
) -> None:
    def answer(request: pb.TurnsRequest) -> pb.TurnsResponse:
        response = numbered(request)
        response.results[0].error.code = code
        response.results[0].error.reason = reason
        response.results[0].error.message = "no"
        return response

    opened.append(turns := TurnsStream(Fakes(answer)))
    bad, good = await asyncio.gather(
        turns.begin_turn(KEY, "r1"), turns.begin_turn(KEY, "r2"), return_exceptions=True
    )
    assert type(bad) is kind
    assert isinstance(good, m.BegunTurn)


async def test_nobody_there_is_unavailable_and_not_asked_all_the_time(opened: list[TurnsStream]) -> None:
    async with ControlPlaneClient("127.0.0.1:9") as client:
        opened.append(turns := TurnsStream(client.open_turns, timeout_s=5))
        with pytest.raises(ControlPlaneUnavailableError):
            await turns.begin_turn(KEY, "r")


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the fakes have no event for it
            await asyncio.sleep(0.001)
