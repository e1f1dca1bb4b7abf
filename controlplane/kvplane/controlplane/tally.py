"""What a replica counts as it works: plain numbers, read by whoever shows them.

On the hot path: an addition each, no locks, no labels looked up. One event loop writes; readers may be on
another thread and see a count a moment early or late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvplane.controlplane import model as m
from kvplane.controlplane.turn_groups import TurnGroups

QUICK_S = (
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds, in seconds, for what usually takes microseconds."""
AGES_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0)
"""Upper bounds, in seconds, for how long claims are open."""

LOCATION_ENDS = (
    "claimed",
    "continued",
    "superseded",
    "expired",
    "withdrawn",
    "freed",
    "conversation_ended",
    "capacity",
    "quota",
    "engine_gone",
)
"""How retained locations end. `continued`: the same incarnation announced the conversation's next turn."""
CLAIM_ENDS = ("read", "finished", "timed_out", "engine_gone", "quarantine_over")
"""How claims end. `finished`: the reader says that it is done; `read`: its engine said first that it is."""
ENGINE_EVENTS = (
    "registered",
    "replaced",
    "deregistered",
    "expired",
    "attached",
    "detached",
    "superseded_stream",
    "drained",
)
"""What happens to engines. `replaced`: a newer incarnation fences off the one before."""


_UNTIMED = float("nan")
"""In place of when something began that is not timed; compared by identity."""


class Histogram:
    """Counts of durations by fixed buckets."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...] = QUICK_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


class CallTally:
    """Calls of one method, or operations of one kind: by code, and how long they took.

    Every one is counted; of `every` one is timed.
    """

    __slots__ = ("_every", "_next", "_now", "codes", "in_flight", "took")

    def __init__(self, now: Callable[[], float], *, timed: bool = True, every: int = 1) -> None:
        self._now = now
        self._every = every
        self._next = every
        self.codes: dict[str, int] = {"OK": 0}
        self.took = Histogram() if timed else None
        """Of those that were answered OK; None for streams, which last as long as their callers like."""
        self.in_flight = 0
        """Those that have begun and not ended."""

    def begin(self) -> float:
        """Note that one begins; returns when, for `done`."""
        self.in_flight += 1
        self._next -= 1
        if self._next:
            return _UNTIMED
        self._next = self._every
        return self._now()

    def done(self, began: float) -> None:
        """Count one that was answered OK."""
        self.in_flight -= 1
        self.codes["OK"] += 1
        if began is not _UNTIMED and self.took is not None:
            self.took.observe(self._now() - began)

    def ended(self, code: str) -> None:
        """Count one that ended with a code; how long it took says nothing."""
        self.in_flight -= 1
        self.codes[code] = self.codes.get(code, 0) + 1


class Ended(Struct, frozen=True, gc=False):
    """That a decision, once it is committed, ends a location or a claim. See LOCATION_ENDS, CLAIM_ENDS."""

    how: str
    location: m.Location | None = None
    claim_id: str = ""


class Books(Protocol):
    """Knows what open claims hold."""

    def settle(self, claim_id: str, how: str) -> None:
        """Note how a claim has ended, after its record is gone."""


class Tally:
    """All counts of one replica. `now` reads seconds; by default it is always 0."""

    def __init__(self, now: Callable[[], float] = float) -> None:
        kinds = max(m.MissReason) + 1
        self.lookups = [0] * kinds
        """LookupLocation by MissReason, HIT for what was found; the next two likewise."""
        self.begun = [0] * kinds
        self.groups = TurnGroups(self.begun, now)
        """Turns that are begun in several places; who reads `begun` asks these for it."""
        self.claims = [0] * kinds
        self.announcements = [0] * (max(m.AnnounceOutcome) + 1)
        self.releases = [0] * (max(m.ReleaseOutcome) + 1)
        self.touches = [0, 0]
        """Touches that found nothing to keep, and those that were noted."""
        self.renewals = [0, 0]
        """Renewals of what is not retained, and those that were granted."""
        self.ended = dict.fromkeys(LOCATION_ENDS, 0)
        self.ended_tokens = dict.fromkeys(LOCATION_ENDS, 0)
        self.claims_ended = dict.fromkeys(CLAIM_ENDS, 0)
        self.engines = dict.fromkeys(ENGINE_EVENTS, 0)
        self.refusals: dict[str, int] = {}
        """Calls and operations refused, by reason; see errors."""
        self.attempts = 0
        """Times a decision was made anew, because others had changed what it rested on."""
        self.evicted = 0
        """Conversations forgotten to make room."""
        self.orders = [0] * (max(m.ReleaseReason) + 1)
        """Release orders sent to engines, by ReleaseReason."""
        self.books: Books | None = None
        """Where claims are looked up that have ended, if somebody keeps such books."""

    def ending(self, ended: Ended) -> None:
        """Count what a decision that has been committed has ended."""
        how = ended.how
        if ended.location is not None:
            self.ended[how] = self.ended.get(how, 0) + 1
            self.ended_tokens[how] = self.ended_tokens.get(how, 0) + ended.location.token_count
        if ended.claim_id:
            self.claims_ended[how] = self.claims_ended.get(how, 0) + 1
            if self.books is not None:
                self.books.settle(ended.claim_id, how)

    def refused(self, reason: str) -> None:
        """Count a call or an operation that was refused."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
