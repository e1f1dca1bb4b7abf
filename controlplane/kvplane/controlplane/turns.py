"""Turn numbers, and the short wait for an announcement that is still on its way."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.ledger import Decision, Ledger, Write, same_state
from kvplane.controlplane.locations import Locations
from kvplane.controlplane.mirror import wait_for
from kvplane.controlplane.prefixes import Prefixes
from kvplane.controlplane.together import Together

_REPEAT_MS = 60_000
"""For how long it is remembered which conversation a request by fingerprint began a turn of."""
_MAX_INDEX = 2**31 - 1
_MAX_WAITS = 64
"""Of one conversation: each that waits is woken by each change, and in turn there are two or three."""
_SMALL_MS = 1000
"""What a location lacks of the life that a claim needs, and is not asked for."""


class BegunTurn(Struct, frozen=True, gc=False):
    """A numbered turn and what is known of its conversation.

    `turn_index` 0: not known; `idle_ms` None: likewise, or the last turn has not ended. `lease_class` as in
    the protos.
    """

    turn: int
    known: m.Found | m.MissReason
    key: m.ConversationKey
    turn_index: int = 0
    idle_ms: int | None = None
    lease_class: int = 0


_Numbered = tuple[BegunTurn, int]
"""A turn, and the one before it if that is in flight, else 0."""


class Turns:
    """Numbers turns so that the newest wins whatever the order of arrival.

    A number is larger than any before in its conversation, and at least the clock's milliseconds: so it is
    also larger than those given before the conversation's record was forgotten or the store was lost.
    """

    def __init__(
        self,
        ledger: Ledger,
        locations: Locations,
        availability: Availability,
        prefixes: Prefixes,
        settings: m.Settings,
    ) -> None:
        self._ledger = ledger
        self._locations = locations
        self._prefixes = prefixes
        self._availability = availability
        self._settings = settings
        self._numbers: Together[m.ConversationKey, str, _Numbered] = Together(self._number)
        self._window_ms = round(settings.in_flight_window_s * 1000)
        self._kept_ms = settings.turns_kept_ms
        claim_s = settings.claim_timeout_s + settings.min_remaining_s
        self._claim_needs_ms = round(min(claim_s, settings.max_location_ttl_s) * 1000)

    async def begin(
        self,
        key: m.ConversationKey,
        request_id: str,
        wait_s: float | None,
        fingerprint: m.Fingerprint | None = None,
    ) -> BegunTurn:
        """Number a turn; then wait for the turn before it, if that is in flight, at most `wait_s`.

        With a `fingerprint`, of the conversation that the prompt goes on with, whatever id `key` has; if
        there is none, of a new one. Idempotent by `request_id` while the turn is the latest; by fingerprint,
        for a minute. Raises ContentionError.
        """
        if fingerprint is None:
            begun, in_flight = await self._numbers.ask(key, request_id)
        else:
            begun, in_flight = await self._ledger.decide(lambda: self._find(key, request_id, fingerprint))
        if in_flight:
            wait_s = self._settings.in_flight_wait_s if wait_s is None else wait_s
            known = await self.wait_until_settled(begun.key, in_flight, wait_s, begun.known)
            turns = self._ledger.turns_at(keys.turns(begun.key)).value
            if turns is not None and turns.settled_turn == in_flight and turns.is_described:
                return replace(begun, known=known, idle_ms=0, lease_class=turns.lease_class)
            return replace(begun, known=known)
        return begun

    def _find(
        self, scope: m.ConversationKey, request_id: str, fingerprint: m.Fingerprint
    ) -> Decision[_Numbered]:
        """Decide of which conversation the turn is, and its number."""
        ledger = self._ledger
        asked = ledger.begun(scope, request_id)
        rests_on = [asked.unchanged()]
        if asked.value is not None:
            turns = ledger.turns_at(keys.turns(asked.value))
            if turns.value is not None and turns.value.request_id == request_id:
                again = self._numbering(asked.value, [request_id])
                return Decision(again.answer[0], [*again.compares, *rests_on])
            rests_on.append(turns.unchanged())
        match = self._prefixes.best(scope, fingerprint)
        if match is not None:
            key = match.found.location.key
        else:
            key = replace(scope, conversation_id=m.AUTO + secrets.token_hex(16))
        numbered = self._numbering(key, [request_id])
        noted = ledger.keep_begun(asked.key, keys.turns(key), _REPEAT_MS)
        rests_on += [compare for compare in numbered.compares if compare not in rests_on]
        return Decision(numbered.answer[0], rests_on, [*numbered.writes, noted])

    async def _number(self, key: m.ConversationKey, request_ids: Sequence[str]) -> list[_Numbered]:
        return await self._ledger.decide(lambda: self._numbering(key, request_ids))

    def _numbering(self, key: m.ConversationKey, request_ids: Sequence[str]) -> Decision[list[_Numbered]]:
        """Decide the next numbers, one for each request, as if they had come one after another.

        What is known of the conversation rests on the same transaction, so it is not older than the numbers.
        """
        ledger = self._ledger
        location_key, turns_key = keys.location_and_turns(key)
        turns, stored = ledger.turns_at(turns_key), ledger.location_at(location_key)
        last, location = turns.value or m.Turns(), stored.value
        compares = same_state(turns, stored)
        found: m.Found | m.MissReason | None = None
        if location is not None:
            refused, engine_unchanged = self._availability.judge(location)
            compares.append(engine_unchanged)
            found = refused or m.Found(location, stored.revision)
        now, latest = ledger.clock.now_ms(), last
        answers: list[_Numbered] = []
        for request_id in request_ids:
            known = self._locations.absence(latest) if found is None else found
            latest, (turn, in_flight) = self._next(key, latest, request_id, known, now)
            if answers and in_flight:
                # Those between go on from where this one does, and may wait themselves.
                in_flight = answers[0][1] or answers[0][0].turn
            answers.append((turn, in_flight))
        if latest is last:
            return Decision(answers, compares)
        writes: list[Write] = [ledger.keep_turns(turns_key, latest, self._kept_ms)]
        if location is not None and isinstance(found, m.Found):
            needed_ms = now + self._claim_needs_ms - _SMALL_MS
            if max(location.deadline_ms, location.wanted_until_ms) < needed_ms:
                wanted = replace(location, wanted_until_ms=now + self._claim_needs_ms)
                writes.append(ledger.keep_location(location_key, wanted))
        return Decision(answers, compares, writes)

    def _next(
        self,
        key: m.ConversationKey,
        last: m.Turns,
        request_id: str,
        known: m.Found | m.MissReason,
        now: int,
    ) -> tuple[m.Turns, _Numbered]:
        """Number one turn; returns the conversation's state after it, `last` for a repeated request."""
        lease_class = last.lease_class if last.is_described else 0
        if last.request_id == request_id and last.latest_turn:
            return last, (BegunTurn(last.latest_turn, known, key, last.turn_index, None, lease_class), 0)
        # A turn may have ended or been claimed after the record of its beginning was forgotten.
        newest = max(last.latest_turn, last.settled_turn, last.claimed_turn, last.ended_turn)
        begun = replace(
            last,
            latest_turn=max(newest + 1, now),
            request_id=request_id,
            in_flight_until_ms=now + self._window_ms,
            turn_index=min(last.turn_index + 1, _MAX_INDEX) if last.turn_index or not last.latest_turn else 0,
            wanted_until_ms=0,
        )
        idle_ms = None
        if last.settled_turn == last.latest_turn and last.latest_turn and last.is_described:
            idle_ms = max(0, now - last.settled_at_ms)
        in_flight = last.latest_turn if last.is_in_flight(now) else 0
        return begun, (
            BegunTurn(begun.latest_turn, known, key, begun.turn_index, idle_ms, lease_class),
            in_flight,
        )

    async def wait_until_settled(
        self, key: m.ConversationKey, turn: int, wait_s: float, known: m.Found | m.MissReason
    ) -> m.Found | m.MissReason:
        """Wait until a turn is announced; returns what is known then, a miss being a turn in flight.

        Where nothing is known, an earlier turn's announcement will do: of turns at once none goes on from the
        other. Where many wait for the same conversation already it is not waited.
        """
        clock, turns_key = self._ledger.clock, keys.turns(key)
        missed = isinstance(known, m.MissReason)
        ends = clock.monotonic() + wait_s
        with self._ledger.mirror.changes_of(turns_key) as changed:
            while self._ledger.mirror.waiting_for(turns_key) <= _MAX_WAITS:
                changed.clear()
                turns = self._ledger.turns_at(turns_key).value
                if turns is None or turns.settled_turn >= turn:
                    return self._locations.lookup(key)
                if missed and isinstance(found := self._locations.lookup(key), m.Found):
                    return found
                left = ends - clock.monotonic()
                if left <= 0 or not await wait_for(changed, clock, left):
                    break
        return m.MissReason.TURN_IN_FLIGHT if missed else known

    def in_flight(self, key: m.ConversationKey) -> int:
        """Return the latest turn if it is still in flight, else 0."""
        turns = self._ledger.turns_at(keys.turns(key)).value
        if turns is None or not turns.is_in_flight(self._ledger.clock.now_ms()):
            return 0
        return turns.latest_turn
