"""Answers of a control plane that knows more, and details that are none: nothing fails, nothing is freed."""

from __future__ import annotations

import grpc
import pytest

from kvplane.client import convert
from kvplane.client import model as m
from kvplane.client.errors import UnknownEngineError, from_rpc_error
from kvplane.v1 import common_pb2


def test_an_announcement_of_an_unknown_outcome_is_withdrawn_before_anything_is_freed() -> None:
    for outcome in (0, 99, -1):
        wire = common_pb2.AnnouncementResult.FromString(b"\x0a\x01q")
        wire.outcome = outcome  # type: ignore[assignment]
        assert convert.announcement_result_from_wire(wire).outcome is m.AnnounceOutcome.REFUSED


@pytest.mark.parametrize("outcome", [0, 99, -1])
def test_blocks_of_an_unknown_release_are_kept(outcome: int) -> None:
    assert convert.release_outcome_from_wire(outcome) is m.ReleaseOutcome.CLAIMED  # type: ignore[arg-type]


@pytest.mark.parametrize("details", [b"\xff", b"\x1a\x05\x0a\x01x\x12\x00", b"\x1a\x02\x0a\xff"])
def test_a_status_with_details_that_are_none_is_still_a_status(details: bytes) -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, details="gone")
    assert str(from_rpc_error(error)) == "gone"


def test_details_before_damaged_ones_count() -> None:
    info = b"\x0a\x28type.googleapis.com/google.rpc.ErrorInfo\x12\x10\x0a\x0eUNKNOWN_ENGINE"
    damaged = b"\x0a\x28type.googleapis.com/google.rpc.ErrorInfo\x12\x01\xff"
    raw = b"".join(b"\x1a" + bytes((len(detail),)) + detail for detail in (info, damaged))
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", raw))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing)
    assert isinstance(from_rpc_error(error), UnknownEngineError)
