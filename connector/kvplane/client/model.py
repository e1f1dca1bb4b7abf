"""What the client gives and takes: plain values, no protobuf types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

EngineId = NewType("EngineId", str)
"""Names an engine in the fleet; may survive its restart."""
RequestId = NewType("RequestId", str)
"""An engine's own id of a request; unique within one incarnation."""


class EngineRole(StrEnum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class MissReason(StrEnum):
    """Why nothing can be offered for a conversation."""

    UNKNOWN_CONVERSATION = "unknown_conversation"
    EXPIRING = "expiring"
    CLAIMED = "claimed"
    ENGINE_GONE = "engine_gone"
    ENGINE_DRAINING = "engine_draining"
    QUARANTINED = "quarantined"
    INCOMPATIBLE_ENGINE = "incompatible_engine"
    TURN_IN_FLIGHT = "turn_in_flight"
    QUOTA = "quota"


class AnnounceOutcome(StrEnum):
    """What became of an announcement.

    ACCEPTED: on record. SUPERSEDED: keep the blocks, a release order follows. CLAIMED: a reader holds it
    already, keep the blocks until read or a release order. REFUSED: free the blocks.
    """

    ACCEPTED = "accepted"
    SUPERSEDED = "superseded"
    REFUSED = "refused"
    CLAIMED = "claimed"


class ReleaseOutcome(StrEnum):
    """What became of a release or withdrawal; after RELEASED and NOTHING the blocks may be freed."""

    RELEASED = "released"
    CLAIMED = "claimed"
    NOTHING = "nothing"


class ReleaseReason(StrEnum):
    """Why an engine is told to free blocks."""

    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    CLAIM_FINISHED = "claim_finished"
    CLAIM_TIMEOUT = "claim_timeout"
    CONVERSATION_ENDED = "conversation_ended"
    CAPACITY = "capacity"
    REFUSED = "refused"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Names a conversation; equal only if all four are."""

    tenant_id: str
    model: str
    conversation_id: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Chain of 8-byte hashes, one per `chunk_tokens` tokens; the last one may cover fewer."""

    chunk_tokens: int
    chain: bytes


@dataclass(frozen=True, slots=True)
class Location:
    """Where a conversation's KV is held. `remaining_s` is the life left when the answer was made."""

    key: ConversationKey
    engine_id: EngineId
    engine_epoch: int
    request_id: RequestId
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    fingerprint: Fingerprint
    remaining_s: float
    revision: int
    endpoint: str = ""
    data_parallel_rank: int = 0
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """A numbered turn, and what is known: exactly one of `location` and `miss` is set.

    Attributes:
        turn: its number; 0 where it got none.
        key: the conversation; also the one found, or begun, by fingerprint.
        turn_index: how many turns of it have begun, this one included; from 1, 0 if not known.
        idle_s: seconds since its last turn ended; None if that is not known.
        lease_class: of its last announced turn; None if there was none.
    """

    turn: int
    location: Location | None
    miss: MissReason | None
    key: ConversationKey
    turn_index: int = 0
    idle_s: float | None = None
    lease_class: int | None = None


@dataclass(frozen=True, slots=True)
class Touched:
    """What there is to keep of a conversation.

    Attributes:
        noted: something is retained that may still be claimed, or a turn is in flight.
        remaining_s: seconds of life on record, not yet renewed; None if nothing is retained.
    """

    noted: bool
    remaining_s: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """An exclusive right to read a location once, within `timeout_s` seconds."""

    claim_id: str
    owner: str
    location: Location
    timeout_s: float


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What must be equal on both sides of a KV transfer; see EngineProfile in the protos."""

    model: str = ""
    model_revision: str = ""
    kv_dtype: str = ""
    block_size: int = 0
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    decode_context_parallel_size: int = 0
    engine_version: str = ""
    transfer_mode: str = "pull"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What else an engine says of its configuration; see EngineSettings in the protos. "" and 0: not said."""

    kv_role: str = ""
    kvplane_version: str = ""
    side_channel_host: str = ""
    side_channel_port: int = 0
    prefix_caching: bool | None = None
    kv_load_failure_policy: str = ""
    kv_blocks_ttl_s: float = 0.0
    max_ttl_s: float = 0.0
    refusal: str = ""
    kv_digest: str = ""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as it registers itself; see EngineSpec in the protos."""

    engine_id: EngineId
    role: EngineRole
    profile: EngineProfile = field(default_factory=EngineProfile)
    endpoint: str = ""
    data_parallel_rank: int = 0
    total_blocks: int = 0
    served_models: tuple[str, ...] = ()
    settings: EngineSettings | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load as the engine last reported it; counts."""

    running_requests: int = 0
    waiting_requests: int = 0
    free_blocks: int = 0
    retained_blocks: int = 0
    retained_conversations: int = 0


class EngineContact(StrEnum):
    """How an engine is heard of; see EngineContact in the protos."""

    UNKNOWN = "unknown"
    UNARY = "unary"
    ATTACHED = "attached"
    SILENT = "silent"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class EngineHoldings:
    """What is on record of an engine's locations; counts."""

    conversations: int = 0
    tokens: int = 0
    blocks: int = 0
    claimed: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine; of one that is gone only its id and epoch are known.

    Attributes:
        registered_s: seconds since it registered.
        last_seen_s: seconds since the answering replica heard of it, None if it has not.
        holdings: None unless asked for.
        announcements: of this incarnation, as far as the answering replica has put them on record.
    """

    spec: EngineSpec
    engine_epoch: int
    draining: bool
    attached: bool
    load: EngineLoad | None
    contact: EngineContact = EngineContact.UNKNOWN
    registered_s: float = 0.0
    last_seen_s: float | None = None
    holdings: EngineHoldings | None = None
    announcements: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """An incarnation as granted; durations in seconds."""

    engine_epoch: int
    lease_ttl_s: float
    max_location_ttl_s: float
    claim_timeout_s: float


@dataclass(frozen=True, slots=True)
class PlaneSettings:
    """A replica's settings; durations in seconds."""

    location_ttl_s: float
    min_remaining_s: float
    claim_timeout_s: float
    claim_grace_s: float
    engine_lease_s: float
    max_staleness_s: float
    max_conversations: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How the store does; see StoreStatus in the protos. `latency_s` is None if a read failed."""

    shared: bool
    latency_s: float | None
    staleness_s: float
    trouble: str = ""
    caution: str = ""
    version: str = ""
    size_bytes: int = 0
    quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica by its last sign of life, `age_s` seconds ago."""

    replica_id: str
    version: str
    age_s: float


@dataclass(frozen=True, slots=True)
class PlaneCounts:
    """What a replica counted since it started; `misses` by MissReason's values."""

    turns: int = 0
    hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    claims: int = 0
    claims_missed: int = 0
    announcements: int = 0


@dataclass(frozen=True, slots=True)
class PlaneStatus:
    """How a replica does. `fleet_time_s` and `clock_time_s` are seconds since 1970 at one moment."""

    replica_id: str
    version: str
    serving: bool
    uptime_s: float
    fleet_time_s: float
    clock_time_s: float
    settings: PlaneSettings
    store: StoreStatus
    replicas: tuple[ReplicaStatus, ...] = ()
    counts: PlaneCounts | None = None
    """None if an older one does not count."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A retained turn to announce. `ttl_s`: life left when the message is made, margin taken off."""

    key: ConversationKey
    request_id: RequestId
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    fingerprint: Fingerprint
    ttl_s: float
    endpoint: str = ""
    reannounced: bool = False
    lease_class: int | None = None


@dataclass(frozen=True, slots=True)
class AnnouncementResult:
    """What became of an announcement; `detail` says why it was refused."""

    request_id: RequestId
    outcome: AnnounceOutcome
    granted_ttl_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RenewalResult:
    """What became of a renewal; nothing is ever revived."""

    request_id: RequestId
    renewed: bool
    granted_ttl_s: float


@dataclass(frozen=True, slots=True)
class LocationPage:
    """A page of locations; `next_page_token` is "" on the last one."""

    locations: tuple[Location, ...]
    revision: int
    next_page_token: str


@dataclass(frozen=True, slots=True)
class LocationEvent:
    """A change seen by a watch; `gone` means no longer retained. Resume from `revision` + 1."""

    revision: int
    gone: bool
    location: Location
