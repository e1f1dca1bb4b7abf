"""Events that wait: what an engine must hear is kept, and an engine that does not look loses no memory."""

from __future__ import annotations

from kvplane.client import events as ev
from kvplane.client.event_queue import EventQueue
from kvplane.client.model import (
    AnnouncementResult,
    AnnounceOutcome,
    Registration,
    ReleaseOutcome,
    ReleaseReason,
    RequestId,
)

Q = RequestId("q")


def announced(request_id: str, outcome: AnnounceOutcome, granted_ttl_s: float = 0.0) -> ev.Announced:
    return ev.Announced(AnnouncementResult(RequestId(request_id), outcome, granted_ttl_s, ""))


def registered(engine_epoch: int) -> ev.Registered:
    return ev.Registered(Registration(engine_epoch, 10.0, 480.0, 30.0), engine_epoch == 1)


def collected(*events: ev.Event) -> list[ev.Event]:
    queue = EventQueue()
    for event in events:
        queue.push(event)
    assert len(queue) <= len(events)
    drained = queue.drain()
    assert len(queue) == 0
    assert queue.drain() == []
    return drained


def test_reconnects_add_nothing_for_what_is_announced_again() -> None:
    queue = EventQueue()
    for engine_epoch in range(1, 20):
        queue.push(registered(engine_epoch))
        for number in range(50):
            queue.push(announced(f"q{number}", AnnounceOutcome.ACCEPTED, granted_ttl_s=500 - engine_epoch))
            queue.push(ev.Renewed(RequestId(f"q{number}"), True))
            queue.push(ev.RenewalOrdered(RequestId(f"q{number}"), engine_epoch))
        queue.push(ev.DrainRequested(bool(engine_epoch % 2)))
        assert len(queue) == 1 + 3 * 50 + 1
    events = queue.drain()
    assert events[0] == registered(19)
    assert announced("q7", AnnounceOutcome.ACCEPTED, granted_ttl_s=481) in events
    assert ev.RenewalOrdered(RequestId("q7"), 19) in events
    assert events[-1] == ev.DrainRequested(True)


def test_different_things_said_of_a_request_are_all_kept_in_the_order_they_were_said_last() -> None:
    refused = announced("q", AnnounceOutcome.REFUSED)
    claimed = announced("q", AnnounceOutcome.CLAIMED)
    accepted = announced("q", AnnounceOutcome.ACCEPTED)
    ordered = ev.Ordered(Q, ReleaseReason.SUPERSEDED)
    other, withdrawn = announced("r", AnnounceOutcome.ACCEPTED), ev.Withdrawn(Q, ReleaseOutcome.CLAIMED)
    dropped = ev.Dropped(Q, "expired")
    said: list[ev.Event] = [refused, claimed, accepted, other, withdrawn, refused, dropped, ordered]
    assert collected(*said) == said[1:]


def test_every_release_order_is_heard() -> None:
    orders = [ev.Ordered(RequestId(f"q{number}"), ReleaseReason.EXPIRED) for number in range(500)]
    drops = [ev.Dropped(RequestId(f"r{number}"), "queue_full") for number in range(500)]
    assert collected(*orders, *drops) == [*orders, *drops]


def test_what_followed_a_registration_follows_the_one_that_took_its_place() -> None:
    """Or blocks would be free to go before it is known that readers of before may be on their way."""
    withdrawn = ev.Withdrawn(Q, ReleaseOutcome.NOTHING)
    before = announced("q", AnnounceOutcome.CLAIMED)
    events = collected(before, registered(2), withdrawn, registered(3))
    assert events == [before, registered(3), withdrawn]


def test_the_first_registration_is_not_the_first_any_more_once_another_took_its_place() -> None:
    assert collected(registered(1)) == [ev.Registered(Registration(1, 10.0, 480.0, 30.0), True)]
    assert collected(registered(1), registered(2)) == [
        ev.Registered(Registration(2, 10.0, 480.0, 30.0), False)
    ]
