"""Wishes for a conversation's location to be kept for longer. They are noted; its engine decides."""

from __future__ import annotations

from msgspec.structs import replace

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.ledger import Decision, Ledger, Write, same_state
from kvplane.store.base import Compare

_SMALL_MS = 1000
_SMALL_PART = 0.05
"""What a wish must add to what is on record, in milliseconds and as a part of its own ttl, to be written."""


class Touches:
    """Notes how long conversations are wanted: with the retained location, or with the turn in flight."""

    def __init__(self, ledger: Ledger, engines: EngineRegistry, settings: m.Settings) -> None:
        self._ledger = ledger
        self._engines = engines
        self._settings = settings

    async def touch(self, key: m.ConversationKey, ttl_s: float, turn: int = 0) -> m.Touched:
        """Note that a conversation, or its location of `turn` only, is wanted for `ttl_s` from now.

        That is with the life that a claim needs on top, and for at most as long as a record may live. Wishes
        only add up, and revive nothing: what is claimed, expired, or on an engine that is gone or draining is
        not there to be kept. Raises ContentionError.
        """
        usable_s = ttl_s + self._settings.min_remaining_s
        ttl_ms = int(min(usable_s, self._settings.max_location_ttl_s) * 1000)
        return await self._ledger.decide(lambda: self._touch(key, ttl_ms, turn))

    def _touch(self, key: m.ConversationKey, ttl_ms: int, turn: int) -> Decision[m.Touched]:
        ledger, now = self._ledger, self._ledger.clock.now_ms()
        location_key, turns_key = keys.location_and_turns(key)
        stored, turns = ledger.location_at(location_key), ledger.turns_at(turns_key)
        compares, writes = same_state(stored, turns), list[Write]()
        wanted_ms, least_ms = now + ttl_ms, max(_SMALL_MS, round(ttl_ms * _SMALL_PART))
        noted, remaining_ms = False, None
        location, known = stored.value, turns.value
        if location is not None and turn in (0, location.turn):
            is_held, engine_unchanged = self._is_held(location)
            compares.append(engine_unchanged)
            if is_held and location.deadline_ms > now:
                noted, remaining_ms = True, location.deadline_ms - now
                if wanted_ms - max(location.wanted_until_ms, location.deadline_ms) > least_ms:
                    location = replace(location, wanted_until_ms=wanted_ms)
                    writes.append(ledger.keep_location(location_key, location))
        if known is not None and turn in (0, known.latest_turn) and known.is_in_flight(now):
            noted = True
            if wanted_ms - known.wanted_until_ms > least_ms:
                known = replace(known, wanted_until_ms=wanted_ms)
                writes.append(ledger.keep_turns(turns_key, known, self._settings.turns_kept_ms))
        return Decision(m.Touched(noted, remaining_ms), compares, writes)

    def _is_held(self, location: m.Location) -> tuple[bool, Compare]:
        """Tell whether its engine may still give the location to a reader; and what that rests on."""
        stored = self._engines.find(location.holder.engine_id)
        engine = stored.value
        is_held = (
            engine is not None and engine.engine_epoch == location.holder.engine_epoch and not engine.draining
        )
        return is_held, stored.unchanged()
