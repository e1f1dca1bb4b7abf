from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCATION_STATE_UNSPECIFIED: _ClassVar[LocationState]
    LOCATION_STATE_RETAINED: _ClassVar[LocationState]
    LOCATION_STATE_CLAIMED: _ClassVar[LocationState]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_UNKNOWN_CONVERSATION: _ClassVar[MissReason]
    MISS_REASON_EXPIRING: _ClassVar[MissReason]
    MISS_REASON_CLAIMED: _ClassVar[MissReason]
    MISS_REASON_ENGINE_GONE: _ClassVar[MissReason]
    MISS_REASON_ENGINE_DRAINING: _ClassVar[MissReason]
    MISS_REASON_QUARANTINED: _ClassVar[MissReason]
    MISS_REASON_INCOMPATIBLE_ENGINE: _ClassVar[MissReason]
    MISS_REASON_TURN_IN_FLIGHT: _ClassVar[MissReason]
    MISS_REASON_QUOTA: _ClassVar[MissReason]

class AnnounceOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANNOUNCE_OUTCOME_UNSPECIFIED: _ClassVar[AnnounceOutcome]
    ANNOUNCE_OUTCOME_ACCEPTED: _ClassVar[AnnounceOutcome]
    ANNOUNCE_OUTCOME_SUPERSEDED: _ClassVar[AnnounceOutcome]
    ANNOUNCE_OUTCOME_REFUSED: _ClassVar[AnnounceOutcome]
    ANNOUNCE_OUTCOME_CLAIMED: _ClassVar[AnnounceOutcome]

class ReleaseOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_OUTCOME_UNSPECIFIED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_RELEASED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_CLAIMED: _ClassVar[ReleaseOutcome]
    RELEASE_OUTCOME_NOTHING: _ClassVar[ReleaseOutcome]
LOCATION_STATE_UNSPECIFIED: LocationState
LOCATION_STATE_RETAINED: LocationState
LOCATION_STATE_CLAIMED: LocationState
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_UNKNOWN_CONVERSATION: MissReason
MISS_REASON_EXPIRING: MissReason
MISS_REASON_CLAIMED: MissReason
MISS_REASON_ENGINE_GONE: MissReason
MISS_REASON_ENGINE_DRAINING: MissReason
MISS_REASON_QUARANTINED: MissReason
MISS_REASON_INCOMPATIBLE_ENGINE: MissReason
MISS_REASON_TURN_IN_FLIGHT: MissReason
MISS_REASON_QUOTA: MissReason
ANNOUNCE_OUTCOME_UNSPECIFIED: AnnounceOutcome
ANNOUNCE_OUTCOME_ACCEPTED: AnnounceOutcome
ANNOUNCE_OUTCOME_SUPERSEDED: AnnounceOutcome
ANNOUNCE_OUTCOME_REFUSED: AnnounceOutcome
ANNOUNCE_OUTCOME_CLAIMED: AnnounceOutcome
RELEASE_OUTCOME_UNSPECIFIED: ReleaseOutcome
RELEASE_OUTCOME_RELEASED: ReleaseOutcome
RELEASE_OUTCOME_CLAIMED: ReleaseOutcome
RELEASE_OUTCOME_NOTHING: ReleaseOutcome

class ConversationKey(_message.Message):
    __slots__ = ("tenant_id", "model", "adapter", "conversation_id")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    model: str
    adapter: str
    conversation_id: str
    def __init__(self, tenant_id: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., conversation_id: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("chunk_tokens", "chain")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    chain: bytes
    def __init__(self, chunk_tokens: _Optional[int] = ..., chain: _Optional[bytes] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("key", "engine_id", "engine_epoch", "request_id", "turn", "token_count", "block_count", "kv_transfer_params", "fingerprint", "remaining", "state", "revision", "endpoint", "data_parallel_rank")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    key: ConversationKey
    engine_id: str
    engine_epoch: int
    request_id: str
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    fingerprint: Fingerprint
    remaining: _duration_pb2.Duration
    state: LocationState
    revision: int
    endpoint: str
    data_parallel_rank: int
    def __init__(self, key: _Optional[_Union[ConversationKey, _Mapping]] = ..., engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., turn: _Optional[int] = ..., token_count: _Optional[int] = ..., block_count: _Optional[int] = ..., kv_transfer_params: _Optional[bytes] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., remaining: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., state: _Optional[_Union[LocationState, str]] = ..., revision: _Optional[int] = ..., endpoint: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("key", "request_id", "turn", "token_count", "block_count", "kv_transfer_params", "fingerprint", "ttl", "endpoint", "reannounced", "lease_class")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    LEASE_CLASS_FIELD_NUMBER: _ClassVar[int]
    key: ConversationKey
    request_id: str
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    fingerprint: Fingerprint
    ttl: _duration_pb2.Duration
    endpoint: str
    reannounced: bool
    lease_class: int
    def __init__(self, key: _Optional[_Union[ConversationKey, _Mapping]] = ..., request_id: _Optional[str] = ..., turn: _Optional[int] = ..., token_count: _Optional[int] = ..., block_count: _Optional[int] = ..., kv_transfer_params: _Optional[bytes] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., endpoint: _Optional[str] = ..., reannounced: bool = ..., lease_class: _Optional[int] = ...) -> None: ...

class AnnouncementResult(_message.Message):
    __slots__ = ("request_id", "outcome", "granted_ttl", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TTL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: AnnounceOutcome
    granted_ttl: _duration_pb2.Duration
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[AnnounceOutcome, str]] = ..., granted_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("request_id", "ttl")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ttl: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewalResult(_message.Message):
    __slots__ = ("request_id", "renewed", "granted_ttl")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TTL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    renewed: bool
    granted_ttl: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., renewed: bool = ..., granted_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
