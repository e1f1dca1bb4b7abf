from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRecord(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "role", "endpoint", "data_parallel_rank", "total_blocks", "served_models", "draining", "profile", "registration_id", "lease_id", "registered_at_ms", "stream", "contact", "settings")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    role: int
    endpoint: str
    data_parallel_rank: int
    total_blocks: int
    served_models: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    profile: ProfileRecord
    registration_id: str
    lease_id: int
    registered_at_ms: int
    stream: int
    contact: int
    settings: SettingsRecord
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., role: _Optional[int] = ..., endpoint: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., total_blocks: _Optional[int] = ..., served_models: _Optional[_Iterable[str]] = ..., draining: bool = ..., profile: _Optional[_Union[ProfileRecord, _Mapping]] = ..., registration_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., registered_at_ms: _Optional[int] = ..., stream: _Optional[int] = ..., contact: _Optional[int] = ..., settings: _Optional[_Union[SettingsRecord, _Mapping]] = ...) -> None: ...

class SettingsRecord(_message.Message):
    __slots__ = ("kv_role", "kvplane_version", "side_channel_host", "side_channel_port", "prefix_caching", "kv_load_failure_policy", "kv_blocks_ttl_ms", "max_ttl_ms", "refusal", "kv_digest")
    KV_ROLE_FIELD_NUMBER: _ClassVar[int]
    KVPLANE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_HOST_FIELD_NUMBER: _ClassVar[int]
    SIDE_CHANNEL_PORT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    KV_DIGEST_FIELD_NUMBER: _ClassVar[int]
    kv_role: str
    kvplane_version: str
    side_channel_host: str
    side_channel_port: int
    prefix_caching: bool
    kv_load_failure_policy: str
    kv_blocks_ttl_ms: int
    max_ttl_ms: int
    refusal: str
    kv_digest: str
    def __init__(self, kv_role: _Optional[str] = ..., kvplane_version: _Optional[str] = ..., side_channel_host: _Optional[str] = ..., side_channel_port: _Optional[int] = ..., prefix_caching: bool = ..., kv_load_failure_policy: _Optional[str] = ..., kv_blocks_ttl_ms: _Optional[int] = ..., max_ttl_ms: _Optional[int] = ..., refusal: _Optional[str] = ..., kv_digest: _Optional[str] = ...) -> None: ...

class LoadRecord(_message.Message):
    __slots__ = ("engine_epoch", "running_requests", "waiting_requests", "free_blocks", "retained_blocks", "retained_conversations")
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    engine_epoch: int
    running_requests: int
    waiting_requests: int
    free_blocks: int
    retained_blocks: int
    retained_conversations: int
    def __init__(self, engine_epoch: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., free_blocks: _Optional[int] = ..., retained_blocks: _Optional[int] = ..., retained_conversations: _Optional[int] = ...) -> None: ...

class PulseRecord(_message.Message):
    __slots__ = ("time_ms", "version", "claim_life_ms", "location_ttl_ms", "engine_lease_ms")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_LIFE_MS_FIELD_NUMBER: _ClassVar[int]
    LOCATION_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    version: str
    claim_life_ms: int
    location_ttl_ms: int
    engine_lease_ms: int
    def __init__(self, time_ms: _Optional[int] = ..., version: _Optional[str] = ..., claim_life_ms: _Optional[int] = ..., location_ttl_ms: _Optional[int] = ..., engine_lease_ms: _Optional[int] = ...) -> None: ...

class ProfileRecord(_message.Message):
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

class LocationRecord(_message.Message):
    __slots__ = ("tenant_id", "model", "adapter", "conversation_id", "engine_id", "engine_epoch", "request_id", "turn", "token_count", "block_count", "kv_transfer_params", "chunk_tokens", "fingerprint", "deadline_ms", "not_before_ms", "endpoint", "data_parallel_rank", "wanted_until_ms")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    WANTED_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    model: str
    adapter: str
    conversation_id: str
    engine_id: str
    engine_epoch: int
    request_id: str
    turn: int
    token_count: int
    block_count: int
    kv_transfer_params: bytes
    chunk_tokens: int
    fingerprint: bytes
    deadline_ms: int
    not_before_ms: int
    endpoint: str
    data_parallel_rank: int
    wanted_until_ms: int
    def __init__(self, tenant_id: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., conversation_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., turn: _Optional[int] = ..., token_count: _Optional[int] = ..., block_count: _Optional[int] = ..., kv_transfer_params: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., not_before_ms: _Optional[int] = ..., endpoint: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., wanted_until_ms: _Optional[int] = ...) -> None: ...

class ClaimRecord(_message.Message):
    __slots__ = ("claim_id", "owner", "location", "deadline_ms")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    owner: str
    location: LocationRecord
    deadline_ms: int
    def __init__(self, claim_id: _Optional[str] = ..., owner: _Optional[str] = ..., location: _Optional[_Union[LocationRecord, _Mapping]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class TurnRecord(_message.Message):
    __slots__ = ("latest_turn", "request_id", "settled_turn", "in_flight_until_ms", "claimed_turn", "ended_turn", "turn_index", "settled_at_ms", "lease_class", "wanted_until_ms", "quota_turn")
    LATEST_TURN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SETTLED_TURN_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_TURN_FIELD_NUMBER: _ClassVar[int]
    ENDED_TURN_FIELD_NUMBER: _ClassVar[int]
    TURN_INDEX_FIELD_NUMBER: _ClassVar[int]
    SETTLED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_CLASS_FIELD_NUMBER: _ClassVar[int]
    WANTED_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_TURN_FIELD_NUMBER: _ClassVar[int]
    latest_turn: int
    request_id: str
    settled_turn: int
    in_flight_until_ms: int
    claimed_turn: int
    ended_turn: int
    turn_index: int
    settled_at_ms: int
    lease_class: int
    wanted_until_ms: int
    quota_turn: int
    def __init__(self, latest_turn: _Optional[int] = ..., request_id: _Optional[str] = ..., settled_turn: _Optional[int] = ..., in_flight_until_ms: _Optional[int] = ..., claimed_turn: _Optional[int] = ..., ended_turn: _Optional[int] = ..., turn_index: _Optional[int] = ..., settled_at_ms: _Optional[int] = ..., lease_class: _Optional[int] = ..., wanted_until_ms: _Optional[int] = ..., quota_turn: _Optional[int] = ...) -> None: ...

class HoldingRecord(_message.Message):
    __slots__ = ("location_key", "claim_id")
    LOCATION_KEY_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    location_key: bytes
    claim_id: str
    def __init__(self, location_key: _Optional[bytes] = ..., claim_id: _Optional[str] = ...) -> None: ...

class BegunRecord(_message.Message):
    __slots__ = ("turns_key",)
    TURNS_KEY_FIELD_NUMBER: _ClassVar[int]
    turns_key: bytes
    def __init__(self, turns_key: _Optional[bytes] = ...) -> None: ...

class OrderRecord(_message.Message):
    __slots__ = ("reason", "deadline_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    reason: int
    deadline_ms: int
    def __init__(self, reason: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class EpochRecord(_message.Message):
    __slots__ = ("engine_epoch",)
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine_epoch: int
    def __init__(self, engine_epoch: _Optional[int] = ...) -> None: ...

class SchemaRecord(_message.Message):
    __slots__ = ("schema", "least_reader")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    LEAST_READER_FIELD_NUMBER: _ClassVar[int]
    schema: int
    least_reader: int
    def __init__(self, schema: _Optional[int] = ..., least_reader: _Optional[int] = ...) -> None: ...
