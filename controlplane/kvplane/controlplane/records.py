"""Between stored records and the control plane's values.

A record may stem from a newer version and have fields this one does not know. Values that are written back
(locations, claims, engines, turns) keep them in their member `unknown`, and dumping puts them back; the
other records are never written again as read. On the hot path: no loops over fields, one pass each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvplane.controlplane import model as m
from kvplane.storage.v1 import records_pb2 as pb

T = TypeVar("T")


_REASONS = {reason.value: reason for reason in m.ReleaseReason}
_MAX_REASON = 64
"""Newer versions may have more reasons than this one; not that many."""
_NUMBER_BITS = 62
"""Turns, epochs and times follow the clock's milliseconds; what needs more is damaged or forged."""
_NO_NUMBER = "a number is negative or impossibly large"
_COUNT_BITS = 40
"""More than a fingerprint can stand for; of a million locations the sum is a number still."""
_LOAD_BITS = 31


class UnreadableRecordError(ValueError):
    """Bytes that are no such record, or one of a newer version that this one cannot make sense of."""


def checked(load: Callable[[bytes], T], raw: bytes) -> T:
    """Return `load(raw)`; raises UnreadableRecordError for what it cannot read. For untrusted bytes."""
    try:
        return load(raw)
    except (DecodeError, ValueError) as error:
        raise UnreadableRecordError(str(error)) from None


def _unknown(record: Message) -> bytes:
    """Return the fields of a record that its type does not define, serialized. For those that have some."""
    rest = type(record)()
    rest.CopyFrom(record)
    for name in record.DESCRIPTOR.fields_by_name:
        rest.ClearField(name)
    return rest.SerializeToString()


def dump_location(value: m.Location) -> bytes:
    """Return a location as stored."""
    record = pb.LocationRecord()
    _fill_location(record, value)
    raw = record.SerializeToString()
    _seen[:] = [(raw, record), *_seen[:1]]
    return raw


def load_location(raw: bytes) -> m.Location:
    """Return a stored location. Raises UnreadableRecordError for numbers as `load_turns` does."""
    return _location_value(_location_record(raw))


_seen: list[tuple[bytes, pb.LocationRecord]] = []
"""The last two: who decides, and all who watch what comes of it, look at the same bytes, before and after."""


def _location_record(raw: bytes) -> pb.LocationRecord:
    for known, record in _seen:
        if known is raw:
            return record
    record = pb.LocationRecord.FromString(raw)
    _seen[:] = [(raw, record), *_seen[:1]]
    return record


# What those who watch locations want to know of each, without making values of all that is in it.


def location_deadline_ms(raw: bytes) -> int:
    """Return the deadline of a stored location."""
    return _location_record(raw).deadline_ms


def location_lacks_ms(raw: bytes) -> int:
    """Return by how much a stored location's life falls short of what is wanted; may be negative."""
    record = _location_record(raw)
    return record.wanted_until_ms - record.deadline_ms


def location_wish(raw: bytes) -> tuple[m.Holder, int]:
    """Return whose blocks a stored location's are, and until when they are wanted."""
    record = _location_record(raw)
    holder = m.Holder(record.engine_id, record.engine_epoch, record.request_id)
    return holder, record.wanted_until_ms


def location_tokens(raw: bytes) -> tuple[int, int, bytes]:
    """Return the tokens of a stored location's chunks, of the whole of it, and its fingerprint's chain."""
    record = _location_record(raw)
    return record.chunk_tokens, record.token_count, record.fingerprint


def location_size(raw: bytes) -> tuple[str, int, int]:
    """Return who holds a stored location, how many tokens, and how many blocks."""
    record = _location_record(raw)
    if (record.token_count | record.block_count) >> _COUNT_BITS:
        raise UnreadableRecordError(_NO_NUMBER)
    return record.engine_id, record.token_count, record.block_count


def location_turn(raw: bytes) -> tuple[int, int]:
    """Return the turn of a stored location, and how many blocks it holds."""
    record = _location_record(raw)
    return record.turn, record.block_count


def location_sizes(raw: bytes) -> tuple[str, str, int, int]:
    """Return whose a stored location is, engine and tenant, and its tokens and blocks."""
    return _sizes(_location_record(raw))


def _sizes(record: pb.LocationRecord) -> tuple[str, str, int, int]:
    return record.engine_id, record.tenant_id, record.token_count, record.block_count


_claim_seen: list[tuple[bytes, pb.ClaimRecord]] = []
"""The last one, likewise."""


def _claim_record(raw: bytes) -> pb.ClaimRecord:
    for known, record in _claim_seen:
        if known is raw:
            return record
    record = pb.ClaimRecord.FromString(raw)
    _claim_seen[:] = [(raw, record)]
    return record


def claim_deadline_ms(raw: bytes) -> int:
    """Return the deadline of a stored claim."""
    return _claim_record(raw).deadline_ms


def claim_sizes(raw: bytes) -> tuple[str, str, int, int]:
    """Return of a claimed location what `location_sizes` does of one."""
    return _sizes(_claim_record(raw).location)


def _fill_location(record: pb.LocationRecord, value: m.Location) -> None:
    """Fill an empty record. In place: handed to a constructor, a location would be copied into its claim."""
    key, holder, fingerprint = value.key, value.holder, value.fingerprint
    record.tenant_id = key.tenant_id
    record.model = key.model
    record.adapter = key.adapter
    record.conversation_id = key.conversation_id
    record.engine_id = holder.engine_id
    record.engine_epoch = holder.engine_epoch
    record.request_id = holder.request_id
    record.turn = value.turn
    record.token_count = value.token_count
    record.block_count = value.block_count
    record.kv_transfer_params = value.kv_transfer_params
    record.chunk_tokens = fingerprint.chunk_tokens
    record.fingerprint = fingerprint.chain
    record.deadline_ms = value.deadline_ms
    record.not_before_ms = value.not_before_ms
    record.endpoint = value.endpoint
    record.data_parallel_rank = value.data_parallel_rank
    record.wanted_until_ms = value.wanted_until_ms
    if value.unknown:
        record.MergeFromString(value.unknown)


def _location_value(record: pb.LocationRecord) -> m.Location:
    value = m.Location(
        m.ConversationKey(record.tenant_id, record.model, record.adapter, record.conversation_id),
        m.Holder(record.engine_id, record.engine_epoch, record.request_id),
        record.turn,
        record.token_count,
        record.block_count,
        record.kv_transfer_params,
        m.Fingerprint(record.chunk_tokens, record.fingerprint),
        record.deadline_ms,
        record.not_before_ms,
        record.endpoint,
        record.data_parallel_rank,
        record.wanted_until_ms,
        _unknown(record) if len(UnknownFieldSet(record)) else b"",
    )
    if (  # as in load_turns
        (
            value.holder.engine_epoch
            | value.turn
            | value.deadline_ms
            | value.not_before_ms
            | value.data_parallel_rank
            | value.wanted_until_ms
        )
        >> _NUMBER_BITS
        or (value.token_count | value.block_count | value.fingerprint.chunk_tokens) >> _COUNT_BITS
    ):
        raise UnreadableRecordError(_NO_NUMBER)
    return value


def dump_claim(value: m.Claim) -> bytes:
    """Return a claim as stored."""
    record = pb.ClaimRecord()
    record.claim_id = value.claim_id
    record.owner = value.owner
    record.deadline_ms = value.deadline_ms
    _fill_location(record.location, value.location)
    if value.unknown:
        record.MergeFromString(value.unknown)
    raw = record.SerializeToString()
    _claim_seen[:] = [(raw, record)]
    return raw


def load_claim(raw: bytes) -> m.Claim:
    """Return a stored claim."""
    record = pb.ClaimRecord.FromString(raw)
    return m.Claim(
        record.claim_id,
        record.owner,
        _location_value(record.location),
        record.deadline_ms,
        _unknown(record) if len(UnknownFieldSet(record)) else b"",
    )


def dump_engine(value: m.Engine) -> bytes:
    """Return an engine as stored."""
    spec = value.spec
    record = pb.EngineRecord(
        engine_id=spec.engine_id,
        engine_epoch=value.engine_epoch,
        role=spec.role,
        endpoint=spec.endpoint,
        data_parallel_rank=spec.data_parallel_rank,
        total_blocks=spec.total_blocks,
        served_models=spec.served_models,
        draining=value.draining,
        registration_id=value.registration_id,
        lease_id=value.lease_id,
        registered_at_ms=value.registered_at_ms,
        stream=value.stream,
        contact=value.contact,
        profile=pb.ProfileRecord(**m.members(spec.profile, m.EngineProfile)),
    )
    if spec.settings is not None:
        record.settings.CopyFrom(pb.SettingsRecord(**m.members(spec.settings, m.EngineSettings)))
    if value.unknown:
        record.MergeFromString(value.unknown)
    return record.SerializeToString()


def load_engine(raw: bytes) -> m.Engine:
    """Return a stored engine. Its `unknown` holds what is unknown of its profile and settings, too."""
    record = pb.EngineRecord.FromString(raw)
    profile, settings = record.profile, None
    unknown = b""
    if len(UnknownFieldSet(profile)):
        rest = pb.EngineRecord(profile=pb.ProfileRecord.FromString(_unknown(profile)))
        unknown = rest.SerializeToString()
    if record.HasField("settings"):
        settings = _settings(record.settings)
        if len(UnknownFieldSet(record.settings)):
            rest = pb.EngineRecord(settings=pb.SettingsRecord.FromString(_unknown(record.settings)))
            unknown += rest.SerializeToString()
    if len(UnknownFieldSet(record)):
        unknown += _unknown(record)
    return m.Engine(
        spec=m.EngineSpec(
            engine_id=record.engine_id,
            role=m.EngineRole(record.role),
            profile=m.EngineProfile(**m.members(profile, m.EngineProfile)),
            endpoint=record.endpoint,
            data_parallel_rank=record.data_parallel_rank,
            total_blocks=record.total_blocks,
            served_models=tuple(record.served_models),
            settings=settings,
        ),
        engine_epoch=record.engine_epoch,
        lease_id=record.lease_id,
        registered_at_ms=record.registered_at_ms,
        registration_id=record.registration_id,
        draining=record.draining,
        stream=record.stream,
        contact=m.EngineContact(record.contact),
        unknown=unknown,
    )


def _settings(record: pb.SettingsRecord) -> m.EngineSettings:
    members = m.members(record, m.EngineSettings)
    if not record.HasField("prefix_caching"):
        members["prefix_caching"] = None
    return m.EngineSettings(**members)


def dump_load(engine_epoch: int, value: m.EngineLoad) -> bytes:
    """Return an incarnation's load as stored."""
    record = pb.LoadRecord(engine_epoch=engine_epoch, **m.members(value, m.EngineLoad))
    return record.SerializeToString()


def load_load(raw: bytes) -> tuple[int, m.EngineLoad]:
    """Return a stored load and whose incarnation's it is. Raises UnreadableRecordError as load_turns does."""
    record = pb.LoadRecord.FromString(raw)
    value = m.EngineLoad(**m.members(record, m.EngineLoad))
    if (value.free_blocks | value.retained_blocks) >> _NUMBER_BITS:
        raise UnreadableRecordError(_NO_NUMBER)
    if (value.running_requests | value.waiting_requests | value.retained_conversations) >> _LOAD_BITS:
        raise UnreadableRecordError(_NO_NUMBER)
    return record.engine_epoch, value


def dump_pulse(value: m.Pulse) -> bytes:
    """Return a replica's sign of life as stored."""
    terms = {} if value.terms is None else value.terms._asdict()
    return pb.PulseRecord(time_ms=value.time_ms, version=value.version, **terms).SerializeToString()


def load_pulse(raw: bytes) -> m.Pulse:
    """Return a replica's sign of life."""
    record = pb.PulseRecord.FromString(raw)
    terms = m.Terms(record.claim_life_ms, record.location_ttl_ms, record.engine_lease_ms)
    return m.Pulse(record.time_ms, record.version, terms if record.claim_life_ms else None)


def dump_turns(value: m.Turns) -> bytes:
    """Return a conversation's turns as stored."""
    record = pb.TurnRecord()
    record.latest_turn = value.latest_turn
    record.request_id = value.request_id
    record.settled_turn = value.settled_turn
    record.in_flight_until_ms = value.in_flight_until_ms
    record.claimed_turn = value.claimed_turn
    record.ended_turn = value.ended_turn
    record.turn_index = value.turn_index
    record.settled_at_ms = value.settled_at_ms
    record.lease_class = value.lease_class
    record.wanted_until_ms = value.wanted_until_ms
    record.quota_turn = value.quota_turn
    if value.unknown:
        record.MergeFromString(value.unknown)
    return record.SerializeToString()


def load_turns(raw: bytes) -> m.Turns:
    """Return a conversation's stored turns.

    Raises UnreadableRecordError for negative numbers and such as no clock reaches: they would outdo all later
    ones, for ever.
    """
    record = pb.TurnRecord.FromString(raw)
    value = m.Turns(
        record.latest_turn,
        record.request_id,
        record.settled_turn,
        record.in_flight_until_ms,
        record.claimed_turn,
        record.ended_turn,
        record.turn_index,
        record.settled_at_ms,
        record.lease_class,
        record.wanted_until_ms,
        record.quota_turn,
        _unknown(record) if len(UnknownFieldSet(record)) else b"",
    )
    if (  # one test for all, of the value's members, which are read faster than the record's: a hot path
        value.latest_turn
        | value.settled_turn
        | value.in_flight_until_ms
        | value.claimed_turn
        | value.ended_turn
        | value.turn_index
        | value.settled_at_ms
        | value.lease_class
        | value.wanted_until_ms
        | value.quota_turn
    ) >> _NUMBER_BITS:
        raise UnreadableRecordError(_NO_NUMBER)
    return value


def dump_holding(*, location_key: bytes = b"", claim_id: str = "") -> bytes:
    """Return where a holder's blocks are noted; give exactly one."""
    if claim_id:
        return pb.HoldingRecord(claim_id=claim_id).SerializeToString()
    return pb.HoldingRecord(location_key=location_key).SerializeToString()


def load_holding(raw: bytes) -> tuple[bytes, str]:
    """Return (location key, "") of retained blocks, or (b"", claim id) of claimed ones."""
    record = pb.HoldingRecord.FromString(raw)
    return record.location_key, record.claim_id


def dump_begun(turns_key: bytes) -> bytes:
    """Return which conversation a turn is of, as stored."""
    return pb.BegunRecord(turns_key=turns_key).SerializeToString()


def load_begun(raw: bytes) -> bytes:
    """Return the store key of the turns of the conversation that a turn is of."""
    return pb.BegunRecord.FromString(raw).turns_key


def dump_order(value: m.Order) -> bytes:
    """Return an order as stored; its holder is in the key."""
    return pb.OrderRecord(reason=value.reason, deadline_ms=value.deadline_ms).SerializeToString()


def load_order(holder: m.Holder, raw: bytes) -> m.Order:
    """Return a stored order. A reason that only a newer version has counts as refused: freed it is anyhow."""
    record = pb.OrderRecord.FromString(raw)
    reason = _REASONS.get(record.reason)
    if reason is None:
        if not 0 < record.reason <= _MAX_REASON:
            raise UnreadableRecordError("it gives no reason")
        reason = m.ReleaseReason.REFUSED
    return m.Order(holder, reason, record.deadline_ms)


def dump_epoch(engine_epoch: int) -> bytes:
    """Return an engine id's last epoch as stored."""
    return pb.EpochRecord(engine_epoch=engine_epoch).SerializeToString()


def load_epoch(raw: bytes) -> int:
    """Return an engine id's last epoch. Raises UnreadableRecordError for numbers as `load_turns` does."""
    engine_epoch = pb.EpochRecord.FromString(raw).engine_epoch
    if engine_epoch >> _NUMBER_BITS:
        raise UnreadableRecordError(_NO_NUMBER)
    return engine_epoch


def dump_schema(schema: int, least_reader: int, before: bytes = b"") -> bytes:
    """Return the store's schema version as stored; what else the record `before` says is kept."""
    record = pb.SchemaRecord.FromString(before)
    record.schema = schema
    record.least_reader = least_reader
    return record.SerializeToString()


def load_schema(raw: bytes) -> tuple[int, int]:
    """Return (schema, least reader) of the store."""
    record = pb.SchemaRecord.FromString(raw)
    return record.schema, record.least_reader
