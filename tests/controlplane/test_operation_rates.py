"""Operations per second of a tenant: a bucket each, which nobody else empties."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvplane.client import model as cm
from kvplane.client.errors import LimitExceededError
from kvplane.client.turns import TurnsStream
from kvplane.controlplane import rates as rates_module
from kvplane.controlplane.errors import QuotaExceededError, status_of
from kvplane.controlplane.quotas import Limits, TenantLimits
from kvplane.controlplane.rates import OperationRates
from kvplane.store.testing import ManualClock
from tests.controlplane.wire import Wire


class Rates:
    def __init__(self, **of: float) -> None:
        self.clock = ManualClock()
        self.of = of
        self.rates = OperationRates(self.of.get, self.clock.monotonic)

    def taken(self, tenant_id: str, tries: int) -> int:
        """How many of so many tries succeed."""
        done = 0
        for _ in range(tries):
            try:
                self.rates.take(tenant_id)
                done += 1
            except QuotaExceededError:
                pass
        return done


async def test_a_burst_and_then_the_rate() -> None:
    rig = Rates(t=10.0)
    assert rig.taken("t", 100) == 10
    await rig.clock.advance(0.5)
    assert rig.taken("t", 100) == 5
    await rig.clock.advance(100)
    assert rig.taken("t", 100) == 10
    assert rig.rates.refused == 275


async def test_a_rate_below_one_lets_one_through_at_a_time() -> None:
    rig = Rates(t=0.1)
    assert rig.taken("t", 5) == 1
    await rig.clock.advance(9.9)
    assert rig.taken("t", 5) == 0
    await rig.clock.advance(0.2)
    assert rig.taken("t", 5) == 1


async def test_others_have_their_own_and_who_has_no_limit_has_none() -> None:
    rig = Rates(noisy=5.0, quiet=5.0)
    assert rig.taken("noisy", 1000) == 5
    assert rig.taken("quiet", 5) == 5
    assert rig.taken("free", 1000) == 1000
    rig.of["noisy"] = 1000.0
    await rig.clock.advance(1.0)
    assert rig.taken("noisy", 2000) == 1000


async def test_invented_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "_MOST_KNOWN", 10)
    clock = ManualClock()
    rates = OperationRates(lambda tenant_id: 2.0, clock.monotonic)
    for number in range(200):
        rates.take(f"t{number}")
        await clock.advance(0.1)
    assert len(rates._buckets) <= 20


def test_a_refusal_says_when_to_come_again() -> None:
    code, _, reason, details = status_of(QuotaExceededError(0.0301), "r")
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_pb2.Status.FromString(details).details)
    assert retry.retry_delay.ToMilliseconds() == 31


async def test_every_operation_of_a_router_counts_and_a_release_never_does() -> None:
    wire = Wire(limits=TenantLimits(Limits(operations_per_s=4.0)))
    await wire.start()
    key = cm.ConversationKey("t", "m", "c")
    stream = TurnsStream(wire.client.open_turns)
    try:
        await wire.client.begin_turn(key, "b1")
        await wire.client.lookup_location(key)
        await wire.client.claim_location(key, "claim", "r", wait_s=0.0)
        await wire.client.touch_conversation(key, 10.0)
        for ask in (
            lambda: wire.client.begin_turn(key, "b2"),
            lambda: wire.client.lookup_location(key),
            lambda: wire.client.claim_location(key, "claim2", "r", wait_s=0.0),
            lambda: wire.client.touch_conversation(key, 10.0),
            lambda: stream.begin_turn(key, "b3"),
        ):
            with pytest.raises(LimitExceededError) as raised:
                await ask()
            assert raised.value.reason == "QUOTA_EXCEEDED"
        for _ in range(10):
            await wire.client.end_conversation(key)
        await wire.client.begin_turn(cm.ConversationKey("other", "m", "c"), "b4")
        await wire.clock.advance(1.0)
        await wire.client.begin_turn(key, "b5")
    finally:
        await stream.aclose()
        await wire.stop()
