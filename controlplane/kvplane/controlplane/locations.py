"""Locations: announced by engines, looked up by routers, renewed, listed."""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec.structs import replace

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.errors import (
    EngineDrainingError,
    InvalidFieldError,
    StaleEpochError,
    SupersededStreamError,
    UnknownEngineError,
)
from kvplane.controlplane.ledger import Decision, Ledger, Write, own_location, same_state, understood
from kvplane.controlplane.prefixes import Prefixes
from kvplane.controlplane.quotas import Quotas
from kvplane.controlplane.releases import Releases
from kvplane.controlplane.tally import Ended

_TURN_AHEAD_MS = 86_400_000
"""A turn's number is the clock's milliseconds or a little more; replicas' clocks do not differ by a day."""
_LEAST_PAGE = 100
"""Records of a listing that are read at once, however few are wanted, and looked at in a row."""
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
        prefixes: Prefixes,
        settings: m.Settings,
        quotas: Quotas | None = None,
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._releases = releases
        self._availability = availability
        self._prefixes = prefixes
        self._settings = settings
        self._quotas = quotas

    async def announce(
        self, engine_id: str, engine_epoch: int, value: m.Announcement, *, stream: int = 0
    ) -> m.Announced:
        """Put a location on record, unless a newer turn is. Idempotent per holder.

        What it replaces is released on its engine, and what its tenant retains too much of, oldest first; it
        is refused if it alone is too much. With `stream`, only while that is the engine's newest.
        Raises UnknownEngineError, StaleEpochError, SupersededStreamError, EngineDrainingError,
        InvalidFieldError, ContentionError.
        """
        holder = m.Holder(engine_id, engine_epoch, value.request_id)
        try:
            result = await self._ledger.decide(lambda: self._announce(holder, value, stream))
        except (UnknownEngineError, StaleEpochError, SupersededStreamError):
            await self._engines.require(engine_id, engine_epoch, stream)  # the mirror may have been behind
            result = await self._ledger.decide(lambda: self._announce(holder, value, stream))
        self._ledger.tally.announcements[result.outcome] += 1
        if result.outcome is m.AnnounceOutcome.ACCEPTED:
            self._engines.announced(engine_id, engine_epoch)
        if self._quotas is not None:
            if result.outcome is m.AnnounceOutcome.ACCEPTED:
                await self._quotas.after_announcement(keys.location(value.key))
            elif result.outcome is m.AnnounceOutcome.REFUSED:
                self._quotas.refused += 1
        return result

    def _announce(self, holder: m.Holder, value: m.Announcement, stream: int) -> Decision[m.Announced]:
        ledger = self._ledger
        required = self._engines.checked(holder.engine_id, holder.engine_epoch, stream)
        engine = required.engine
        location_key, turns_key = keys.location_and_turns(value.key)
        holding, order = ledger.holding(holder), ledger.order(holder)
        stored, turns = ledger.location_at(location_key), ledger.turns_at(turns_key)
        compares = same_state(holding, order, stored, turns)
        compares.append(required.unchanged)
        if holding.value is not None and holding.value.claim_id:
            return Decision(m.Announced(m.AnnounceOutcome.CLAIMED), compares)
        if order.value is not None:
            return Decision(m.Announced(m.AnnounceOutcome.SUPERSEDED), compares)
        if holding.value is not None and holding.value.location_key != location_key:
            raise InvalidFieldError("announcement.request_id", "was announced for another conversation")
        known, current, now = turns.value or m.Turns(), stored.value, ledger.clock.now_ms()
        if value.turn > max(known.latest_turn, now + _TURN_AHEAD_MS):
            raise InvalidFieldError("announcement.turn", "is no number that BeginTurn has given")
        is_known = current is not None and current.holder == holder
        location = self._location(holder, value, engine, now)
        if not is_known:
            if engine.draining:
                raise EngineDrainingError(engine.spec.engine_id)
            newest = max(known.settled_turn, 0 if current is None else current.turn)
            if value.turn < newest or value.turn <= max(known.claimed_turn, known.ended_turn):
                answer = m.Announced(m.AnnounceOutcome.SUPERSEDED)
                return Decision(
                    answer, compares, self._releases.replacing(location, m.ReleaseReason.SUPERSEDED)
                )
            if self._quotas is not None and (refusal := self._quotas.refusal(value)):
                return Decision(
                    m.Announced(m.AnnounceOutcome.REFUSED, detail=refusal),
                    compares,
                    [self._not_kept(turns_key, known, value, now)],
                )
        writes: list[Write] = []
        ended: Ended | None = None
        if current is not None:
            if is_known:
                location = replace(
                    location,
                    not_before_ms=current.not_before_ms,
                    wanted_until_ms=current.wanted_until_ms,
                    unknown=current.unknown,
                )
                if abs(location.deadline_ms - current.deadline_ms) < _SAME_MS:
                    return Decision(_accepted(current, now), compares)
            else:
                writes = self._releases.replacing(current, m.ReleaseReason.SUPERSEDED)
                before = current.holder
                goes_on = (before.engine_id, before.engine_epoch) == (holder.engine_id, holder.engine_epoch)
                ended = Ended("continued" if goes_on else "superseded", current)
                if current.turn == location.turn:  # the same blocks, on record for an earlier incarnation
                    location = replace(location, wanted_until_ms=current.wanted_until_ms)
        if known.wanted_until_ms and value.turn == known.latest_turn:
            wanted_until_ms = max(location.wanted_until_ms, known.wanted_until_ms)
            location = replace(location, wanted_until_ms=wanted_until_ms)
        writes.append(ledger.keep_location(location_key, location))
        writes.append(ledger.keep_holding(holding.key, location_key, location.deadline_ms))
        if value.turn > known.settled_turn or value.turn > known.latest_turn or turns.value is None:
            settled = replace(
                known,
                latest_turn=max(known.latest_turn, value.turn),
                settled_turn=max(known.settled_turn, value.turn),
                settled_at_ms=now,
                lease_class=value.lease_class,
                wanted_until_ms=0 if value.turn >= known.latest_turn else known.wanted_until_ms,
            )
            writes.append(ledger.keep_turns(turns_key, settled, self._settings.turns_kept_ms))
        return Decision(_accepted(location, now), compares, writes, ended)

    def _not_kept(self, turns_key: bytes, known: m.Turns, value: m.Announcement, now: int) -> Write:
        """Return the note that a turn has ended and, for its tenant's quota, left nothing on record."""
        ended = replace(
            known,
            latest_turn=max(known.latest_turn, value.turn),
            settled_turn=max(known.settled_turn, value.turn),
            ended_turn=max(known.ended_turn, value.turn),
            quota_turn=max(known.quota_turn, value.turn),
            settled_at_ms=now,
            lease_class=value.lease_class,
            wanted_until_ms=0 if value.turn >= known.latest_turn else known.wanted_until_ms,
        )
        return self._ledger.keep_turns(turns_key, ended, self._settings.turns_kept_ms)

    def _location(self, holder: m.Holder, value: m.Announcement, engine: m.Engine, now: int) -> m.Location:
        ttl_s = min(value.ttl_s, self._settings.max_location_ttl_s)
        not_before_ms = 0
        if value.reannounced:
            not_before_ms = engine.registered_at_ms + round(self._settings.claim_life_s * 1000)
        return m.Location(
            value.key,
            holder,
            value.turn,
            value.token_count,
            value.block_count,
            value.kv_transfer_params,
            value.fingerprint,
            now + int(ttl_s * 1000),
            not_before_ms if not_before_ms and not_before_ms > self._ledger.clock.patient_ms() else 0,
            engine.spec.endpoint or value.endpoint,
            engine.spec.data_parallel_rank,
        )

    def lookup(self, key: m.ConversationKey) -> m.Found | m.MissReason:
        """Return what could be claimed now, taking nothing: as old as the mirror may be.

        Raises StoreUnavailableError when that is too old.
        """
        ledger = self._ledger
        ledger.mirror.require_fresh()
        location_key, turns_key = keys.location_and_turns(key)
        stored = ledger.location_at(location_key)
        if stored.value is None:
            return self.absence(ledger.turns_at(turns_key).value or m.Turns())
        reason, _ = self._availability.judge(stored.value)
        return reason or m.Found(stored.value, stored.revision)

    def lookup_prefix(self, scope: m.ConversationKey, fingerprint: m.Fingerprint) -> m.Found | m.MissReason:
        """Return the same of the conversation that a prompt goes on with, whatever id `scope` has."""
        self._ledger.mirror.require_fresh()
        match = self._prefixes.best(scope, fingerprint)
        if match is None:
            return m.MissReason.UNKNOWN_CONVERSATION
        return match.refused or match.found

    def absence(self, turns: m.Turns) -> m.MissReason:
        """Return why a conversation with these turns has no retained location."""
        if turns.claimed_turn and turns.claimed_turn >= turns.settled_turn:
            return m.MissReason.CLAIMED
        if turns.quota_turn and turns.quota_turn >= turns.settled_turn:
            return m.MissReason.QUOTA
        return m.MissReason.UNKNOWN_CONVERSATION

    async def renew(self, holder: m.Holder, ttl_s: float) -> float | None:
        """Set a retained location's life; returns it as granted, or None: nothing is revived.

        Raises UnknownEngineError, StaleEpochError, ContentionError.
        """
        await self._engines.require(holder.engine_id, holder.engine_epoch)
        granted_s = await self._ledger.decide(lambda: self._renew(holder, ttl_s))
        self._ledger.tally.renewals[granted_s is not None] += 1
        return granted_s

    def _renew(self, holder: m.Holder, ttl_s: float) -> Decision[float | None]:
        ledger = self._ledger
        required = self._engines.checked(holder.engine_id, holder.engine_epoch)
        holding = ledger.holding(holder)
        compares = [required.unchanged, holding.unchanged()]
        if holding.value is None or holding.value.claim_id:
            return Decision(None, compares)
        stored = ledger.location_at(holding.value.location_key)
        compares.append(stored.unchanged())
        now, location = ledger.clock.now_ms(), stored.value
        if location is None or location.holder != holder or location.deadline_ms <= now:
            return Decision(None, compares)
        granted_s = min(ttl_s, self._settings.max_location_ttl_s)
        renewed = replace(location, deadline_ms=now + int(granted_s * 1000))
        writes: list[Write] = [
            ledger.keep_location(stored.key, renewed),
            ledger.keep_holding(holding.key, stored.key, renewed.deadline_ms),
        ]
        return Decision(granted_s, compares, writes)

    async def list(
        self,
        *,
        after: bytes,
        limit: int,
        tenant_id: str = "",
        engine_id: str = "",
        model: str = "",
        conversation_prefix: str = "",
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
                page = await self._ledger.store.scan(prefix, after=start, limit=max(limit, _LEAST_PAGE))
                revision = revision or page.revision
                for number, item in enumerate(page.items):
                    if not number % _LEAST_PAGE:
                        await asyncio.sleep(0)  # what never waits would hold up all others
                    start = item.key
                    is_claim = prefix == keys.CLAIMS
                    value = understood(item, _claimed if is_claim else partial(own_location, item.key))
                    if value is None:
                        continue
                    if tenant_id not in ("", value.key.tenant_id):
                        continue
                    if engine_id not in ("", value.holder.engine_id):
                        continue
                    if model not in ("", value.key.model):
                        continue
                    if not value.key.conversation_id.startswith(conversation_prefix):
                        continue
                    found.append((m.Found(value, item.mod_revision), is_claim))
                    if len(found) == limit:
                        return found, start, revision
                more = page.more
        return found, b"", revision


def _accepted(location: m.Location, now: int) -> m.Announced:
    return m.Announced(m.AnnounceOutcome.ACCEPTED, max(0.0, (location.deadline_ms - now) / 1000))


def _claimed(raw: bytes) -> m.Location:
    return records.load_claim(raw).location
