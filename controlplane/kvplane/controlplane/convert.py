"""Between the wire's messages and the control plane's values. What comes in has been validated."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from kvplane.controlplane import model as m
from kvplane.controlplane.engines import LiveEngine
from kvplane.v1 import common_pb2, engine_pb2, location_pb2


def duration(seconds: float) -> Duration:
    """Return seconds as a Duration; below zero becomes zero."""
    value = Duration()
    value.FromMilliseconds(max(0, int(seconds * 1000)))
    return value


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
    )


def load_in(wire: engine_pb2.EngineLoad) -> m.EngineLoad:
    """Return a load as a value."""
    return m.EngineLoad(**m.members(wire, m.EngineLoad))


def engine_out(live: LiveEngine) -> engine_pb2.Engine:
    """Return a live engine as a message."""
    engine, spec, load = live.engine, live.engine.spec, live.load
    return engine_pb2.Engine(
        spec=engine_pb2.EngineSpec(
            engine_id=spec.engine_id,
            role=_ROLES[spec.role],
            profile=engine_pb2.EngineProfile(**m.members(spec.profile, m.EngineProfile)),
            endpoint=spec.endpoint,
            data_parallel_rank=spec.data_parallel_rank,
            total_blocks=spec.total_blocks,
            served_models=spec.served_models,
        ),
        engine_epoch=engine.engine_epoch,
        draining=engine.draining,
        attached=live.attached,
        load=engine_pb2.EngineLoad(**m.members(load, m.EngineLoad)) if load is not None else None,
    )


_ROLES = {
    m.EngineRole.PREFILL: engine_pb2.ENGINE_ROLE_PREFILL,
    m.EngineRole.DECODE: engine_pb2.ENGINE_ROLE_DECODE,
    m.EngineRole.BOTH: engine_pb2.ENGINE_ROLE_BOTH,
}


def announcement_in(wire: common_pb2.Announcement, delay_s: float = 0.0) -> m.Announcement:
    """Return an announcement as a value; `delay_s` was spent on the way and is taken off its life."""
    ttl, fingerprint = wire.ttl, wire.fingerprint
    return m.Announcement(
        key_in(wire.key),
        wire.request_id,
        wire.turn,
        wire.token_count,
        wire.block_count,
        wire.kv_transfer_params,
        m.Fingerprint(fingerprint.chunk_tokens, fingerprint.chain),
        max(0.0, ttl.seconds + ttl.nanos / 1e9 - delay_s),
        wire.endpoint.rstrip("/"),
        wire.reannounced,
    )


def announced_out(request_id: str, value: m.Announced) -> common_pb2.AnnouncementResult:
    """Return what became of an announcement as a message."""
    return common_pb2.AnnouncementResult(
        request_id=request_id,
        outcome=f"ANNOUNCE_OUTCOME_{value.outcome.name}",
        granted_ttl=duration(value.granted_ttl_s),
        detail=value.detail,
    )


def renewed_out(request_id: str, granted_s: float | None) -> common_pb2.RenewalResult:
    """Return what became of a renewal as a message."""
    return common_pb2.RenewalResult(
        request_id=request_id, renewed=granted_s is not None, granted_ttl=duration(granted_s or 0.0)
    )


def outcome_out(value: m.ReleaseOutcome) -> str:
    """Return the wire's name of what became of a release; messages take enum values by name."""
    return f"RELEASE_OUTCOME_{value.name}"


def miss_out(value: m.MissReason) -> str:
    """Return the wire's name of why nothing is offered."""
    return f"MISS_REASON_{value.name}"


def order_out(value: m.Order) -> engine_pb2.ReleaseOrder:
    """Return an order as a message."""
    reason = f"RELEASE_REASON_{value.reason.name}"
    return engine_pb2.ReleaseOrder(request_id=value.holder.request_id, reason=reason)


def location_out(
    value: m.Location, *, now_ms: int, revision: int = 0, claimed: bool = False, brief: bool = False
) -> common_pb2.Location:
    """Return a location as a message; a brief one goes without params and fingerprint."""
    key = value.key
    return common_pb2.Location(
        key=common_pb2.ConversationKey(
            tenant_id=key.tenant_id,
            model=key.model,
            adapter=key.adapter,
            conversation_id=key.conversation_id,
        ),
        engine_id=value.holder.engine_id,
        engine_epoch=value.holder.engine_epoch,
        request_id=value.holder.request_id,
        turn=value.turn,
        token_count=value.token_count,
        block_count=value.block_count,
        kv_transfer_params=b"" if brief else value.kv_transfer_params,
        fingerprint=None
        if brief
        else common_pb2.Fingerprint(
            chunk_tokens=value.fingerprint.chunk_tokens, chain=value.fingerprint.chain
        ),
        remaining=duration((value.deadline_ms - now_ms) / 1000),
        state=common_pb2.LOCATION_STATE_CLAIMED if claimed else common_pb2.LOCATION_STATE_RETAINED,
        revision=revision,
        endpoint=value.endpoint,
        data_parallel_rank=value.data_parallel_rank,
    )


def claim_out(value: m.Claim, now_ms: int) -> location_pb2.Claim:
    """Return a claim as a message."""
    return location_pb2.Claim(
        claim_id=value.claim_id,
        owner=value.owner,
        location=location_out(value.location, now_ms=now_ms, claimed=True),
        timeout=duration((value.deadline_ms - now_ms) / 1000),
    )
