"""Locations: announced by engines, looked up by routers, renewed, listed."""

from __future__ import annotations

from dataclasses import replace

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.errors import ContentionError, EngineDrainingError, InvalidFieldError
from kvplane.controlplane.ledger import ATTEMPTS, Ledger
from kvplane.controlplane.releases import Releases
from kvplane.store.base import Operation

_TURN_AHEAD_MS = 86_400_000
"""A turn's number is the clock's milliseconds or a little more; replicas' clocks do not differ by a day."""
_SAME_MS = 1000
"""A deadline that moves by less is not written again."""


class Locations:
    """What the fleet retains, one location per conversation: that of its newest announced turn."""

    def __init__(
        self,
        ledger: Ledger,
        engines: EngineRegistry,
        releases: Releases,
        availability: Availability,
        settings: m.Settings,
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._releases = releases
        self._availability = availability
        self._settings = settings

    async def announce(self, engine_id: str, engine_epoch: int, value: m.Announcement) -> m.Announced:
        """Put a location on record, unless a newer turn is. Idempotent per holder.

        What it replaces is released on its engine. Raises UnknownEngineError, StaleEpochError,
        EngineDrainingError, InvalidFieldError, ContentionError.
        """
        ledger = self._ledger
        holder = m.Holder(engine_id, engine_epoch, value.request_id)
        for _ in range(ATTEMPTS):
            required = await self._engines.require(engine_id, engine_epoch)
            holding, order = await ledger.holding(holder), await ledger.order(holder)
            if holding.value is not None and holding.value.claim_id:
                return m.Announced(m.AnnounceOutcome.CLAIMED)
            if order.value is not None:
                return m.Announced(m.AnnounceOutcome.SUPERSEDED)
            current, turns = await ledger.location(value.key), await ledger.turns(value.key)
            if holding.value is not None and holding.value.location_key != current.key:
                raise InvalidFieldError("announcement.request_id", "was announced for another conversation")
            compares = [required.unchanged, holding.unchanged(), order.unchanged()]
            compares += [current.unchanged(), turns.unchanged()]
            known = turns.value or m.Turns()
            if value.turn > max(known.latest_turn, ledger.clock.now_ms() + _TURN_AHEAD_MS):
                raise InvalidFieldError("announcement.turn", "is no number that BeginTurn has given")
            is_known = current.value is not None and current.value.holder == holder
            if not is_known and required.engine.draining:
                raise EngineDrainingError(engine_id)
            newest = max(known.settled_turn, current.value.turn if current.value else 0)
            if not is_known and value.turn < newest:
                put = await ledger.put_order(self._releases.order(holder, m.ReleaseReason.SUPERSEDED))
                if await ledger.write(compares, [put]):
                    return m.Announced(m.AnnounceOutcome.SUPERSEDED)
                continue
            location = self._location(holder, value, required.engine)
            if is_known and current.value is not None:
                location = replace(location, not_before_ms=current.value.not_before_ms)
                if abs(location.deadline_ms - current.value.deadline_ms) < _SAME_MS:
                    return self._accepted(current.value)
            operations: list[Operation] = []
            if current.value is not None and not is_known:
                operations = await self._releases.ending(current.value, m.ReleaseReason.SUPERSEDED)
                operations = [operation for operation in operations if operation.key != current.key]
            settled = replace(
                known,
                latest_turn=max(known.latest_turn, value.turn),
                settled_turn=max(known.settled_turn, value.turn),
            )
            operations += [
                await ledger.put_location(location),
                await ledger.retained(location),
                await ledger.put_turns(value.key, settled, self._settings.turns_kept_ms),
            ]
            if await ledger.write(compares, operations):
                return self._accepted(location)
        raise ContentionError

    def _location(self, holder: m.Holder, value: m.Announcement, engine: m.Engine) -> m.Location:
        now = self._ledger.clock.now_ms()
        ttl_s = min(value.ttl_s, self._settings.max_location_ttl_s)
        quarantine_s = self._settings.claim_life_s
        not_before_ms = engine.registered_at_ms + round(quarantine_s * 1000) if value.reannounced else 0
        return m.Location(
            key=value.key,
            holder=holder,
            turn=value.turn,
            token_count=value.token_count,
            block_count=value.block_count,
            kv_transfer_params=value.kv_transfer_params,
            fingerprint=value.fingerprint,
            deadline_ms=now + int(ttl_s * 1000),
            not_before_ms=not_before_ms if not_before_ms > now else 0,
            endpoint=engine.spec.endpoint or value.endpoint,
            data_parallel_rank=engine.spec.data_parallel_rank,
        )

    def _accepted(self, location: m.Location) -> m.Announced:
        left_ms = location.deadline_ms - self._ledger.clock.now_ms()
        return m.Announced(m.AnnounceOutcome.ACCEPTED, max(0.0, left_ms / 1000))

    async def lookup(self, key: m.ConversationKey) -> m.Found | m.MissReason:
        """Return what could be claimed now, taking nothing."""
        stored = await self._ledger.location(key)
        if stored.value is None:
            turns = (await self._ledger.turns(key)).value
            if turns is not None and turns.claimed_turn and turns.claimed_turn >= turns.settled_turn:
                return m.MissReason.CLAIMED
            return m.MissReason.UNKNOWN_CONVERSATION
        reason, _ = await self._availability.judge(stored.value)
        return reason or m.Found(stored.value, stored.revision)

    async def renew(self, holder: m.Holder, ttl_s: float) -> float | None:
        """Set a retained location's life; returns it as granted, or None: nothing is revived.

        Raises UnknownEngineError, StaleEpochError, ContentionError.
        """
        for _ in range(ATTEMPTS):
            required = await self._engines.require(holder.engine_id, holder.engine_epoch)
            holding = await self._ledger.holding(holder)
            if holding.value is None or holding.value.claim_id:
                return None
            stored = await self._ledger.location_at(holding.value.location_key)
            now = self._ledger.clock.now_ms()
            if stored.value is None or stored.value.holder != holder or stored.value.deadline_ms <= now:
                return None
            granted_s = min(ttl_s, self._settings.max_location_ttl_s)
            location = replace(stored.value, deadline_ms=now + int(granted_s * 1000))
            operations: list[Operation] = [
                await self._ledger.put_location(location),
                await self._ledger.retained(location),
            ]
            compares = [required.unchanged, holding.unchanged(), stored.unchanged()]
            if await self._ledger.write(compares, operations):
                return granted_s
        raise ContentionError

    async def list(
        self, *, after: bytes, limit: int, tenant_id: str, engine_id: str
    ) -> tuple[list[tuple[m.Found, bool]], bytes, int]:
        """Return a page of (location, is claimed), the key to go on after (b"" at the end), and a revision.

        Retained ones come first, then claimed ones, each in key order. O(records passed over).
        """
        found = list[tuple[m.Found, bool]]()
        revision = 0
        retained = keys.tenant_locations(tenant_id) if tenant_id else keys.LOCATIONS
        prefixes = [retained, keys.CLAIMS]
        if after.startswith(keys.CLAIMS):
            prefixes = [keys.CLAIMS]
        for prefix in prefixes:
            start, more = (after if after.startswith(prefix[:2]) else b""), True
            while more:
                page = await self._ledger.store.scan(prefix, after=start, limit=limit)
                revision = revision or page.revision
                for item in page.items:
                    start = item.key
                    is_claim = prefix == keys.CLAIMS
                    load = records.load_location
                    value = records.load_claim(item.value).location if is_claim else load(item.value)
                    if tenant_id not in ("", value.key.tenant_id):
                        continue
                    if engine_id not in ("", value.holder.engine_id):
                        continue
                    found.append((m.Found(value, item.mod_revision), is_claim))
                    if len(found) == limit:
                        return found, start, revision
                more = page.more
        return found, b"", revision
