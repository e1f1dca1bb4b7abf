"""Between the wire's messages and the client's values."""

from __future__ import annotations

import dataclasses
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvplane.client import model as m
from kvplane.v1 import common_pb2, engine_pb2, location_pb2, status_pb2

_ROLES = {
    m.EngineRole.PREFILL: engine_pb2.ENGINE_ROLE_PREFILL,
    m.EngineRole.DECODE: engine_pb2.ENGINE_ROLE_DECODE,
    m.EngineRole.BOTH: engine_pb2.ENGINE_ROLE_BOTH,
}

# By number: asked for the name of one that it does not know, protobuf raises.
_MISSES = {common_pb2.MissReason.Value(f"MISS_REASON_{reason.name}"): reason for reason in m.MissReason}
_OUTCOMES = {
    common_pb2.AnnounceOutcome.Value(f"ANNOUNCE_OUTCOME_{outcome.name}"): outcome
    for outcome in m.AnnounceOutcome
}
_RELEASED = {
    common_pb2.ReleaseOutcome.Value(f"RELEASE_OUTCOME_{outcome.name}"): outcome
    for outcome in m.ReleaseOutcome
}
_RELEASES = {
    engine_pb2.ReleaseReason.Value(f"RELEASE_REASON_{reason.name}"): reason for reason in m.ReleaseReason
}


def _members(source: object, kind: type) -> dict[str, Any]:
    """Return those attributes of `source` that a dataclass has as fields: both sides name them alike."""
    return {member.name: getattr(source, member.name) for member in dataclasses.fields(kind)}


def duration(seconds: float) -> Duration:
    """Return seconds (to the nanosecond) as a Duration."""
    value = Duration()
    value.FromNanoseconds(round(seconds * 1e9))
    return value


def write_duration(wire: Duration, seconds: float) -> None:
    """Write seconds (to the nanosecond) into a message."""
    wire.FromNanoseconds(round(seconds * 1e9))


def seconds(value: Duration) -> float:
    """Return a Duration as seconds."""
    return value.seconds + value.nanos / 1e9


def key_to_wire(key: m.ConversationKey) -> common_pb2.ConversationKey:
    """Return the key as a message."""
    return common_pb2.ConversationKey(
        tenant_id=key.tenant_id, model=key.model, adapter=key.adapter, conversation_id=key.conversation_id
    )


def write_key(wire: common_pb2.ConversationKey, key: m.ConversationKey) -> None:
    """Write the key into a message."""
    wire.tenant_id, wire.model = key.tenant_id, key.model
    wire.adapter, wire.conversation_id = key.adapter, key.conversation_id


def key_from_wire(wire: common_pb2.ConversationKey) -> m.ConversationKey:
    """Return the key as a value."""
    return m.ConversationKey(wire.tenant_id, wire.model, wire.conversation_id, wire.adapter)


def location_from_wire(wire: common_pb2.Location) -> m.Location:
    """Return a location as a value."""
    return m.Location(
        key=key_from_wire(wire.key),
        engine_id=m.EngineId(wire.engine_id),
        engine_epoch=wire.engine_epoch,
        request_id=m.RequestId(wire.request_id),
        turn=wire.turn,
        token_count=wire.token_count,
        block_count=wire.block_count,
        kv_transfer_params=wire.kv_transfer_params,
        fingerprint=m.Fingerprint(wire.fingerprint.chunk_tokens, wire.fingerprint.chain),
        remaining_s=seconds(wire.remaining),
        revision=wire.revision,
        endpoint=wire.endpoint,
        data_parallel_rank=wire.data_parallel_rank,
        claimed=wire.state == common_pb2.LOCATION_STATE_CLAIMED,
    )


def miss_from_wire(reason: common_pb2.MissReason) -> m.MissReason:
    """Return a miss reason; one this client does not know yet counts as an unknown conversation."""
    return _MISSES.get(reason, m.MissReason.UNKNOWN_CONVERSATION)


def announcement_to_wire(value: m.Announcement) -> common_pb2.Announcement:
    """Return an announcement as a message."""
    return common_pb2.Announcement(
        key=key_to_wire(value.key),
        request_id=value.request_id,
        turn=value.turn,
        token_count=value.token_count,
        block_count=value.block_count,
        kv_transfer_params=value.kv_transfer_params,
        fingerprint=fingerprint_to_wire(value.fingerprint),
        ttl=duration(value.ttl_s),
        endpoint=value.endpoint,
        reannounced=value.reannounced,
        lease_class=0 if value.lease_class is None else value.lease_class + 1,
    )


def fingerprint_to_wire(value: m.Fingerprint) -> common_pb2.Fingerprint:
    """Return a fingerprint as a message."""
    return common_pb2.Fingerprint(chunk_tokens=value.chunk_tokens, chain=value.chain)


def begun_from_wire(wire: location_pb2.BeginTurnResponse, asked: m.ConversationKey) -> m.BegunTurn:
    """Return a begun turn as a value; `asked` is its conversation unless the answer names another."""
    return m.BegunTurn(
        wire.turn,
        location_from_wire(wire.location) if wire.HasField("location") else None,
        None if wire.HasField("location") else miss_from_wire(wire.miss_reason),
        key_from_wire(wire.key) if wire.HasField("key") else asked,
        wire.turn_index,
        seconds(wire.idle) if wire.HasField("idle") else None,
        wire.last_lease_class - 1 if wire.last_lease_class else None,
    )


def announcement_result_from_wire(wire: common_pb2.AnnouncementResult) -> m.AnnouncementResult:
    """Return an announcement's result as a value; an outcome this client does not know counts as refused."""
    outcome = _OUTCOMES.get(wire.outcome, m.AnnounceOutcome.REFUSED)
    return m.AnnouncementResult(m.RequestId(wire.request_id), outcome, seconds(wire.granted_ttl), wire.detail)


def touched_from_wire(wire: location_pb2.TouchConversationResponse) -> m.Touched:
    """Return what there is to keep of a conversation."""
    return m.Touched(wire.noted, seconds(wire.remaining) if wire.HasField("remaining") else None)


def release_outcome_from_wire(outcome: common_pb2.ReleaseOutcome) -> m.ReleaseOutcome:
    """Return a release's outcome; of one this client does not know the blocks are kept, as if claimed."""
    return _RELEASED.get(outcome, m.ReleaseOutcome.CLAIMED)


def release_reason_from_wire(reason: engine_pb2.ReleaseReason) -> m.ReleaseReason:
    """Return an order's reason; one this client does not know yet counts as refused."""
    return _RELEASES.get(reason, m.ReleaseReason.REFUSED)


def renewal_result_from_wire(wire: common_pb2.RenewalResult) -> m.RenewalResult:
    """Return a renewal's result as a value."""
    return m.RenewalResult(m.RequestId(wire.request_id), wire.renewed, seconds(wire.granted_ttl))


def claim_from_wire(wire: location_pb2.Claim) -> m.Claim:
    """Return a claim as a value."""
    return m.Claim(wire.claim_id, wire.owner, location_from_wire(wire.location), seconds(wire.timeout))


def spec_to_wire(spec: m.EngineSpec) -> engine_pb2.EngineSpec:
    """Return an engine's spec as a message."""
    return engine_pb2.EngineSpec(
        engine_id=spec.engine_id,
        role=_ROLES[spec.role],
        profile=engine_pb2.EngineProfile(**_members(spec.profile, m.EngineProfile)),
        endpoint=spec.endpoint,
        data_parallel_rank=spec.data_parallel_rank,
        total_blocks=spec.total_blocks,
        served_models=spec.served_models,
        settings=_settings_to_wire(spec.settings) if spec.settings is not None else None,
    )


_SPANS = ("kv_blocks_ttl", "max_ttl")


def _settings_to_wire(value: m.EngineSettings) -> engine_pb2.EngineSettings:
    members = _members(value, m.EngineSettings)
    members |= {name: duration(span_s) for name in _SPANS if (span_s := members.pop(f"{name}_s"))}
    return engine_pb2.EngineSettings(**members)


def _settings_from_wire(wire: engine_pb2.EngineSettings) -> m.EngineSettings:
    members = {name: getattr(wire, name) for name in wire.DESCRIPTOR.fields_by_name if name not in _SPANS}
    if not wire.HasField("prefix_caching"):
        members["prefix_caching"] = None
    members |= {f"{name}_s": seconds(getattr(wire, name)) for name in _SPANS}
    return m.EngineSettings(**members)


def load_to_wire(load: m.EngineLoad) -> engine_pb2.EngineLoad:
    """Return a load as a message."""
    return engine_pb2.EngineLoad(**_members(load, m.EngineLoad))


def engine_from_wire(wire: engine_pb2.Engine) -> m.Engine:
    """Return an engine as a value. Of one that is gone the role is made up."""
    spec = wire.spec
    contact = m.EngineContact.UNKNOWN
    if wire.contact:
        name = engine_pb2.EngineContact.Name(wire.contact).removeprefix("ENGINE_CONTACT_")
        contact = m.EngineContact[name]
    role = spec.role or engine_pb2.ENGINE_ROLE_BOTH
    return m.Engine(
        spec=m.EngineSpec(
            engine_id=m.EngineId(spec.engine_id),
            role=m.EngineRole[engine_pb2.EngineRole.Name(role).removeprefix("ENGINE_ROLE_")],
            profile=m.EngineProfile(**_members(spec.profile, m.EngineProfile)),
            endpoint=spec.endpoint,
            data_parallel_rank=spec.data_parallel_rank,
            total_blocks=spec.total_blocks,
            served_models=tuple(spec.served_models),
            settings=_settings_from_wire(spec.settings) if spec.HasField("settings") else None,
        ),
        engine_epoch=wire.engine_epoch,
        draining=wire.draining,
        attached=wire.attached,
        load=m.EngineLoad(**_members(wire.load, m.EngineLoad)) if wire.HasField("load") else None,
        contact=contact,
        registered_s=seconds(wire.registered),
        last_seen_s=seconds(wire.last_seen) if wire.HasField("last_seen") else None,
        holdings=(
            m.EngineHoldings(**_members(wire.holdings, m.EngineHoldings))
            if wire.HasField("holdings")
            else None
        ),
        announcements=wire.announcements,
    )


def status_from_wire(wire: status_pb2.GetStatusResponse) -> m.PlaneStatus:
    """Return how a replica does as a value."""
    settings, store = wire.settings, wire.store
    return m.PlaneStatus(
        replica_id=wire.replica_id,
        version=wire.version,
        serving=wire.serving,
        uptime_s=seconds(wire.uptime),
        fleet_time_s=wire.fleet_time.ToMilliseconds() / 1000,
        clock_time_s=wire.clock_time.ToMilliseconds() / 1000,
        settings=m.PlaneSettings(
            location_ttl_s=seconds(settings.location_ttl),
            min_remaining_s=seconds(settings.min_remaining),
            claim_timeout_s=seconds(settings.claim_timeout),
            claim_grace_s=seconds(settings.claim_grace),
            engine_lease_s=seconds(settings.engine_lease),
            max_staleness_s=seconds(settings.max_staleness),
            max_conversations=settings.max_conversations,
        ),
        store=m.StoreStatus(
            shared=store.shared,
            latency_s=seconds(store.latency) if store.HasField("latency") else None,
            staleness_s=seconds(store.staleness),
            trouble=store.trouble,
            caution=store.caution,
            version=store.version,
            size_bytes=store.size_bytes,
            quota_bytes=store.quota_bytes,
        ),
        replicas=tuple(m.ReplicaStatus(r.replica_id, r.version, seconds(r.age)) for r in wire.replicas),
        counts=_counts_from_wire(wire.counts) if wire.HasField("counts") else None,
    )


def renewal_to_wire(request_id: m.RequestId, ttl_s: float) -> common_pb2.Renewal:
    """Return a renewal as a message."""
    return common_pb2.Renewal(request_id=request_id, ttl=duration(ttl_s))


def _counts_from_wire(wire: status_pb2.PlaneCounts) -> m.PlaneCounts:
    members = {name: getattr(wire, name) for name in wire.DESCRIPTOR.fields_by_name}
    return m.PlaneCounts(**{**members, "misses": dict(wire.misses)})
