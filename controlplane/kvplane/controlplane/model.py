"""The control plane's own values. No protobuf types, no gRPC, no store types."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from msgspec import Struct

# Numbers are those of the public protos, so that stored records and wire agree; a test checks it.
#
# What is made several times per operation is a struct: as frozen as a dataclass, at a tenth of its cost. To
# change members of one, use msgspec.structs.replace.
#
# Values that are read from the store and written back have a last member `unknown`: the fields of the stored
# record that only a newer version understands, as read, never looked into. Replacing members carries them
# along; a value made anew (a new turn, a new registration) has none. They count in comparisons: two values
# are equal if their records are.


_MORE_MS = 1000
"""How much more than the time at which it began the number of a turn may be."""

QUARANTINE = "quarantine/"
"""How the names begin of claims that nobody made: they keep blocks in quarantine."""

AUTO = "auto/"
"""How the ids begin of conversations that were begun by fingerprint."""


class EngineRole(IntEnum):
    """What an engine does."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


class EngineContact(IntEnum):
    """How an engine is heard of. A silent one's stream broke, and there was no sign of life since."""

    UNARY = 0
    ATTACHED = 1
    SILENT = 2


class MissReason(IntEnum):
    """Why nothing can be offered; see MissReason in the protos."""

    UNKNOWN_CONVERSATION = 1
    EXPIRING = 2
    CLAIMED = 3
    ENGINE_GONE = 4
    ENGINE_DRAINING = 5
    QUARANTINED = 6
    INCOMPATIBLE_ENGINE = 7
    TURN_IN_FLIGHT = 8
    QUOTA = 9


class AnnounceOutcome(IntEnum):
    """What became of an announcement; see AnnounceOutcome in the protos."""

    ACCEPTED = 1
    SUPERSEDED = 2
    REFUSED = 3
    CLAIMED = 4


class ReleaseOutcome(IntEnum):
    """What became of a release."""

    RELEASED = 1
    CLAIMED = 2
    NOTHING = 3


class ReleaseReason(IntEnum):
    """Why an engine is told to free blocks."""

    SUPERSEDED = 1
    EXPIRED = 2
    CLAIM_FINISHED = 3
    CLAIM_TIMEOUT = 4
    CONVERSATION_ENDED = 5
    CAPACITY = 6
    REFUSED = 7
    QUOTA = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """Durations in seconds, and limits. The defaults are those of the documentation."""

    max_location_ttl_s: float = 480.0
    """Longest life of a record, whatever was announced (vLLM's own default retention)."""
    min_remaining_s: float = 10.0
    """A location with less life left is not handed out: an engine refuses reads in its last 5 s."""
    claim_timeout_s: float = 30.0
    """A reader must have begun within this time."""
    claim_grace_s: float = 10.0
    """After the timeout the blocks are kept this much longer, for a read that has begun."""
    engine_lease_s: float = 10.0
    """An engine unheard of for this long is gone."""
    in_flight_wait_s: float = 0.05
    """Default wait for the announcement of a turn still in flight."""
    in_flight_window_s: float = 600.0
    """A turn that was not announced by then is no longer waited for."""
    max_staleness_s: float = 2.0
    """A replica that could not make sure for this long that it knows the store's state gives no answers.

    For stores shared with other replicas."""
    max_conversations: int = 1_000_000
    """Conversations on record, and notes of turns begun by fingerprint; beyond it the oldest of each go."""
    max_epochs: int = 100_000
    """Engine ids whose last epoch is remembered; beyond it the oldest of those that do not live go."""

    @property
    def claim_life_s(self) -> float:
        """Longest time for which a reader that was let in may be reading."""
        return self.claim_timeout_s + self.claim_grace_s

    @property
    def turns_kept_ms(self) -> int:
        """How long a conversation's turns are remembered: as long as one can be retained or waited for."""
        return round((self.max_location_ttl_s + self.in_flight_window_s) * 1000)


class ConversationKey(Struct, frozen=True, gc=False):
    """Names a conversation. Equal only if all four are."""

    tenant_id: str
    model: str
    adapter: str
    conversation_id: str


class Fingerprint(Struct, frozen=True, gc=False):
    """Chain of 8-byte hashes, one per `chunk_tokens` tokens."""

    chunk_tokens: int
    chain: bytes


class Holder(Struct, frozen=True, gc=False):
    """Whose blocks: one request of one incarnation of one engine. Unique for good."""

    engine_id: str
    engine_epoch: int
    request_id: str


class Location(Struct, frozen=True, gc=False):
    """A location on record. What is in milliseconds is of the control plane's clock."""

    key: ConversationKey
    holder: Holder
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    fingerprint: Fingerprint
    deadline_ms: int
    not_before_ms: int = 0
    endpoint: str = ""
    data_parallel_rank: int = 0
    wanted_until_ms: int = 0
    unknown: bytes = b""


class Claim(Struct, frozen=True, gc=False):
    """One reader's exclusive right to a location."""

    claim_id: str
    owner: str
    location: Location
    deadline_ms: int
    unknown: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What must be equal on both sides of a transfer."""

    model: str = ""
    model_revision: str = ""
    kv_dtype: str = ""
    block_size: int = 0
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    decode_context_parallel_size: int = 0
    engine_version: str = ""
    transfer_mode: str = ""


class Terms(NamedTuple):
    """Durations that replicas of one store promise alike, in milliseconds."""

    claim_life_ms: int
    location_ttl_ms: int
    engine_lease_ms: int


class Pulse(NamedTuple):
    """A replica's sign of life: the time as it has it, its version, and what it promises."""

    time_ms: int
    version: str
    terms: Terms | None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What else an engine said of its configuration; see EngineSettings in the protos. Decides nothing."""

    kv_role: str = ""
    kvplane_version: str = ""
    side_channel_host: str = ""
    side_channel_port: int = 0
    prefix_caching: bool | None = None
    kv_load_failure_policy: str = ""
    kv_blocks_ttl_ms: int = 0
    max_ttl_ms: int = 0
    refusal: str = ""
    kv_digest: str = ""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as it registered."""

    engine_id: str
    role: EngineRole
    profile: EngineProfile = field(default_factory=EngineProfile)
    endpoint: str = ""
    data_parallel_rank: int = 0
    total_blocks: int = 0
    served_models: tuple[str, ...] = ()
    settings: EngineSettings | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's load as last reported; counts."""

    running_requests: int = 0
    waiting_requests: int = 0
    free_blocks: int = 0
    retained_blocks: int = 0
    retained_conversations: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """A live incarnation on record."""

    spec: EngineSpec
    engine_epoch: int
    lease_id: int
    registered_at_ms: int
    registration_id: str = ""
    draining: bool = False
    stream: int = 0
    contact: EngineContact = EngineContact.UNARY
    unknown: bytes = b""


class Turns(Struct, frozen=True, gc=False):
    """What is remembered of a conversation's turns; see TurnRecord in the storage protos."""

    latest_turn: int = 0
    request_id: str = ""
    settled_turn: int = 0
    in_flight_until_ms: int = 0
    claimed_turn: int = 0
    ended_turn: int = 0
    turn_index: int = 0
    settled_at_ms: int = 0
    lease_class: int = 0
    wanted_until_ms: int = 0
    quota_turn: int = 0
    unknown: bytes = b""

    @property
    def is_described(self) -> bool:
        """Whether what is known of the settled turn is known of that one: older software settles without.

        A turn's number is the time at which it began, or a little more.
        """
        return self.settled_at_ms > self.settled_turn - _MORE_MS

    def is_in_flight(self, now_ms: int) -> bool:
        """Tell whether the latest turn may still be announced."""
        over = max(self.settled_turn, self.ended_turn)
        return self.latest_turn > over and self.in_flight_until_ms > now_ms


class Announcement(Struct, frozen=True, gc=False):
    """A retained turn as its engine announces it; `ttl_s` began before it was sent."""

    key: ConversationKey
    request_id: str
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    fingerprint: Fingerprint
    ttl_s: float
    endpoint: str = ""
    reannounced: bool = False
    lease_class: int = 0


class Announced(Struct, frozen=True, gc=False):
    """What became of an announcement; `granted_ttl_s` is the life its record has."""

    outcome: AnnounceOutcome
    granted_ttl_s: float = 0.0
    detail: str = ""


class Touched(Struct, frozen=True, gc=False):
    """What a touch found; `remaining_ms` is the life of what is retained, None if nothing is."""

    noted: bool
    remaining_ms: int | None = None


class Order(Struct, frozen=True, gc=False):
    """An order to an engine to free one request's blocks."""

    holder: Holder
    reason: ReleaseReason
    deadline_ms: int


class Found(Struct, frozen=True, gc=False):
    """A hit, with the store revision of the record."""

    location: Location
    revision: int


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(member.name for member in fields(kind))


def members(source: object, kind: type) -> dict[str, Any]:
    """Return those attributes of `source` that a dataclass has as fields.

    For values that look the same here, on the wire and in the store; a test checks that they do.
    """
    return {name: getattr(source, name) for name in _names(kind)}
