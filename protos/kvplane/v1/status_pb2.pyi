from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaneSettings(_message.Message):
    __slots__ = ("location_ttl", "min_remaining", "claim_timeout", "claim_grace", "engine_lease", "max_staleness", "max_conversations")
    LOCATION_TTL_FIELD_NUMBER: _ClassVar[int]
    MIN_REMAINING_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    CLAIM_GRACE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LEASE_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    location_ttl: _duration_pb2.Duration
    min_remaining: _duration_pb2.Duration
    claim_timeout: _duration_pb2.Duration
    claim_grace: _duration_pb2.Duration
    engine_lease: _duration_pb2.Duration
    max_staleness: _duration_pb2.Duration
    max_conversations: int
    def __init__(self, location_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., min_remaining: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., claim_timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., claim_grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., engine_lease: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_staleness: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_conversations: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("shared", "latency", "staleness", "trouble", "caution", "version", "size_bytes", "quota_bytes")
    SHARED_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    CAUTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    shared: bool
    latency: _duration_pb2.Duration
    staleness: _duration_pb2.Duration
    trouble: str
    caution: str
    version: str
    size_bytes: int
    quota_bytes: int
    def __init__(self, shared: bool = ..., latency: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., staleness: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., trouble: _Optional[str] = ..., caution: _Optional[str] = ..., version: _Optional[str] = ..., size_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica_id", "version", "age")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    version: str
    age: _duration_pb2.Duration
    def __init__(self, replica_id: _Optional[str] = ..., version: _Optional[str] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("replica_id", "version", "serving", "uptime", "fleet_time", "clock_time", "settings", "store", "replicas", "counts")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    FLEET_TIME_FIELD_NUMBER: _ClassVar[int]
    CLOCK_TIME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    version: str
    serving: bool
    uptime: _duration_pb2.Duration
    fleet_time: _timestamp_pb2.Timestamp
    clock_time: _timestamp_pb2.Timestamp
    settings: PlaneSettings
    store: StoreStatus
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    counts: PlaneCounts
    def __init__(self, replica_id: _Optional[str] = ..., version: _Optional[str] = ..., serving: bool = ..., uptime: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., fleet_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., clock_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., settings: _Optional[_Union[PlaneSettings, _Mapping]] = ..., store: _Optional[_Union[StoreStatus, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., counts: _Optional[_Union[PlaneCounts, _Mapping]] = ...) -> None: ...

class PlaneCounts(_message.Message):
    __slots__ = ("turns", "hits", "misses", "claims", "claims_missed", "announcements")
    class MissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TURNS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_MISSED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    turns: int
    hits: int
    misses: _containers.ScalarMap[str, int]
    claims: int
    claims_missed: int
    announcements: int
    def __init__(self, turns: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[_Mapping[str, int]] = ..., claims: _Optional[int] = ..., claims_missed: _Optional[int] = ..., announcements: _Optional[int] = ...) -> None: ...
