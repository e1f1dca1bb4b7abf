from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocationEventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCATION_EVENT_TYPE_UNSPECIFIED: _ClassVar[LocationEventType]
    LOCATION_EVENT_TYPE_RETAINED: _ClassVar[LocationEventType]
    LOCATION_EVENT_TYPE_GONE: _ClassVar[LocationEventType]
LOCATION_EVENT_TYPE_UNSPECIFIED: LocationEventType
LOCATION_EVENT_TYPE_RETAINED: LocationEventType
LOCATION_EVENT_TYPE_GONE: LocationEventType

class AnnounceLocationRequest(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "announcement")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    announcement: _common_pb2.Announcement
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., announcement: _Optional[_Union[_common_pb2.Announcement, _Mapping]] = ...) -> None: ...

class AnnounceLocationResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: _common_pb2.AnnouncementResult
    def __init__(self, result: _Optional[_Union[_common_pb2.AnnouncementResult, _Mapping]] = ...) -> None: ...

class LookupLocationRequest(_message.Message):
    __slots__ = ("key", "fingerprint", "turn_group")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TURN_GROUP_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.ConversationKey
    fingerprint: _common_pb2.Fingerprint
    turn_group: str
    def __init__(self, key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., turn_group: _Optional[str] = ...) -> None: ...

class LookupLocationResponse(_message.Message):
    __slots__ = ("location", "miss_reason")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    location: _common_pb2.Location
    miss_reason: _common_pb2.MissReason
    def __init__(self, location: _Optional[_Union[_common_pb2.Location, _Mapping]] = ..., miss_reason: _Optional[_Union[_common_pb2.MissReason, str]] = ...) -> None: ...

class BeginTurnRequest(_message.Message):
    __slots__ = ("key", "request_id", "wait", "fingerprint", "turn_group")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TURN_GROUP_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.ConversationKey
    request_id: str
    wait: _duration_pb2.Duration
    fingerprint: _common_pb2.Fingerprint
    turn_group: str
    def __init__(self, key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., request_id: _Optional[str] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., turn_group: _Optional[str] = ...) -> None: ...

class BeginTurnResponse(_message.Message):
    __slots__ = ("turn", "location", "miss_reason", "key", "turn_index", "idle", "last_lease_class")
    TURN_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    LAST_LEASE_CLASS_FIELD_NUMBER: _ClassVar[int]
    turn: int
    location: _common_pb2.Location
    miss_reason: _common_pb2.MissReason
    key: _common_pb2.ConversationKey
    turn_index: int
    idle: _duration_pb2.Duration
    last_lease_class: int
    def __init__(self, turn: _Optional[int] = ..., location: _Optional[_Union[_common_pb2.Location, _Mapping]] = ..., miss_reason: _Optional[_Union[_common_pb2.MissReason, str]] = ..., key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., turn_index: _Optional[int] = ..., idle: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., last_lease_class: _Optional[int] = ...) -> None: ...

class ClaimLocationRequest(_message.Message):
    __slots__ = ("key", "request_id", "owner", "reader_engine_id", "wait", "turn")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    READER_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.ConversationKey
    request_id: str
    owner: str
    reader_engine_id: str
    wait: _duration_pb2.Duration
    turn: int
    def __init__(self, key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., request_id: _Optional[str] = ..., owner: _Optional[str] = ..., reader_engine_id: _Optional[str] = ..., wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., turn: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("claim_id", "location", "timeout", "owner")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    location: _common_pb2.Location
    timeout: _duration_pb2.Duration
    owner: str
    def __init__(self, claim_id: _Optional[str] = ..., location: _Optional[_Union[_common_pb2.Location, _Mapping]] = ..., timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., owner: _Optional[str] = ...) -> None: ...

class ClaimLocationResponse(_message.Message):
    __slots__ = ("claim", "miss_reason")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    miss_reason: _common_pb2.MissReason
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., miss_reason: _Optional[_Union[_common_pb2.MissReason, str]] = ...) -> None: ...

class TouchConversationRequest(_message.Message):
    __slots__ = ("key", "turn", "ttl")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.ConversationKey
    turn: int
    ttl: _duration_pb2.Duration
    def __init__(self, key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ..., turn: _Optional[int] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TouchConversationResponse(_message.Message):
    __slots__ = ("noted", "remaining")
    NOTED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    noted: bool
    remaining: _duration_pb2.Duration
    def __init__(self, noted: bool = ..., remaining: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EndConversation(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.ConversationKey
    def __init__(self, key: _Optional[_Union[_common_pb2.ConversationKey, _Mapping]] = ...) -> None: ...

class FinishClaim(_message.Message):
    __slots__ = ("claim_id", "owner")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    owner: str
    def __init__(self, claim_id: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class WithdrawLocation(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "request_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    request_id: str
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReleaseLocationRequest(_message.Message):
    __slots__ = ("end_conversation", "finish_claim", "withdraw")
    END_CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    FINISH_CLAIM_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    end_conversation: EndConversation
    finish_claim: FinishClaim
    withdraw: WithdrawLocation
    def __init__(self, end_conversation: _Optional[_Union[EndConversation, _Mapping]] = ..., finish_claim: _Optional[_Union[FinishClaim, _Mapping]] = ..., withdraw: _Optional[_Union[WithdrawLocation, _Mapping]] = ...) -> None: ...

class ReleaseLocationResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _common_pb2.ReleaseOutcome
    def __init__(self, outcome: _Optional[_Union[_common_pb2.ReleaseOutcome, str]] = ...) -> None: ...

class RenewLocationsRequest(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "renewals")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    renewals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Renewal]
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., renewals: _Optional[_Iterable[_Union[_common_pb2.Renewal, _Mapping]]] = ...) -> None: ...

class RenewLocationsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_common_pb2.RenewalResult]
    def __init__(self, results: _Optional[_Iterable[_Union[_common_pb2.RenewalResult, _Mapping]]] = ...) -> None: ...

class ListLocationsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "tenant_id", "engine_id", "model", "conversation_id_prefix")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    tenant_id: str
    engine_id: str
    model: str
    conversation_id_prefix: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., tenant_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., model: _Optional[str] = ..., conversation_id_prefix: _Optional[str] = ...) -> None: ...

class ListLocationsResponse(_message.Message):
    __slots__ = ("locations", "next_page_token", "revision")
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    locations: _containers.RepeatedCompositeFieldContainer[_common_pb2.Location]
    next_page_token: str
    revision: int
    def __init__(self, locations: _Optional[_Iterable[_Union[_common_pb2.Location, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class WatchLocationsRequest(_message.Message):
    __slots__ = ("from_revision", "tenant_id")
    FROM_REVISION_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    from_revision: int
    tenant_id: str
    def __init__(self, from_revision: _Optional[int] = ..., tenant_id: _Optional[str] = ...) -> None: ...

class LocationEvent(_message.Message):
    __slots__ = ("type", "location")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    type: LocationEventType
    location: _common_pb2.Location
    def __init__(self, type: _Optional[_Union[LocationEventType, str]] = ..., location: _Optional[_Union[_common_pb2.Location, _Mapping]] = ...) -> None: ...

class WatchLocationsResponse(_message.Message):
    __slots__ = ("revision", "events")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    events: _containers.RepeatedCompositeFieldContainer[LocationEvent]
    def __init__(self, revision: _Optional[int] = ..., events: _Optional[_Iterable[_Union[LocationEvent, _Mapping]]] = ...) -> None: ...

class TurnsOperation(_message.Message):
    __slots__ = ("id", "lookup", "begin_turn", "claim", "release", "touch", "traceparent")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TURN_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupLocationRequest
    begin_turn: BeginTurnRequest
    claim: ClaimLocationRequest
    release: ReleaseLocationRequest
    touch: TouchConversationRequest
    traceparent: str
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupLocationRequest, _Mapping]] = ..., begin_turn: _Optional[_Union[BeginTurnRequest, _Mapping]] = ..., claim: _Optional[_Union[ClaimLocationRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseLocationRequest, _Mapping]] = ..., touch: _Optional[_Union[TouchConversationRequest, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class TurnsRequest(_message.Message):
    __slots__ = ("operations",)
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[TurnsOperation]
    def __init__(self, operations: _Optional[_Iterable[_Union[TurnsOperation, _Mapping]]] = ...) -> None: ...

class TurnsError(_message.Message):
    __slots__ = ("code", "message", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class TurnsResult(_message.Message):
    __slots__ = ("id", "lookup", "begin_turn", "claim", "release", "error", "touch")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TURN_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupLocationResponse
    begin_turn: BeginTurnResponse
    claim: ClaimLocationResponse
    release: ReleaseLocationResponse
    error: TurnsError
    touch: TouchConversationResponse
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupLocationResponse, _Mapping]] = ..., begin_turn: _Optional[_Union[BeginTurnResponse, _Mapping]] = ..., claim: _Optional[_Union[ClaimLocationResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseLocationResponse, _Mapping]] = ..., error: _Optional[_Union[TurnsError, _Mapping]] = ..., touch: _Optional[_Union[TouchConversationResponse, _Mapping]] = ...) -> None: ...

class TurnsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[TurnsResult]
    def __init__(self, results: _Optional[_Iterable[_Union[TurnsResult, _Mapping]]] = ...) -> None: ...
