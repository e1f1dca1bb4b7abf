"""StatusService on the wire."""

from __future__ import annotations

from typing import Any

from kvplane.controlplane import convert
from kvplane.controlplane import model as m
from kvplane.controlplane.status import Status, StoreStatus
from kvplane.controlplane.tally import Tally
from kvplane.controlplane.turn_groups import HIT
from kvplane.v1 import status_pb2, status_pb2_grpc


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Tells how the replica does."""

    def __init__(self, status: Status) -> None:
        self._status = status

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Any
    ) -> status_pb2.GetStatusResponse:
        """See the protos."""
        status = await self._status.get()
        answer = status_pb2.GetStatusResponse(
            replica_id=status.replica_id,
            version=status.version,
            serving=self._status.serving,
            uptime=convert.duration(status.uptime_s),
            settings=_settings(self._status.settings),
            store=_store(status.store, shared=self._status.shared),
        )
        _count(answer.counts, self._status.tally)
        answer.fleet_time.FromMilliseconds(status.fleet_ms)
        answer.clock_time.FromMilliseconds(status.clock_ms)
        for replica_id, version, age_s in status.replicas:
            answer.replicas.add(replica_id=replica_id, version=version, age=convert.duration(age_s))
        return answer


def _count(wire: status_pb2.PlaneCounts, tally: Tally) -> None:
    begun = tally.groups.as_of_now()
    wire.turns, wire.hits = sum(begun), begun[HIT]
    for reason in m.MissReason:
        if number := begun[reason]:
            wire.misses[reason.name.lower()] = number
    wire.claims, wire.claims_missed = tally.claims[HIT], sum(tally.claims) - tally.claims[HIT]
    wire.announcements = tally.announcements[m.AnnounceOutcome.ACCEPTED]


def _settings(value: m.Settings) -> status_pb2.PlaneSettings:
    return status_pb2.PlaneSettings(
        location_ttl=convert.duration(value.max_location_ttl_s),
        min_remaining=convert.duration(value.min_remaining_s),
        claim_timeout=convert.duration(value.claim_timeout_s),
        claim_grace=convert.duration(value.claim_grace_s),
        engine_lease=convert.duration(value.engine_lease_s),
        max_staleness=convert.duration(value.max_staleness_s),
        max_conversations=value.max_conversations,
    )


def _store(value: StoreStatus, *, shared: bool) -> status_pb2.StoreStatus:
    facts = value.facts
    wire = status_pb2.StoreStatus(
        shared=shared,
        staleness=convert.duration(value.staleness_s),
        trouble=value.trouble,
        caution=value.caution,
        version=facts.version,
        size_bytes=facts.size_bytes,
        quota_bytes=facts.quota_bytes,
    )
    if value.latency_s is not None:
        wire.latency.FromMicroseconds(round(value.latency_s * 1_000_000))
    return wire
