"""May this location be handed out now? The one place that decides it."""

from __future__ import annotations

from kvplane.controlplane import model as m
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.fleet_time import FleetTime
from kvplane.store.base import Compare


class Availability:
    """Judges locations by deadline, quarantine, and the state of their engine."""

    def __init__(self, engines: EngineRegistry, clock: FleetTime, settings: m.Settings) -> None:
        self._engines = engines
        self._clock = clock
        self._min_remaining_ms = settings.min_remaining_s * 1000

    def judge(self, location: m.Location, reader_engine_id: str = "") -> tuple[m.MissReason | None, Compare]:
        """Return why it may not be handed out, or None; and the compare that the answer rests on.

        A reader that is not registered is taken on trust: the fingerprint is checked where it reads.
        """
        stored = self._engines.find(location.holder.engine_id)
        return self._reason(location, stored.value, reader_engine_id), stored.unchanged()

    def judge_claim(self, claim: m.Claim) -> tuple[m.MissReason | None, Compare]:
        """Return why a claim's reader may not begin any more, or None; and the compare that it rests on.

        Draining or silence of the engine take nothing from a claim: its blocks are kept for the reader.
        """
        holder = claim.location.holder
        stored = self._engines.find(holder.engine_id)
        reason = None
        if stored.value is None or stored.value.engine_epoch != holder.engine_epoch:
            reason = m.MissReason.ENGINE_GONE
        elif claim.deadline_ms <= self._clock.now_ms():
            reason = m.MissReason.EXPIRING
        return reason, stored.unchanged()

    def _reason(
        self, location: m.Location, engine: m.Engine | None, reader_engine_id: str
    ) -> m.MissReason | None:
        now = self._clock.now_ms()
        if engine is None or engine.engine_epoch != location.holder.engine_epoch:
            return m.MissReason.ENGINE_GONE
        if self._engines.is_silent(engine):
            return m.MissReason.ENGINE_GONE
        if engine.draining:
            return m.MissReason.ENGINE_DRAINING
        if location.deadline_ms - now < self._min_remaining_ms:
            return m.MissReason.EXPIRING
        if location.not_before_ms and location.not_before_ms > self._clock.patient_ms():
            return m.MissReason.QUARANTINED
        if reader_engine_id:
            reader = self._engines.find(reader_engine_id).value
            if reader is not None and reader.spec.profile != engine.spec.profile:
                return m.MissReason.INCOMPATIBLE_ENGINE
        return None
