"""Between stored records and the control plane's values."""

from __future__ import annotations

from kvplane.controlplane import model as m
from kvplane.storage.v1 import records_pb2 as pb


def dump_location(value: m.Location) -> bytes:
    """Return a location as stored."""
    return _location_record(value).SerializeToString()


def load_location(raw: bytes) -> m.Location:
    """Return a stored location."""
    return _location_value(pb.LocationRecord.FromString(raw))


def _location_record(value: m.Location) -> pb.LocationRecord:
    key, holder = value.key, value.holder
    return pb.LocationRecord(
        tenant_id=key.tenant_id,
        model=key.model,
        adapter=key.adapter,
        conversation_id=key.conversation_id,
        engine_id=holder.engine_id,
        engine_epoch=holder.engine_epoch,
        request_id=holder.request_id,
        turn=value.turn,
        token_count=value.token_count,
        block_count=value.block_count,
        kv_transfer_params=value.kv_transfer_params,
        chunk_tokens=value.fingerprint.chunk_tokens,
        fingerprint=value.fingerprint.chain,
        deadline_ms=value.deadline_ms,
        not_before_ms=value.not_before_ms,
        endpoint=value.endpoint,
        data_parallel_rank=value.data_parallel_rank,
    )


def _location_value(record: pb.LocationRecord) -> m.Location:
    return m.Location(
        key=m.ConversationKey(record.tenant_id, record.model, record.adapter, record.conversation_id),
        holder=m.Holder(record.engine_id, record.engine_epoch, record.request_id),
        turn=record.turn,
        token_count=record.token_count,
        block_count=record.block_count,
        kv_transfer_params=record.kv_transfer_params,
        fingerprint=m.Fingerprint(record.chunk_tokens, record.fingerprint),
        deadline_ms=record.deadline_ms,
        not_before_ms=record.not_before_ms,
        endpoint=record.endpoint,
        data_parallel_rank=record.data_parallel_rank,
    )


def dump_claim(value: m.Claim) -> bytes:
    """Return a claim as stored."""
    record = pb.ClaimRecord(
        claim_id=value.claim_id,
        owner=value.owner,
        location=_location_record(value.location),
        deadline_ms=value.deadline_ms,
    )
    return record.SerializeToString()


def load_claim(raw: bytes) -> m.Claim:
    """Return a stored claim."""
    record = pb.ClaimRecord.FromString(raw)
    return m.Claim(record.claim_id, record.owner, _location_value(record.location), record.deadline_ms)


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
        profile=pb.ProfileRecord(**m.members(spec.profile, m.EngineProfile)),
    )
    return record.SerializeToString()


def load_engine(raw: bytes) -> m.Engine:
    """Return a stored engine."""
    record = pb.EngineRecord.FromString(raw)
    return m.Engine(
        spec=m.EngineSpec(
            engine_id=record.engine_id,
            role=m.EngineRole(record.role),
            profile=m.EngineProfile(**m.members(record.profile, m.EngineProfile)),
            endpoint=record.endpoint,
            data_parallel_rank=record.data_parallel_rank,
            total_blocks=record.total_blocks,
            served_models=tuple(record.served_models),
        ),
        engine_epoch=record.engine_epoch,
        lease_id=record.lease_id,
        registered_at_ms=record.registered_at_ms,
        registration_id=record.registration_id,
        draining=record.draining,
    )


def dump_turns(value: m.Turns) -> bytes:
    """Return a conversation's turns as stored."""
    return pb.TurnRecord(**m.members(value, m.Turns)).SerializeToString()


def load_turns(raw: bytes) -> m.Turns:
    """Return a conversation's stored turns."""
    return m.Turns(**m.members(pb.TurnRecord.FromString(raw), m.Turns))


def dump_holding(*, location_key: bytes = b"", claim_id: str = "") -> bytes:
    """Return where a holder's blocks are noted; give exactly one."""
    if claim_id:
        return pb.HoldingRecord(claim_id=claim_id).SerializeToString()
    return pb.HoldingRecord(location_key=location_key).SerializeToString()


def load_holding(raw: bytes) -> tuple[bytes, str]:
    """Return (location key, "") of retained blocks, or (b"", claim id) of claimed ones."""
    record = pb.HoldingRecord.FromString(raw)
    return record.location_key, record.claim_id


def dump_order(value: m.Order) -> bytes:
    """Return an order as stored; its holder is in the key."""
    return pb.OrderRecord(reason=value.reason, deadline_ms=value.deadline_ms).SerializeToString()


def load_order(holder: m.Holder, raw: bytes) -> m.Order:
    """Return a stored order."""
    record = pb.OrderRecord.FromString(raw)
    return m.Order(holder, m.ReleaseReason(record.reason), record.deadline_ms)


def dump_epoch(engine_epoch: int) -> bytes:
    """Return an engine id's last epoch as stored."""
    return pb.EpochRecord(engine_epoch=engine_epoch).SerializeToString()


def load_epoch(raw: bytes) -> int:
    """Return an engine id's last epoch."""
    return pb.EpochRecord.FromString(raw).engine_epoch
