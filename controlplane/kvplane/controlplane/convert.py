"""Between the wire's messages and the control plane's values. What comes in has been validated."""

from __future__ import annotations

from typing import cast

from google.protobuf.duration_pb2 import Duration

from kvplane.controlplane import model as m
from kvplane.controlplane.engines import LiveEngine
from kvplane.controlplane.holdings import Holdings
from kvplane.controlplane.turns import BegunTurn
from kvplane.v1 import common_pb2, engine_pb2, location_pb2


def fingerprint_in(wire: common_pb2.Fingerprint) -> m.Fingerprint:
    """Return a fingerprint as a value."""
    return m.Fingerprint(wire.chunk_tokens, wire.chain)


def duration(seconds: float) -> Duration:
    """Return seconds as a Duration; below zero becomes zero."""
    milliseconds = int(seconds * 1000)
    if milliseconds <= 0:
        return Duration()
    whole, rest = divmod(milliseconds, 1000)
    return Duration(seconds=whole, nanos=rest * 1_000_000)


def key_in(wire: common_pb2.ConversationKey) -> m.ConversationKey:
    """Return a key as a value."""
    return m.ConversationKey(wire.tenant_id, wire.model, wire.adapter, wire.conversation_id)


def spec_in(wire: engine_pb2.EngineSpec) -> m.EngineSpec:
    """Return an engine's spec as a value."""
    return m.EngineSpec(
        engine_id=wire.engine_id,
        role=m.EngineRole(wire.role),
        profile=m.EngineProfile(**m.members(wire.profile, m.EngineProfile)),
        endpoint=wire.endpoint.rstrip("/"),
        data_parallel_rank=wire.data_parallel_rank,
        total_blocks=wire.total_blocks,
        served_models=tuple(wire.served_models),
        settings=_settings_in(wire.settings) if wire.HasField("settings") else None,
    )


_SPANS = ("kv_blocks_ttl", "max_ttl")
"""Members of an engine's settings that are durations on the wire."""


def _settings_in(wire: engine_pb2.EngineSettings) -> m.EngineSettings:
    members = {name: getattr(wire, name) for name in wire.DESCRIPTOR.fields_by_name if name not in _SPANS}
    if not wire.HasField("prefix_caching"):
        members["prefix_caching"] = None
    members |= {f"{name}_ms": getattr(wire, name).ToMilliseconds() for name in _SPANS}
    return m.EngineSettings(**members)


def _settings_out(value: m.EngineSettings) -> engine_pb2.EngineSettings:
    members = m.members(value, m.EngineSettings)
    members |= {name: duration(ms / 1000) for name in _SPANS if (ms := members.pop(f"{name}_ms"))}
    return engine_pb2.EngineSettings(**members)


def load_in(wire: engine_pb2.EngineLoad) -> m.EngineLoad:
    """Return a load as a value."""
    return m.EngineLoad(**m.members(wire, m.EngineLoad))


def engine_out(live: LiveEngine) -> engine_pb2.Engine:
    """Return an engine as a message."""
    engine, spec, load = live.engine, live.engine.spec, live.load
    wire = engine_pb2.Engine(
        spec=engine_pb2.EngineSpec(
            engine_id=spec.engine_id,
            role=_ROLES[spec.role],
            profile=engine_pb2.EngineProfile(**m.members(spec.profile, m.EngineProfile)),
            endpoint=spec.endpoint,
            data_parallel_rank=spec.data_parallel_rank,
            total_blocks=spec.total_blocks,
            served_models=spec.served_models,
            settings=_settings_out(spec.settings) if spec.settings is not None else None,
        ),
        engine_epoch=engine.engine_epoch,
        draining=engine.draining,
        attached=live.attached,
        load=engine_pb2.EngineLoad(**m.members(load, m.EngineLoad)) if load is not None else None,
        contact=_CONTACTS[live.contact],
        registered=duration(live.registered_s),
        announcements=live.announcements,
    )
    if live.last_seen_s is not None:
        wire.last_seen.CopyFrom(duration(live.last_seen_s))
    return wire


def gone_out(engine_id: str, engine_epoch: int) -> engine_pb2.Engine:
    """Return an engine that is no more as a message."""
    return engine_pb2.Engine(
        spec=engine_pb2.EngineSpec(engine_id=engine_id),
        engine_epoch=engine_epoch,
        contact=engine_pb2.ENGINE_CONTACT_GONE,
    )


def holdings_out(value: Holdings) -> engine_pb2.EngineHoldings:
    """Return what an engine holds as a message."""
    return engine_pb2.EngineHoldings(**value._asdict())


_CONTACTS = {
    m.EngineContact.UNARY: engine_pb2.ENGINE_CONTACT_UNARY,
    m.EngineContact.ATTACHED: engine_pb2.ENGINE_CONTACT_ATTACHED,
    m.EngineContact.SILENT: engine_pb2.ENGINE_CONTACT_SILENT,
}

_ROLES = {
    m.EngineRole.PREFILL: engine_pb2.ENGINE_ROLE_PREFILL,
    m.EngineRole.DECODE: engine_pb2.ENGINE_ROLE_DECODE,
    m.EngineRole.BOTH: engine_pb2.ENGINE_ROLE_BOTH,
}


def announcement_in(wire: common_pb2.Announcement, delay_s: float = 0.0) -> m.Announcement:
    """Return an announcement as a value; `delay_s` was spent on the way and is taken off its life."""
    ttl = wire.ttl
    return m.Announcement(
        key_in(wire.key),
        wire.request_id,
        wire.turn,
        wire.token_count,
        wire.block_count,
        wire.kv_transfer_params,
        fingerprint_in(wire.fingerprint),
        max(0.0, ttl.seconds + ttl.nanos / 1e9 - delay_s),
        wire.endpoint.rstrip("/"),
        wire.reannounced,
        wire.lease_class,
    )


# Enums of the wire are plain numbers to Python, and classes of their own to the type checker.
_ANNOUNCE_OUTCOMES = {
    value: cast(
        "common_pb2.AnnounceOutcome", common_pb2.AnnounceOutcome.Value(f"ANNOUNCE_OUTCOME_{value.name}")
    )
    for value in m.AnnounceOutcome
}
_RELEASE_OUTCOMES = {
    value: cast("common_pb2.ReleaseOutcome", common_pb2.ReleaseOutcome.Value(f"RELEASE_OUTCOME_{value.name}"))
    for value in m.ReleaseOutcome
}
_RELEASE_REASONS = {
    value: cast("engine_pb2.ReleaseReason", engine_pb2.ReleaseReason.Value(f"RELEASE_REASON_{value.name}"))
    for value in m.ReleaseReason
}
_MISS_REASONS = {
    value: cast("common_pb2.MissReason", common_pb2.MissReason.Value(f"MISS_REASON_{value.name}"))
    for value in m.MissReason
}


def write_announced(wire: common_pb2.AnnouncementResult, request_id: str, value: m.Announced) -> None:
    """Write what became of an announcement into an empty message."""
    wire.request_id = request_id
    wire.outcome = _ANNOUNCE_OUTCOMES[value.outcome]
    _write_milliseconds(wire.granted_ttl, int(value.granted_ttl_s * 1000))
    wire.detail = value.detail


def renewed_out(request_id: str, granted_s: float | None) -> common_pb2.RenewalResult:
    """Return what became of a renewal as a message."""
    return common_pb2.RenewalResult(
        request_id=request_id, renewed=granted_s is not None, granted_ttl=duration(granted_s or 0.0)
    )


def outcome_out(value: m.ReleaseOutcome) -> common_pb2.ReleaseOutcome:
    """Return what became of a release as the wire has it."""
    return _RELEASE_OUTCOMES[value]


def miss_out(value: m.MissReason) -> common_pb2.MissReason:
    """Return why nothing is offered as the wire has it."""
    return _MISS_REASONS[value]


def order_out(value: m.Order) -> engine_pb2.ReleaseOrder:
    """Return an order as a message."""
    reason = _RELEASE_REASONS[value.reason]
    return engine_pb2.ReleaseOrder(request_id=value.holder.request_id, reason=reason)


def renewal_order_out(request_id: str, ttl_ms: int) -> engine_pb2.RenewalOrder:
    """Return a wish for a longer life as a message."""
    order = engine_pb2.RenewalOrder(request_id=request_id)
    _write_milliseconds(order.ttl, ttl_ms)
    return order


# What may be large is written in place: a message handed to another's constructor is copied.


def write_location(
    wire: common_pb2.Location,
    value: m.Location,
    now_ms: int,
    revision: int = 0,
    *,
    claimed: bool = False,
    brief: bool = False,
) -> None:
    """Write a location into an empty message; a brief one goes without params and fingerprint."""
    holder = value.holder
    _write_key(wire.key, value.key)
    wire.engine_id = holder.engine_id
    wire.engine_epoch = holder.engine_epoch
    wire.request_id = holder.request_id
    wire.turn = value.turn
    wire.token_count = value.token_count
    wire.block_count = value.block_count
    if not brief:
        wire.kv_transfer_params = value.kv_transfer_params
        fingerprint = wire.fingerprint
        fingerprint.chunk_tokens = value.fingerprint.chunk_tokens
        fingerprint.chain = value.fingerprint.chain
    _write_milliseconds(wire.remaining, value.deadline_ms - now_ms)
    wire.state = common_pb2.LOCATION_STATE_CLAIMED if claimed else common_pb2.LOCATION_STATE_RETAINED
    wire.revision = revision
    wire.endpoint = value.endpoint
    wire.data_parallel_rank = value.data_parallel_rank


def _write_key(wire: common_pb2.ConversationKey, value: m.ConversationKey) -> None:
    """Write a key into an empty message."""
    wire.tenant_id = value.tenant_id
    wire.model = value.model
    wire.adapter = value.adapter
    wire.conversation_id = value.conversation_id


def location_out(
    value: m.Location, *, now_ms: int, revision: int = 0, claimed: bool = False, brief: bool = False
) -> common_pb2.Location:
    """Return a location as a message of its own."""
    wire = common_pb2.Location()
    write_location(wire, value, now_ms, revision, claimed=claimed, brief=brief)
    return wire


def write_claim(wire: location_pb2.Claim, value: m.Claim, now_ms: int) -> None:
    """Write a claim into an empty message."""
    wire.claim_id = value.claim_id
    wire.owner = value.owner
    write_location(wire.location, value.location, now_ms, claimed=True)
    _write_milliseconds(wire.timeout, value.deadline_ms - now_ms)


def write_begun(wire: location_pb2.BeginTurnResponse, value: BegunTurn, *, key: bool, now_ms: int) -> None:
    """Write a begun turn into an empty message, with its `key` or without."""
    wire.turn = value.turn
    known = value.known
    if isinstance(known, m.MissReason):
        wire.miss_reason = _MISS_REASONS[known]
    else:
        write_location(wire.location, known.location, now_ms, known.revision)
    if key:
        _write_key(wire.key, value.key)
    wire.turn_index = value.turn_index
    wire.last_lease_class = value.lease_class
    if value.idle_ms is not None:
        wire.idle.SetInParent()
        _write_milliseconds(wire.idle, value.idle_ms)


def write_touched(wire: location_pb2.TouchConversationResponse, value: m.Touched) -> None:
    """Write what a touch found into an empty message."""
    wire.noted = value.noted
    if value.remaining_ms is not None:
        wire.remaining.SetInParent()
        _write_milliseconds(wire.remaining, value.remaining_ms)


def _write_milliseconds(wire: Duration, milliseconds: int) -> None:
    """Write a duration into an empty message; below zero becomes zero."""
    wire.seconds, rest = divmod(max(0, milliseconds), 1000)
    wire.nanos = rest * 1_000_000
