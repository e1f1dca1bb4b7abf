"""A history sorted so that the checker's rules can ask: what was known of this place, when?"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.robustness import history as h


@dataclass(slots=True)
class Life:
    """What an engine said and heard of one place."""

    conversation: str
    turn: int
    said: list[tuple[float, float]] = field(default_factory=list)
    """(sent at, deadline), in order."""
    answered: list[tuple[float, str]] = field(default_factory=list)
    settled: list[tuple[float, float]] = field(default_factory=list)
    """(answered at, the deadline that was answered)."""

    def deadline(self, begin: float, end: float) -> float:
        """Return the latest deadline that an answer made between two times may rest on.

        The last one that was acknowledged before `begin` is in force; any sent since may be as well.
        """
        since, latest = -1.0, float("-inf")
        for at, deadline in self.settled:
            if at <= begin and at > since:
                since, latest = at, deadline
        possible = [deadline for at, deadline in self.said if at > since and at <= end]
        unanswered = [deadline for at, deadline in self.said if since < 0 and at <= end]
        return max([latest, *possible, *unanswered])


@dataclass(slots=True)
class Index:
    """A history by what it is about. Lists are in order of time."""

    lives: dict[h.Place, Life] = field(default_factory=dict)
    granted: list[h.Granted] = field(default_factory=list)
    offered: list[h.Offered] = field(default_factory=list)
    begun: dict[str, list[h.Begun]] = field(default_factory=lambda: defaultdict(list))
    registered: dict[str, list[h.Registered]] = field(default_factory=lambda: defaultdict(list))
    accepted: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """By conversation: (answered at, newest turn accepted by then)."""
    may_free: dict[tuple[str, str], list[tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By engine and request, whatever the epoch: an engine that lost its lease still holds its blocks."""
    finishing: dict[str, float] = field(default_factory=dict)
    died: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    requests: list[h.Request] = field(default_factory=list)
    faults: list[h.Fault] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0

    def newest_accepted(self, conversation: str, at: float) -> int:
        """Return the newest turn whose announcement had been accepted before a time; 0 if none."""
        accepted = self.accepted.get(conversation, [])
        before = bisect_right(accepted, (at, 0))
        return accepted[before - 1][1] if before else 0


def build(events: Iterable[h.Event]) -> Index:
    """Sort a history. O(n log n)."""
    index = Index()
    ordered = sorted(events, key=time_of)
    if ordered:
        index.begin, index.end = time_of(ordered[0]), time_of(ordered[-1])
    for event in ordered:
        _add(index, event)
    index.requests.sort(key=lambda request: request.answered)
    return index


def time_of(event: h.Event) -> float:
    """Return when an event was known to its process."""
    if isinstance(event, h.Fault):
        return event.ended
    if isinstance(event, h.Registered | h.Granted | h.Offered | h.Begun | h.Request):
        return event.answered
    return event.at


def _add(index: Index, event: h.Event) -> None:
    match event:
        case h.Announcing(place, conversation, turn, deadline, at):
            life = index.lives.setdefault(place, Life(conversation, turn))
            life.said.append((at, deadline))
        case h.Announced(place, outcome, at):
            if (life_ := index.lives.get(place)) is not None:
                life_.answered.append((at, outcome))
                if outcome == "accepted":
                    life_.settled.append((at, life_.said[-1][1]))
                    accepted = index.accepted[life_.conversation]
                    accepted.append((at, max(life_.turn, accepted[-1][1] if accepted else 0)))
        case h.Renewing(place, deadline, at):
            if (life_ := index.lives.get(place)) is not None:
                life_.said.append((at, deadline))
        case h.Renewed(place, renewed, at):
            if renewed and (life_ := index.lives.get(place)) is not None:
                life_.settled.append((at, life_.said[-1][1]))
        case h.MayFree(place, why, at):
            index.may_free[place.engine_id, place.request_id].append((at, why))
        case h.Granted():
            index.granted.append(event)
        case h.Offered():
            index.offered.append(event)
        case h.Begun():
            index.begun[event.conversation].append(event)
        case h.Registered():
            index.registered[event.engine_id].append(event)
        case h.Finishing(claim_id, at):
            index.finishing.setdefault(claim_id, at)
        case h.Died(engine_id, at):
            index.died[engine_id].append(at)
        case h.Counted(counts, _):
            index.counts.update(counts)
        case h.Request():
            index.requests.append(event)
        case h.Fault():
            index.faults.append(event)
