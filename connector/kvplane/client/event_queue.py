"""Events that wait for the engine to look at them, which it may not do for hours."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from kvplane.client import events as ev


class EventQueue:
    """Collects events on any thread, for one that takes them. Bounded by what the engine holds.

    An event that says what an earlier one said of the same request takes its place: after each reconnect
    everything held is announced again, and a plane that comes and goes must not fill an idle engine's memory.
    Different things said of a request are all kept, in the order in which each was said last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[Hashable, ev.Event] = {}

    def __len__(self) -> int:
        """Number of events that wait."""
        return len(self._events)

    def push(self, event: ev.Event) -> None:
        """Add an event."""
        subject = _subject(event)
        with self._lock:
            if not isinstance(event, ev.Registered):
                self._events.pop(subject, None)
            # A registration stays where the first was: what came after it was said to an engine that knows
            # that readers of an earlier incarnation may be on their way.
            self._events[subject] = event

    def drain(self) -> list[ev.Event]:
        """Take all events, in order."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, {}
        return list(events.values())


def _subject(event: ev.Event) -> Hashable:
    """Return what two events have in common of which only the later one need be heard."""
    match event:
        case ev.Announced(result):
            return ev.Announced, result.request_id, result.outcome
        case ev.RenewalOrdered(request_id, _):
            return ev.RenewalOrdered, request_id
        case ev.Registered() | ev.DrainRequested():
            return (type(event),)
    return event
