"""The proof over a history: what must never happen did not, and what must come back came back.

Nothing here knows the control plane: the engines' own view (what they hold, until when, what they were let
free) and the readers' answers are all there is. Times are of one monotonic clock, so "answered before
invoked" is a real order, whatever the replicas' clocks say.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.robustness import history as h
from tests.robustness.index import Index, build

RULES = (
    "double_claim",
    "invented",
    "late",
    "margin",
    "stale_epoch",
    "freed",
    "freed_under_reader",
    "older_turn",
    "turn_order",
    "dead_engine",
    "failed_request",
    "recovery",
)
"""Names of the rules; what each says stands with its function below."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the fleet promises, in seconds."""

    min_remaining_s: float = 10.0
    """Life that a location handed out has left at least."""
    staleness_s: float = 2.0
    """A lookup or begin-turn may rest on what was true so long ago; a claim never."""
    engine_lease_s: float = 10.0
    """A dead engine's locations are handed out at most so long, and `lease_slack_s` more."""
    lease_slack_s: float = 4.0
    rounding_s: float = 0.05
    """Milliseconds of the records and of scheduling between reading a clock and sending."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that did not hold, and the case."""

    rule: str
    text: str


@dataclass(slots=True)
class Verdict:
    """What was found."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    """Claims that were decided, won or lost; what had no answer, or "unavailable", does not count."""
    grants: int = 0
    offers: int = 0
    least_life_s: float = float("inf")
    """Smallest life left, at the answer, of anything handed out."""
    least_margin_s: float = float("inf")
    """Smallest life left, at the question."""
    longest_after_death_s: float = 0.0
    hits: int = 0
    cold: int = 0
    failed: int = 0
    longest_gap_s: float = 0.0
    """Longest time without a hit of the router-like caller."""
    gaps: dict[str, float] = field(default_factory=dict)
    """Longest gap by fault."""
    recoveries: dict[str, float] = field(default_factory=dict)
    """Longest time from a fault's end to the next hit of a fresh conversation."""
    slowest_s: float = 0.0

    def of(self, rule: str) -> list[Violation]:
        """Return the violations of one rule."""
        return [violation for violation in self.violations if violation.rule == rule]


def check(events: Iterable[h.Event], limits: Limits | None = None) -> Verdict:
    """Check a history against all rules. O(n log n)."""
    limits, index = limits or Limits(), build(events)
    verdict = Verdict(counts=index.counts, grants=len(index.granted), offers=len(index.offered))
    verdict.attempts = index.counts["claims_decided"]
    findings = (
        _double_claims(index, limits),
        _invented(index),
        _late(index, verdict),
        _margin(index, limits, verdict),
        _stale_epochs(index, limits),
        _freed(index, limits),
        _freed_under_reader(index),
        _older_turns(index, limits),
        _turn_order(index),
        _dead_engines(index, limits, verdict),
        _failed_requests(index, verdict),
        _recovery(index, verdict),
    )
    for rule, texts in zip(RULES, findings, strict=True):
        verdict.violations.extend(Violation(rule, text) for text in texts)
    return verdict


def _handed_out(index: Index) -> Iterator[h.Granted | h.Offered]:
    yield from index.granted
    yield from index.offered


def _told(what: h.Granted | h.Offered) -> str:
    how = f"claim {what.claim_id}" if isinstance(what, h.Granted) else "offer"
    return (
        f"{how} of {what.conversation} at {what.replica}, {what.invoked:.3f} to {what.answered:.3f}:"
        f" {'/'.join(map(str, what.place))} turn {what.turn}"
    )


def _blocks(what: h.Granted | h.Offered) -> tuple[str, str]:
    """Return what names the blocks: they outlive an epoch, if their engine only lost its lease."""
    return what.place.engine_id, what.place.request_id


def _patience(what: h.Granted | h.Offered, limits: Limits) -> float:
    return 0.0 if isinstance(what, h.Granted) else limits.staleness_s


def _right_ends(index: Index, grant: h.Granted) -> float:
    """Return the earliest time at which the reader's right to read may end."""
    ends = grant.invoked + grant.timeout_s
    return min(ends, index.finishing.get(grant.claim_id, ends))


def _double_claims(index: Index, limits: Limits) -> Iterator[str]:
    """A place is granted to one claim id, and a living claim id names one place.

    What is granted is not offered any more; blocks announced again under another epoch have no second reader
    while the first may read.
    """
    readers: dict[tuple[str, str], h.Granted] = {}
    first_of_place: dict[h.Place, h.Granted] = {}
    first_of_claim: dict[tuple[str, str], h.Granted] = {}
    for grant in index.granted:
        other = first_of_place.setdefault(grant.place, grant)
        if (other.claim_id, other.owner) != (grant.claim_id, grant.owner):
            yield f"{_told(grant)}; but before: {_told(other)}"
        reader = readers.get(_blocks(grant), grant)
        if reader.place != grant.place and grant.answered < _right_ends(index, reader):
            yield f"{_told(grant)}; a second reader, the first one being: {_told(reader)}"
        readers[_blocks(grant)] = grant
        same = first_of_claim.setdefault((grant.claim_id, grant.owner), grant)
        if same.place != grant.place and grant.answered < _right_ends(index, same):
            yield f"{_told(grant)}; but the same claim named before: {_told(same)}"
    for offer in index.offered:
        taken = first_of_place.get(offer.place)
        if taken is not None and offer.invoked > taken.answered + limits.staleness_s:
            yield f"{_told(offer)}; but claimed before: {_told(taken)}"


def _invented(index: Index) -> Iterator[str]:
    """What is handed out was announced, for that conversation and turn."""
    for what in _handed_out(index):
        life = index.lives.get(what.place)
        if life is None or life.said[0][0] > what.answered:
            yield f"{_told(what)}; never announced"
        elif (life.conversation, life.turn) != (what.conversation, what.turn):
            yield f"{_told(what)}; announced for {life.conversation} turn {life.turn}"


def _late(index: Index, verdict: Verdict) -> Iterator[str]:
    """Nothing is handed out at or after its deadline as its engine knows it."""
    for what in _handed_out(index):
        if (life := index.lives.get(what.place)) is None or life.said[0][0] > what.answered:
            continue
        left = life.deadline(what.invoked, what.answered) - what.answered
        verdict.least_life_s = min(verdict.least_life_s, left)
        if left <= 0:
            yield f"{_told(what)}; {-left:.3f} s after its deadline"


def _margin(index: Index, limits: Limits, verdict: Verdict) -> Iterator[str]:
    """When asked for, it had the promised life left; the fleet's clocks may differ by the staleness."""
    for what in _handed_out(index):
        if (life := index.lives.get(what.place)) is None or life.said[0][0] > what.answered:
            continue
        left = life.deadline(what.invoked, what.answered) - what.invoked
        verdict.least_margin_s = min(verdict.least_margin_s, left)
        if left < limits.min_remaining_s - limits.staleness_s - limits.rounding_s:
            yield f"{_told(what)}; asked for with {left:.3f} s left"


def _stale_epochs(index: Index, limits: Limits) -> Iterator[str]:
    """Once a newer epoch is answered, nothing of an older one is handed out; and epochs only grow."""
    for what in _handed_out(index):
        for registered in index.registered.get(what.place.engine_id, ()):
            over = registered.engine_epoch > what.place.engine_epoch
            if over and what.invoked > registered.answered + _patience(what, limits):
                yield f"{_told(what)}; epoch {registered.engine_epoch} since {registered.answered:.3f}"
                break
    for engine_id, registrations in index.registered.items():
        newest = 0
        for registered in registrations:
            before = [r.engine_epoch for r in registrations if r.answered < registered.invoked]
            newest = max(before, default=0)
            if registered.engine_epoch <= newest:
                yield f"{engine_id} was given epoch {registered.engine_epoch} after {newest}"


def _freed(index: Index, limits: Limits) -> Iterator[str]:
    """What its engine was let free is not handed out any more."""
    for what in _handed_out(index):
        for at, why in index.may_free.get(_blocks(what), ()):
            if what.invoked > at + _patience(what, limits):
                yield f"{_told(what)}; free since {at:.3f}: {why}"
                break


def _freed_under_reader(index: Index) -> Iterator[str]:
    """No engine is let free what a reader may read: until it finishes, or its claim's time is over."""
    for grant in index.granted:
        ends = _right_ends(index, grant)
        for at, why in index.may_free.get(_blocks(grant), ()):
            if grant.invoked <= at < ends:
                yield f"{_told(grant)}; its reader had until {ends:.3f}, freed at {at:.3f}: {why}"


def _older_turns(index: Index, limits: Limits) -> Iterator[str]:
    """Once a newer turn is accepted, no older one is handed out or accepted anew."""
    for what in _handed_out(index):
        newest = index.newest_accepted(what.conversation, what.invoked - _patience(what, limits))
        if newest > what.turn:
            yield f"{_told(what)}; turn {newest} was accepted before"
    for place, life in index.lives.items():
        for at in [at for at, outcome in life.answered if outcome == "accepted"]:
            sent = max(sent for sent, _ in life.said if sent <= at)
            newest = index.newest_accepted(life.conversation, sent)
            if newest > life.turn:
                yield f"{'/'.join(map(str, place))} turn {life.turn} accepted at {at:.3f} after turn {newest}"


def _turn_order(index: Index) -> Iterator[str]:
    """A turn begun after another one's answer has a larger number, on any replica; none is given twice."""
    for conversation, turns in index.begun.items():
        by_number: dict[int, str] = {}
        for begun in turns:
            if by_number.setdefault(begun.turn, begun.request_id) != begun.request_id:
                yield f"turn {begun.turn} of {conversation} was given twice"
        answered = sorted(turns, key=lambda begun: begun.answered)
        highest, done = h.Begun(conversation, "", 0, 0.0, 0.0), 0
        for begun in sorted(turns, key=lambda begun: begun.invoked):
            while done < len(answered) and answered[done].answered < begun.invoked:
                highest, done = max(highest, answered[done], key=lambda turn: turn.turn), done + 1
            again = begun.turn == highest.turn and begun.request_id != highest.request_id
            if begun.turn < highest.turn or again:
                late = f"{begun.turn} of {conversation} was given at {begun.answered:.3f}"
                yield f"turn {late} after {highest.turn}"


def _dead_engines(index: Index, limits: Limits, verdict: Verdict) -> Iterator[str]:
    """What a killed engine held is offered no longer than its lease."""
    bound = limits.engine_lease_s + limits.lease_slack_s
    for what in _handed_out(index):
        life = index.lives.get(what.place)
        for died in index.died.get(what.place.engine_id, ()):
            if life is None or life.said[0][0] > died:
                continue
            after = what.invoked - died
            verdict.longest_after_death_s = max(verdict.longest_after_death_s, after)
            if after > bound:
                yield f"{_told(what)}; its engine was killed {after:.3f} s before"
            break


def _failed_requests(index: Index, verdict: Verdict) -> Iterator[str]:
    """A fault makes requests cold, never failed."""
    for request in index.requests:
        verdict.hits += request.outcome == "hit"
        verdict.cold += request.outcome == "cold"
        verdict.slowest_s = max(verdict.slowest_s, request.answered - request.invoked)
        if request.outcome == "failed":
            verdict.failed += 1
            yield f"request at {request.invoked:.3f}: {request.detail}"


def _recovery(index: Index, verdict: Verdict) -> Iterator[str]:
    """After a fault a fresh conversation gets a hit again, in time, by itself."""
    hits = [request for request in index.requests if request.outcome == "hit"]
    gaps = [(a.answered, b.answered) for a, b in itertools.pairwise(hits)]
    verdict.longest_gap_s = max((end - begin for begin, end in gaps), default=0.0)
    worst = defaultdict[str, float](float)
    for fault in sorted(index.faults, key=lambda fault: fault.ended):
        touched = [end - begin for begin, end in gaps if end >= fault.began and begin <= fault.ended]
        verdict.gaps[fault.name] = max(verdict.gaps.get(fault.name, 0.0), *touched, 0.0)
        later = [other.began for other in index.faults if other.began > fault.ended]
        due = fault.ended + fault.recovers_within_s
        first = next((hit.answered for hit in hits if hit.invoked >= fault.ended), None)
        if first is not None:
            worst[fault.name] = max(worst[fault.name], first - fault.ended)
        if (first is None or first > due) and index.end >= due and not any(at < due for at in later):
            yield f"no hit within {fault.recovers_within_s:g} s after {fault.name} ended at {fault.ended:.3f}"
    verdict.recoveries = dict(worst)
