from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]
    ENGINE_ROLE_BOTH: _ClassVar[EngineRole]

class EngineContact(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_CONTACT_UNSPECIFIED: _ClassVar[EngineContact]
    ENGINE_CONTACT_UNARY: _ClassVar[EngineContact]
    ENGINE_CONTACT_ATTACHED: _ClassVar[EngineContact]
    ENGINE_CONTACT_SILENT: _ClassVar[EngineContact]
    ENGINE_CONTACT_GONE: _ClassVar[EngineContact]

class ReleaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_REASON_UNSPECIFIED: _ClassVar[ReleaseReason]
    RELEASE_REASON_SUPERSEDED: _ClassVar[ReleaseReason]
    RELEASE_REASON_EXPIRED: _ClassVar[ReleaseReason]
    RELEASE_REASON_CLAIM_FINISHED: _ClassVar[ReleaseReason]
    RELEASE_REASON_CLAIM_TIMEOUT: _ClassVar[ReleaseReason]
    RELEASE_REASON_CONVERSATION_ENDED: _ClassVar[ReleaseReason]
    RELEASE_REASON_CAPACITY: _ClassVar[ReleaseReason]
    RELEASE_REASON_REFUSED: _ClassVar[ReleaseReason]
    RELEASE_REASON_QUOTA: _ClassVar[ReleaseReason]
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole
ENGINE_ROLE_BOTH: EngineRole
ENGINE_CONTACT_UNSPECIFIED: EngineContact
ENGINE_CONTACT_UNARY: EngineContact
ENGINE_CONTACT_ATTACHED: EngineContact
ENGINE_CONTACT_SILENT: EngineContact
ENGINE_CONTACT_GONE: EngineContact
RELEASE_REASON_UNSPECIFIED: ReleaseReason
RELEASE_REASON_SUPERSEDED: ReleaseReason
RELEASE_REASON_EXPIRED: ReleaseReason
RELEASE_REASON_CLAIM_FINISHED: ReleaseReason
RELEASE_REASON_CLAIM_TIMEOUT: ReleaseReason
RELEASE_REASON_CONVERSATION_ENDED: ReleaseReason
RELEASE_REASON_CAPACITY: ReleaseReason
RELEASE_REASON_REFUSED: ReleaseReason
RELEASE_REASON_QUOTA: ReleaseReason

class EngineProfile(_message.Message):
    __slots__ = ("model", "model_revision", "kv_dtype", "block_size", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "engine_version", "transfer_mode")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MODE_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    kv_dtype: str
    block_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    engine_version: str
    transfer_mode: str
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., decode_context_parallel_size: _Optional[int] = ..., engine_version: _Optional[str] = ..., transfer_mode: _Optional[str] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("kv_role", "kvplane_version", "side_channel_host", "side_channel_port", "prefix_caching", "kv_load_failure_policy", "kv_blocks_ttl", "max_ttl", "refusal", "kv_digest")
    KV_ROLE_FIELD_NUMBER: _ClassVar[int]
    KVPLANE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_HOST_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_PORT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    KV_DIGEST_FIELD_NUMBER: _ClassVar[int]
    kv_role: str
    kvplane_version: str
    side_channel_host: str
    side_channel_port: int
    prefix_caching: bool
    kv_load_failure_policy: str
    kv_blocks_ttl: _duration_pb2.Duration
    max_ttl: _duration_pb2.Duration
    refusal: str
    kv_digest: str
    def __init__(self, kv_role: _Optional[str] = ..., kvplane_version: _Optional[str] = ..., side_channel_host: _Optional[str] = ..., side_channel_port: _Optional[int] = ..., prefix_caching: bool = ..., kv_load_failure_policy: _Optional[str] = ..., kv_blocks_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., refusal: _Optional[str] = ..., kv_digest: _Optional[str] = ...) -> None: ...

class EngineSpec(_message.Message):
    __slots__ = ("engine_id", "role", "profile", "endpoint", "data_parallel_rank", "total_blocks", "served_models", "settings")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    role: EngineRole
    profile: EngineProfile
    endpoint: str
    data_parallel_rank: int
    total_blocks: int
    served_models: _containers.RepeatedScalarFieldContainer[str]
    settings: EngineSettings
    def __init__(self, engine_id: _Optional[str] = ..., role: _Optional[_Union[EngineRole, str]] = ..., profile: _Optional[_Union[EngineProfile, _Mapping]] = ..., endpoint: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., total_blocks: _Optional[int] = ..., served_models: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[EngineSettings, _Mapping]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "free_blocks", "retained_blocks", "retained_conversations")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    free_blocks: int
    retained_blocks: int
    retained_conversations: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., free_blocks: _Optional[int] = ..., retained_blocks: _Optional[int] = ..., retained_conversations: _Optional[int] = ...) -> None: ...

class EngineHoldings(_message.Message):
    __slots__ = ("conversations", "tokens", "blocks", "claimed")
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    conversations: int
    tokens: int
    blocks: int
    claimed: int
    def __init__(self, conversations: _Optional[int] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., claimed: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("spec", "engine_epoch", "draining", "load", "attached", "contact", "registered", "last_seen", "holdings", "announcements")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    spec: EngineSpec
    engine_epoch: int
    draining: bool
    load: EngineLoad
    attached: bool
    contact: EngineContact
    registered: _duration_pb2.Duration
    last_seen: _duration_pb2.Duration
    holdings: EngineHoldings
    announcements: int
    def __init__(self, spec: _Optional[_Union[EngineSpec, _Mapping]] = ..., engine_epoch: _Optional[int] = ..., draining: bool = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., attached: bool = ..., contact: _Optional[_Union[EngineContact, str]] = ..., registered: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., last_seen: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., holdings: _Optional[_Union[EngineHoldings, _Mapping]] = ..., announcements: _Optional[int] = ...) -> None: ...

class RegisterEngineRequest(_message.Message):
    __slots__ = ("spec", "request_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    spec: EngineSpec
    request_id: str
    def __init__(self, spec: _Optional[_Union[EngineSpec, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class RegisterEngineResponse(_message.Message):
    __slots__ = ("engine_epoch", "lease_ttl", "max_location_ttl", "claim_timeout")
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_LOCATION_TTL_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    engine_epoch: int
    lease_ttl: _duration_pb2.Duration
    max_location_ttl: _duration_pb2.Duration
    claim_timeout: _duration_pb2.Duration
    def __init__(self, engine_epoch: _Optional[int] = ..., lease_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_location_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., claim_timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewEngineRequest(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "load")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    load: EngineLoad
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ...) -> None: ...

class RenewEngineResponse(_message.Message):
    __slots__ = ("lease_ttl", "draining")
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    lease_ttl: _duration_pb2.Duration
    draining: bool
    def __init__(self, lease_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., draining: bool = ...) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("open_claims",)
    OPEN_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    open_claims: int
    def __init__(self, open_claims: _Optional[int] = ...) -> None: ...

class DeregisterEngineRequest(_message.Message):
    __slots__ = ("engine_id", "engine_epoch")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ...) -> None: ...

class DeregisterEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "include_gone", "with_holdings")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_GONE_FIELD_NUMBER: _ClassVar[int]
    WITH_HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    include_gone: bool
    with_holdings: bool
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., include_gone: bool = ..., with_holdings: bool = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "next_page_token")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    next_page_token: str
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("engine_id", "engine_epoch")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ...) -> None: ...

class Withdrawal(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Freed(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AttachEngineRequest(_message.Message):
    __slots__ = ("sequence", "hello", "announcements", "withdrawals", "renewals", "freed", "load", "sent_at_ms")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWALS_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_MS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hello: EngineHello
    announcements: _containers.RepeatedCompositeFieldContainer[_common_pb2.Announcement]
    withdrawals: _containers.RepeatedCompositeFieldContainer[Withdrawal]
    renewals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Renewal]
    freed: _containers.RepeatedCompositeFieldContainer[Freed]
    load: EngineLoad
    sent_at_ms: int
    def __init__(self, sequence: _Optional[int] = ..., hello: _Optional[_Union[EngineHello, _Mapping]] = ..., announcements: _Optional[_Iterable[_Union[_common_pb2.Announcement, _Mapping]]] = ..., withdrawals: _Optional[_Iterable[_Union[Withdrawal, _Mapping]]] = ..., renewals: _Optional[_Iterable[_Union[_common_pb2.Renewal, _Mapping]]] = ..., freed: _Optional[_Iterable[_Union[Freed, _Mapping]]] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., sent_at_ms: _Optional[int] = ...) -> None: ...

class WithdrawalResult(_message.Message):
    __slots__ = ("request_id", "outcome")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: _common_pb2.ReleaseOutcome
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[_common_pb2.ReleaseOutcome, str]] = ...) -> None: ...

class ReleaseOrder(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: ReleaseReason
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[_Union[ReleaseReason, str]] = ...) -> None: ...

class RenewalOrder(_message.Message):
    __slots__ = ("request_id", "ttl")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ttl: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AttachEngineResponse(_message.Message):
    __slots__ = ("acknowledged_sequence", "announcements", "withdrawals", "renewals", "release_orders", "draining", "renewal_orders")
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWALS_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_ORDERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_ORDERS_FIELD_NUMBER: _ClassVar[int]
    acknowledged_sequence: int
    announcements: _containers.RepeatedCompositeFieldContainer[_common_pb2.AnnouncementResult]
    withdrawals: _containers.RepeatedCompositeFieldContainer[WithdrawalResult]
    renewals: _containers.RepeatedCompositeFieldContainer[_common_pb2.RenewalResult]
    release_orders: _containers.RepeatedCompositeFieldContainer[ReleaseOrder]
    draining: bool
    renewal_orders: _containers.RepeatedCompositeFieldContainer[RenewalOrder]
    def __init__(self, acknowledged_sequence: _Optional[int] = ..., announcements: _Optional[_Iterable[_Union[_common_pb2.AnnouncementResult, _Mapping]]] = ..., withdrawals: _Optional[_Iterable[_Union[WithdrawalResult, _Mapping]]] = ..., renewals: _Optional[_Iterable[_Union[_common_pb2.RenewalResult, _Mapping]]] = ..., release_orders: _Optional[_Iterable[_Union[ReleaseOrder, _Mapping]]] = ..., draining: bool = ..., renewal_orders: _Optional[_Iterable[_Union[RenewalOrder, _Mapping]]] = ...) -> None: ...
