"""A bench that measured wrong answers says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvplane.bench.engine import check_accepted
from kvplane.bench.operations import Work, check, work
from kvplane.bench.payload import Conversations, conversations
from kvplane.bench.rig import BenchError
from kvplane.v1 import common_pb2, engine_pb2, location_pb2

MADE = conversations("checked", 4)


def location(made: Conversations, number: int) -> common_pb2.Location:
    announced = made.announcement(number)
    return common_pb2.Location(
        key=announced.key,
        request_id=announced.request_id,
        turn=announced.turn,
        kv_transfer_params=announced.kv_transfer_params,
    )


def answered(made: Conversations = MADE) -> Work:
    """One conversation, begun and claimed, answered as it should be."""
    todo = work([(made, 0)], "begin_turn", "claim")
    begun = location_pb2.BeginTurnResponse(turn=made.turn + 1, location=location(made, 0))
    claimed = location_pb2.ClaimLocationResponse(
        claim=location_pb2.Claim(claim_id=made.claim_id(0), location=location(made, 0))
    )
    results = [
        location_pb2.TurnsResult(id=0, begin_turn=begun),
        location_pb2.TurnsResult(id=1, claim=claimed),
    ]
    todo.answers = [location_pb2.TurnsResponse(results=results).SerializeToString()]
    return todo


def test_right_answers_pass() -> None:
    check(answered())


def _other_turn(answer: location_pb2.TurnsResponse) -> None:
    answer.results[1].claim.claim.location.turn += 1


def _other_conversation(answer: location_pb2.TurnsResponse) -> None:
    answer.results[1].claim.claim.location.key.conversation_id += "x"


def _other_claim(answer: location_pb2.TurnsResponse) -> None:
    answer.results[1].claim.claim.claim_id += "x"


def _other_params(answer: location_pb2.TurnsResponse) -> None:
    answer.results[1].claim.claim.location.kv_transfer_params = b"{}"


def _a_miss(answer: location_pb2.TurnsResponse) -> None:
    answer.results[0].begin_turn.ClearField("location")


def _an_old_turn(answer: location_pb2.TurnsResponse) -> None:
    answer.results[0].begin_turn.turn = MADE.turn


def _an_error(answer: location_pb2.TurnsResponse) -> None:
    answer.results[0].error.code = 14


def _twice(answer: location_pb2.TurnsResponse) -> None:
    answer.results[1].CopyFrom(answer.results[0])


def _never(answer: location_pb2.TurnsResponse) -> None:
    del answer.results[1]


@pytest.mark.parametrize(
    "spoil",
    [
        _other_turn,
        _other_conversation,
        _other_claim,
        _other_params,
        _a_miss,
        _an_old_turn,
        _an_error,
        _twice,
        _never,
    ],
)
def test_wrong_answers_are_an_error(spoil: Callable[[location_pb2.TurnsResponse], None]) -> None:
    todo = answered()
    answer = location_pb2.TurnsResponse.FromString(todo.answers[0])
    spoil(answer)
    todo.answers = [answer.SerializeToString()]
    with pytest.raises(BenchError):
        check(todo)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((common_pb2.ANNOUNCE_OUTCOME_ACCEPTED,), 2),
        ((common_pb2.ANNOUNCE_OUTCOME_ACCEPTED, common_pb2.ANNOUNCE_OUTCOME_SUPERSEDED), 2),
        ((common_pb2.ANNOUNCE_OUTCOME_ACCEPTED, common_pb2.ANNOUNCE_OUTCOME_REFUSED), 1),
    ],
)
def test_announcements_have_to_be_accepted(
    outcomes: tuple[common_pb2.AnnounceOutcome, ...], expected: int
) -> None:
    results = [common_pb2.AnnouncementResult(outcome=outcome) for outcome in outcomes]
    ack = engine_pb2.AttachEngineResponse(announcements=results).SerializeToString()
    with pytest.raises(BenchError):
        check_accepted([ack], expected)


def test_messages_are_as_large_as_vllms() -> None:
    """500 blocks: 8 bytes per 64 tokens, and a list of ids in JSON without spaces."""
    announced = conversations("sized", 500).announcement(0)
    assert (announced.token_count, announced.block_count) == (8000, 500)
    assert len(announced.fingerprint.chain) == 1000
    assert b'"remote_block_ids":[[' in announced.kv_transfer_params
    assert 2500 < len(announced.kv_transfer_params) < 3500
