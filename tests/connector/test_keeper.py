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
from kvplane.connector.leases import Terms
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
        self.renewals: list[tuple[str, float]] = []
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

    def renew(self, request_id: RequestId, *, expires_at: float) -> bool:
        self.renewals.append((request_id, expires_at))
        return request_id not in self.withdrawn

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
    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.session = FakeSession()
        self.retention = Retention(100, monotonic=self.clock)
        config = ConnectorConfig("plane:1", endpoint="http://own:8200", chunk_tokens=16, **settings)
        self.keeper = Keeper(config, self.session, self.retention, monotonic=self.clock)

    def clock(self) -> float:
        return self.now

    def begin_step(self, *events: ev.Event, free: int = 100) -> dict[str, float]:
        self.session.events += events
        self.session.last_contact = self.now
        return self.keeper.step(free)

    def step(self, *events: ev.Event, free: int = 100) -> list[str]:
        """A whole step; returns what it frees."""
        deadlines = self.begin_step(*events, free=free)
        self.keeper.step_done()
        return [request_id for request_id, at in deadlines.items() if at <= self.now]


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
        prompt_tokens=90,
    )
    return replace(made, **changes)


def test_a_finished_turn_is_retained_and_announced(rig: Rig) -> None:
    made = turn("a")
    terms = rig.keeper.finish(made)
    ((announcement, expires_at),) = rig.session.announced
    assert expires_at == 1480 + 15, "idle for 480 s, then there are 10 s for a claim, and 5 s for the message"
    assert terms is not None
    assert terms.blocks == expires_at + rig.retention.claim_timeout_s + 10, "after the last reader"
    assert announcement.key == ConversationKey("t", "m", "conversation a")
    assert (announcement.turn, announcement.token_count, announcement.block_count) == (3, 100, 10)
    assert json.loads(announcement.kv_transfer_params) == made.params
    assert made.params["remote_blocks_expiry_time"] == terms.blocks - 480 + 3600, (
        "were it renewed all the time"
    )
    assert announcement.lease_class is not None
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
        ({"request_id": "r" * 257}, "request_id"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"blocks": []}, "no_blocks"),
        ({"blocks": list(range(51))}, "larger_than_budget"),
        ({"tokens": [2**31]}, "too_large"),
        ({"params": {"remote_block_ids": "x" * (1 << 20)}}, "too_large"),
    ],
)
def test_what_cannot_be_announced_is_not_retained(rig: Rig, changes: dict[str, Any], reason: str) -> None:
    assert not rig.keeper.finish(replace(turn("a"), **changes))
    assert rig.keeper.counts == {f"not_retained:{reason}": 1}
    assert rig.session.announced == []
    assert len(rig.retention) == 0


def test_without_a_control_plane_nothing_is_retained(rig: Rig) -> None:
    rig.session.attached = False
    rig.now += 10
    assert rig.keeper.finish(turn("a")) is not None  # it may be a short loss
    rig.now += 0.1
    assert not rig.keeper.finish(turn("b"))
    rig.session.last_contact = None
    assert not rig.keeper.finish(turn("c"))
    assert rig.keeper.counts["not_retained:no_control_plane"] == 2


def test_without_a_control_plane_nothing_is_retained_that_may_be_wanted_back(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.step(free=9)
    rig.session.attached = False
    assert rig.keeper.finish(turn("b", 20)) is None
    rig.now += 2
    assert rig.keeper.finish(turn("c", 20)) is not None


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
    assert rig.keeper.finish(turn("c", 30)) is not None


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
    assert rig.session.withdrawn == ["a"]  # before the incarnation begins, and before any step
    assert rig.session.incarnations == 2


def test_waiting_for_retained_blocks_is_measured(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    for seconds, free, wanted in (
        (0.01, 5, 16),
        (0.02, 5, 15),
        (0.03, 5, 12),
        (0.5, 40, 0),
        (0.01, 3, 4),
        (0, 13, 4),
    ):
        rig.keeper.step(free, wanted_blocks=wanted)
        rig.now += seconds
    assert rig.keeper.counts["waited"] == 2
    assert rig.keeper.counts["waited_ms"] == 60  # 16 would not be there without retention either
    assert rig.keeper.counts["waited_ms_most"] == 50


def order(ttl_s: float, name: str = "a") -> ev.RenewalOrdered:
    return ev.RenewalOrdered(RequestId(name), ttl_s)


@pytest.fixture
def short() -> Rig:
    return Rig(ttl_s=30.0, max_age_s=100.0, max_ttl_s=60.0)


def test_a_turn_nobody_comes_back_to_is_asked_back(short: Rig) -> None:
    short.keeper.finish(turn("a"))
    short.now += 29.9
    short.step()
    assert short.session.withdrawn == []
    short.now += 0.1
    assert short.step() == []  # not before it is agreed
    assert short.session.withdrawn == ["a"]
    assert short.step(ev.Withdrawn(RequestId("a"), ReleaseOutcome.RELEASED)) == ["a"]
    assert short.keeper.counts["idle"] == 1


def test_a_renewal_reaches_the_worker_before_the_record(short: Rig) -> None:
    assert short.keeper.finish(turn("a")) == Terms(1030, 1045, 1085)
    short.begin_step()  # is still under way
    short.now += 20
    assert short.begin_step(order(40)) == {"a": 1060 + 15 + 40}
    short.keeper.step_done()
    assert short.session.renewals == []
    short.keeper.step_done()
    assert short.session.renewals == [("a", 1075.0)]
    assert short.keeper.counts["renewed"] == 1
    short.now = 1059.9
    short.step()
    assert short.session.withdrawn == []
    short.now = 1060
    short.step()
    assert short.session.withdrawn == ["a"]


def test_freed_under_way_a_renewal_comes_too_late(short: Rig) -> None:
    short.keeper.finish(turn("a"))
    short.begin_step(order(60))
    short.keeper.freed(["a"])
    short.keeper.step_done()
    assert short.session.renewals == []


def test_renewed_up_to_the_maximum_age(short: Rig) -> None:
    short.keeper.finish(turn("a"))
    for _ in range(9):
        short.now += 10
        short.step(order(1000))
    assert short.session.renewals[-1] == ("a", 1115.0)
    assert short.keeper.counts["not_renewed:long_enough"] == 8
    short.now = 1100
    short.step(order(1000))
    assert short.session.withdrawn == ["a"]


def test_what_is_not_to_stay_is_not_renewed(short: Rig) -> None:
    for name, first_block in (("a", 0), ("b", 20)):
        short.keeper.finish(turn(name, first_block))
    short.now += 30
    short.step()
    short.step(order(60, "a"), order(60, "unknown"))
    short.step(ev.Withdrawn(RequestId("b"), ReleaseOutcome.CLAIMED), order(60, "b"))
    assert short.session.renewals == []
    assert short.session.withdrawn == ["a", "b"]


def test_under_pressure_nothing_is_renewed(short: Rig) -> None:
    short.keeper.finish(turn("a"))
    short.keeper.finish(turn("b", 20))
    short.step(free=9)
    assert short.session.withdrawn == ["a"]
    short.step(order(60, "b"))
    assert short.keeper.counts["not_renewed:pressure"] == 1
    short.now += 2
    short.step(order(60, "b"))
    assert [name for name, _ in short.session.renewals] == ["b"]


def test_a_turn_whose_next_is_here_stays_up_to_the_maximum_age(short: Rig) -> None:
    made = turn("a")
    short.keeper.finish(made)
    short.keeper.arrive("next", made.envelope)
    short.keeper.arrive("next", made.envelope)
    for _ in range(99):
        short.now += 1
        short.step()
    assert short.session.withdrawn == []
    short.now += 1
    short.step()
    assert short.session.withdrawn == ["a"]
    short.keeper.finish(turn("b", 20, envelope=made.envelope))
    short.keeper.leave("next")
    short.keeper.leave("next")
    short.now += 30
    short.step()
    assert short.session.withdrawn == ["a", "b"]


def test_after_a_claim_timed_out_a_late_reader_is_given_time(rig: Rig) -> None:
    rig.keeper.finish(turn("a"))
    rig.step(ev.Registered(Registration(1, 10, 480, 40), first=True))
    assert rig.step(ev.Ordered(RequestId("a"), ReleaseReason.CLAIM_TIMEOUT)) == []
    rig.now += 40.1
    assert rig.step() == ["a"]


def test_leases_are_learned_from_returns(rig: Rig) -> None:
    """One conversation in five goes on, after 10 to 15 s: leases end soon after, worth falls with time."""
    key = ConversationKey("t", "m", "c")
    ends = list[float]()
    for number in range(1500):
        name = f"r{number}"
        rig.keeper.finish(turn(name, envelope=Envelope(key, 1 + number)))
        announcement, expires_at = rig.session.announced[-1]
        ends.append(expires_at - 15 - rig.now)
        rig.now += 10 + number % 5
        if number % 5 == 0:
            back = Envelope(key, 2 + number, idle_s=10 + number % 5, lease_class=announcement.lease_class)
            rig.keeper.arrive("next", back)
            rig.keeper.leave("next")
        rig.step(ev.Ordered(RequestId(name), ReleaseReason.SUPERSEDED))
        rig.keeper.freed([name])
    assert ends[0] == 480, "nothing is known yet"
    recent = sorted(ends[-100:])
    assert recent[50] < 60
    rig.keeper.finish(turn("last"))
    soon = rig.keeper._worth("last", 10)
    rig.now += 100
    assert soon > 5 * rig.keeper._worth("last", 10)


def test_each_return_is_learned_once(rig: Rig) -> None:
    made = Envelope(ConversationKey("t", "m", "c"), 2, idle_s=5.0, lease_class=7)
    told = list[tuple[str, int, float]]()
    rig.keeper.returns.returned = lambda *back: told.append(back)  # type: ignore[method-assign]
    rig.keeper.arrive("a", made)
    rig.keeper.arrive("a", made)
    rig.keeper.arrive("b", replace(made, idle_s=None))
    rig.keeper.arrive("c", replace(made, lease_class=None))
    assert told == [("t", 7, 5.0)]


@pytest.mark.parametrize(
    ("reason", "read"), [(ReleaseReason.SUPERSEDED, True), (ReleaseReason.CONVERSATION_ENDED, False)]
)
def test_how_turns_ended_is_learned_once(rig: Rig, reason: ReleaseReason, read: bool) -> None:
    told = list[tuple[float, bool]]()
    rig.keeper.returns.ended = (  # type: ignore[method-assign]
        lambda tenant_id, lease_class, lived_s, *, read: told.append((lived_s, read))
    )
    rig.keeper.finish(turn("a"))
    rig.now += 7
    rig.step(ev.Ordered(RequestId("a"), reason))
    rig.keeper.freed(["a"])
    assert told == [(7.0, read)]
    rig.keeper.finish(turn("b"))
    rig.now += 3
    rig.keeper.freed(["b"])  # a reader said so, before anybody else did
    terms = rig.keeper.finish(turn("c"))
    assert terms is not None
    rig.now = terms.blocks
    rig.keeper.freed(["c"])  # by the worker itself
    assert [ended for _, ended in told] == [read, True, False]


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
