"""Several tenants on one engine: each turn counts for the tenant in its envelope."""

from __future__ import annotations

from kvplane.client import events as ev
from kvplane.client.model import ConversationKey, ReleaseReason, RequestId
from kvplane.connector.envelope import Envelope
from kvplane.connector.keeper import FinishedTurn
from tests.connector.test_keeper import Rig, turn


def of(tenant_id: str, name: str, first_block: int, count: int = 10) -> FinishedTurn:
    key = ConversationKey(tenant_id, "m", name)
    return turn(name, first_block, count, envelope=Envelope(key, 3, "http://router:8200"))


def test_the_tenant_of_the_envelope_pays() -> None:
    rig = Rig()
    rig.keeper.finish(of("quiet", "q", 0))
    for number in range(1, 5):
        rig.keeper.finish(of("noisy", f"n{number}", 10 * number))
    rig.keeper.finish(of("noisy", "n5", 60))
    rig.step()
    assert rig.session.withdrawn == ["n1"]
    rig.step(free=0)  # below the floor
    assert "q" not in rig.session.withdrawn


def test_weights_are_those_of_the_configuration() -> None:
    rig = Rig(tenant_weights={"gold": 4.0})
    assert rig.retention.shares.weights == {"gold": 4.0}
    rig.keeper.finish(of("gold", "g", 0, 40))
    rig.keeper.finish(of("plain", "p1", 40))
    rig.keeper.finish(of("plain", "p2", 50))
    rig.step()
    assert len(rig.session.withdrawn) == 1
    assert rig.session.withdrawn[0].startswith("p")


def test_who_is_within_its_share_is_renewed_under_anothers_pressure() -> None:
    rig = Rig(max_ttl_s=60.0, min_ttl_s=20.0)
    rig.keeper.finish(of("quiet", "q", 0))
    for number in range(1, 6):
        rig.keeper.finish(of("noisy", f"n{number}", 10 * number))
    rig.step()
    assert rig.session.withdrawn == ["n1"]
    rig.step(ev.RenewalOrdered(RequestId("q"), 300.0), ev.RenewalOrdered(RequestId("n5"), 300.0))
    rig.step()
    assert [name for name, _ in rig.session.renewals] == ["q"]
    assert rig.keeper.counts["not_renewed:pressure"] == 1


def test_an_order_for_the_quota_is_carried_out_and_counted() -> None:
    rig = Rig()
    rig.keeper.finish(of("t", "q", 0))
    assert rig.step(ev.Ordered(RequestId("q"), ReleaseReason.QUOTA)) == ["q"]
    assert rig.keeper.counts["ordered:quota"] == 1


def test_a_tenant_with_more_than_its_share_waits_until_what_it_gave_up_is_free() -> None:
    rig = Rig()
    rig.keeper.finish(of("quiet", "q", 0))
    for number in range(1, 10):
        rig.keeper.finish(of("noisy", f"n{number}", 10 * number))
    assert rig.keeper.counts["not_retained:over_share"] > 0
    assert rig.keeper.finish(of("quiet", "more", 100)) is not None
