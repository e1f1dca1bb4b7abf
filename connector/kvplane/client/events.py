"""What an engine's session tells the engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.client.model import AnnouncementResult, Registration, ReleaseOutcome, ReleaseReason, RequestId


@dataclass(frozen=True, slots=True)
class Registered:
    """An incarnation has begun. Unless it is the first of this process, every location of before is gone
    from the record; readers admitted to them may still be on their way for one claim timeout."""

    registration: Registration
    first: bool


@dataclass(frozen=True, slots=True)
class Announced:
    """The control plane answered an announcement."""

    result: AnnouncementResult


@dataclass(frozen=True, slots=True)
class Dropped:
    """An announcement was never sent: too many waited, or its life ran out. Its blocks are free to go."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The control plane answered a withdrawal."""

    request_id: RequestId
    outcome: ReleaseOutcome


@dataclass(frozen=True, slots=True)
class Ordered:
    """The control plane orders a request's blocks to be freed. Comes once per request."""

    request_id: RequestId
    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class RenewalOrdered:
    """A request's blocks are wanted for `ttl_s` seconds from now. Renew them, or leave it."""

    request_id: RequestId
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Renewed:
    """The control plane answered a renewal; not `renewed` means that it has no such location any more."""

    request_id: RequestId
    renewed: bool


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The engine is to announce nothing more, or may again."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another incarnation of the same engine id took over; this session has ended for good."""


Event = (
    Registered
    | Announced
    | Dropped
    | Withdrawn
    | Ordered
    | RenewalOrdered
    | Renewed
    | DrainRequested
    | Fenced
)
