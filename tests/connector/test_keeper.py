from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import structlog

from kvplane.client import events as ev
from kvplane.client.model import (
    Announcement,
    AnnouncementResult,
    AnnounceOutcome,
    ConversationKey,
    EngineLoad,
    Registration,
    ReleaseOutcome,
    ReleaseReason,
    RequestId,
)
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.envelope import Envelope
from kvplane.connector.fingerprint import Context, make_chain
from kvplane.connector.keeper import FinishedTurn, Keeper
from kvplane.connector.retention import Retention, State

CONTEXT = Context("m")


class FakeSession:
    """Records what it is told; `known` are the requests the control plane was told of."""

    def __init__(self) -> None:
        self.attached = True
        self.last_contact: float | None = 1000.0
        self.registration: Registration | None = Registration(1, 10, 480, 30)
        self.announced: list[tuple[Announcement, float]] = []
        self.withdrawn: list[str] = []
        self.freed_requests: list[str] = []
        self.loads: list[EngineLoad] = []
        self.incarnations = 0
        self.events: list[ev.Event] = []
        self.unsent: set[str] = set()

    def announce(self, announcement: Announcement, *, expires_at: float) -> None:
        self.announced.append((announcement, expires_at))

    def withdraw(self, request_id: RequestId) -> bool:
        self.withdrawn.append(request_id)
        return request_id not in self.unsent

    def freed(self, request_id: RequestId) -> None:
        self.freed_requests.append(request_id)

    def set_load(self, load: EngineLoad) -> None:
        self.loads.append(load)

    def start_incarnation(self) -> None:
        self.incarnations += 1

    def drain_events(self) -> list[ev.Event]:
        events, self.events = self.events, []
        return events


class Rig:
    def __init__(self) -> None:
        self.now = 1000.0
        self.session = FakeSession()
        self.retention = Retention(100, monotonic=self.clock)
        config = ConnectorConfig("plane:1", endpoint="http://own:8200", chunk_tokens=16)
        self.keeper = Keeper(config, self.session, self.retention, monotonic=self.clock)

    def clock(self) -> float:
        return self.now

    def step(self, *events: ev.Event, free: int = 100) -> list[str]:
        self.session.events += events
        self.session.last_contact = self.now
        return self.keeper.step(free)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def turn(name: str, first_block: int = 0, count: int = 10, **changes: Any) -> FinishedTurn:
    made = FinishedTurn(
        request_id=name,
        envelope=Envelope(ConversationKey("t", "m", f"conversation {name}"), 3, "http://router:8200"),
        context=CONTEXT,
        tokens=list(range(100)),
        items=(),
        blocks=list(range(first_block, first_block + count)),
        params={"remote_block_ids": [[1, 2]], "remote_port": 5601, "remote_blocks_expiry_time": 1.5},
        expires_at=1480.0,
    )
    return replace(made, **changes)


def test_a_finished_turn_is_retained_and_announced(rig: Rig) -> None:
    assert rig.keeper.finish(turn("a"))
    ((announcement, expires_at),) = rig.session.announced
    assert expires_at == 1480.0
    assert announcement.key == ConversationKey("t", "m", "conversation a")
    assert (announcement.turn, announcement.token_count, announcement.block_count) == (3, 100, 10)
    assert json.loads(announcement.kv_transfer_params) == turn("a").params
    assert announcement.fingerprint.chunk_tokens == 16
    assert announcement.fingerprint.chain == make_chain(CONTEXT, range(100), 16)
    assert announcement.endpoint == "http://router:8200"
    assert rig.keeper.retention.state("a") is State.RETAINED


def test_the_own_endpoint_stands_in(rig: Rig) -> None:
    rig.keeper.finish(turn("a", envelope=Envelope(ConversationKey("t", "m", "c"), 1)))
    assert rig.session.announced[0][0].endpoint == "http://own:8200"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": None}, "no_fingerprint"),
        ({"tokens": []}, "no_tokens"),
        ({"blocks": []}, "no_blocks"),
        ({"blocks": list(range(51))}, "larger_than_budget"),
        ({"tokens": [2**31]}, "too_large"),
        ({"params": {"remote_block_ids": "x" * (1 << 20)}}, "too_large"),
    ],
)
def test_what_cannot_be_announced_is_not_retained(rig: Rig, changes: dict[str, Any], reason: str) -> None:
    assert not rig.keeper.finish(turn("a", **changes))
    assert rig.keeper.counts == {f"not_retained:{reason}": 1}
    assert rig.session.announced == []
    assert len(rig.retention) == 0


def test_without_a_control_plane_nothing_is_retained(rig: Rig) -> None:
    rig.session.attached = False
    rig.now += 10
    assert rig.keeper.finish(turn("a"))  # it may be a short loss
    rig.now += 0.1
    assert not rig.keeper.finish(turn("b"))
    rig.session.last_contact = None
    assert not rig.keeper.finish(turn("c"))
    assert rig.keeper.counts["not_retained:no_control_plane"] == 2


def test_over_budget_the_oldest_is_withdrawn_and_freed_once_agreed(rig: Rig) -> None:
    for number in range(6):
        rig.keeper.finish(turn(f"r{number}", number * 10))
    assert rig.step() == []
    assert rig.session.withdrawn == ["r0"]
    assert rig.step(ev.Withdrawn(RequestId("r0"), ReleaseOutcome.RELEASED)) == ["r0"]
    rig.keeper.freed(["r0", "not ours"])
    assert rig.session.freed_requests == ["r0"]


def test_what_nobody_knows_of_is_freed_at_once(rig: Rig) -> None:
    for number in range(6):
        rig.keeper.finish(turn(f"r{number}", number * 10))
    rig.session.unsent.add("r0")
    assert rig.step() == ["r0"]


def test_a_claimed_one_is_kept(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.keeper.reset()
    rig.step()
    assert rig.step(ev.Withdrawn(RequestId("a"), ReleaseOutcome.CLAIMED)) == []
    assert rig.retention.state("a") is State.CLAIMED
    assert rig.step(ev.Ordered(RequestId("a"), ReleaseReason.CLAIM_FINISHED)) == ["a"]


def test_orders_are_obeyed(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    assert rig.step(ev.Ordered(RequestId("a"), ReleaseReason.SUPERSEDED)) == ["a"]
    assert rig.step(ev.Ordered(RequestId("unknown"), ReleaseReason.SUPERSEDED)) == []


def test_dropped_announcements_free_their_blocks(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    assert rig.step(ev.Dropped(RequestId("a"), "queue_full")) == ["a"]


@pytest.mark.parametrize(
    ("outcome", "withdrawn", "state"),
    [
        (AnnounceOutcome.ACCEPTED, [], State.RETAINED),
        (AnnounceOutcome.SUPERSEDED, [], State.RETAINED),  # an order follows
        (AnnounceOutcome.REFUSED, ["a"], State.WITHDRAWING),
        (AnnounceOutcome.CLAIMED, [], State.CLAIMED),
    ],
)
def test_answers_to_announcements(
    rig: Rig, outcome: AnnounceOutcome, withdrawn: list[str], state: State
) -> None:
    rig.keeper.finish(turn("a"))
    rig.step(ev.Announced(AnnouncementResult(RequestId("a"), outcome, 475, "why")))
    assert rig.session.withdrawn == withdrawn
    assert rig.retention.state("a") is state


def test_pressure_withdraws(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.keeper.finish(turn("b", 10))
    rig.step(free=9)
    assert rig.session.withdrawn == ["a"]
    rig.keeper.step(5, wanted_blocks=40, spare=turn("b").envelope)
    assert rig.session.withdrawn == ["a", "b"]
    rig.keeper.step(None)  # the pool is not known


def test_a_new_incarnation_is_careful(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.step(ev.Registered(Registration(1, 10, 480, 30), first=True))
    rig.step(ev.Registered(Registration(2, 12, 480, 40), first=False))
    assert rig.retention.claim_timeout_s == 40
    assert rig.retention.lease_ttl_s == 12
    assert rig.step(ev.Ordered(RequestId("a"), ReleaseReason.SUPERSEDED)) == []
    rig.now += 40.1
    assert rig.step() == ["a"]


def test_a_draining_engine_retains_nothing_new(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.step(ev.DrainRequested(True))
    assert not rig.keeper.finish(turn("b", 20))
    assert rig.session.withdrawn == ["a"]
    rig.step(ev.DrainRequested(False))
    assert rig.keeper.finish(turn("c", 30))


def test_a_fenced_engine_frees_everything_once_no_reader_can_be_left(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    assert rig.step(ev.Fenced()) == []
    assert not rig.keeper.finish(turn("b", 20))
    rig.now += 30.1
    assert rig.step() == ["a"]


def test_reset_asks_everything_back_and_begins_anew(rig: Rig) -> None:
    assert rig.keeper.reset() is True
    rig.keeper.finish(turn("a"))
    assert rig.keeper.reset() is False
    assert rig.session.incarnations == 2
    rig.step()
    assert rig.session.withdrawn == ["a"]


def test_load_tells_what_is_retained(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.keeper.report_load(running=1, waiting=2, free_blocks=30)
    assert rig.session.loads == [EngineLoad(1, 2, 30, 10, 1)]


def test_counts_are_logged_once_a_minute_if_they_changed(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    with structlog.testing.capture_logs() as logs:
        for _ in range(130):
            rig.step()
            rig.now += 1
    assert [entry["event"] for entry in logs] == ["retention_summary"]
    assert "conversation" not in str(logs)
