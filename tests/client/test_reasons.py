"""Reasons that only a newer control plane knows: a miss stays a miss, an order an order."""

from __future__ import annotations

import pytest

from kvplane.client import convert
from kvplane.client.model import MissReason, ReleaseReason
from kvplane.v1 import common_pb2, engine_pb2, location_pb2

NEWER = 60


def test_an_unheard_of_reason_is_one_all_the_same() -> None:
    miss = location_pb2.LookupLocationResponse.FromString(bytes([2 << 3, NEWER]))
    assert miss.miss_reason == NEWER
    assert convert.miss_from_wire(miss.miss_reason) is MissReason.UNKNOWN_CONVERSATION
    order = engine_pb2.ReleaseOrder.FromString(bytes([2 << 3, NEWER]))
    assert convert.release_reason_from_wire(order.reason) is ReleaseReason.REFUSED


@pytest.mark.parametrize("reason", list(MissReason))
def test_each_miss_reason_comes_through(reason: MissReason) -> None:
    wire = location_pb2.LookupLocationResponse()
    wire.miss_reason = common_pb2.MissReason.Value(f"MISS_REASON_{reason.name}")  # type: ignore[assignment]
    assert convert.miss_from_wire(wire.miss_reason) is reason


@pytest.mark.parametrize("reason", list(ReleaseReason))
def test_each_release_reason_comes_through(reason: ReleaseReason) -> None:
    wire = engine_pb2.ReleaseOrder()
    wire.reason = engine_pb2.ReleaseReason.Value(f"RELEASE_REASON_{reason.name}")  # type: ignore[assignment]
    assert convert.release_reason_from_wire(wire.reason) is reason
