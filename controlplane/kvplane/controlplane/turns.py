"""Turn numbers, and the short wait for an announcement that is still on its way."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.ledger import Decision, Ledger, same_state
from kvplane.controlplane.locations import Locations
from kvplane.controlplane.mirror import wait_for


class BegunTurn(Struct, frozen=True, gc=False):
    """A numbered turn and what is known of its conversation."""

    turn: int
    known: m.Found | m.MissReason


class Turns:
    """Numbers turns so that the newest wins whatever the order of arrival.

    A number is larger than any before in its conversation, and at least the clock's milliseconds: so it is
    also larger than those given before the conversation's record was forgotten or the store was lost.
    """

    def __init__(
        self, ledger: Ledger, locations: Locations, availability: Availability, settings: m.Settings
    ) -> None:
        self._ledger = ledger
        self._locations = locations
        self._availability = availability
        self._settings = settings
        self._window_ms = round(settings.in_flight_window_s * 1000)
        self._kept_ms = settings.turns_kept_ms

    async def begin(self, key: m.ConversationKey, request_id: str, wait_s: float | None) -> BegunTurn:
        """Number a turn; then wait for the turn before it, if that is in flight, at most `wait_s`.

        Idempotent by `request_id` while the turn is the latest. Raises ContentionError.
        """
        begun, in_flight = await self._ledger.decide(lambda: self._number(key, request_id))
        if in_flight:
            wait_s = self._settings.in_flight_wait_s if wait_s is None else wait_s
            known = await self.wait_until_settled(key, in_flight, wait_s, begun.known)
            return BegunTurn(begun.turn, known)
        return begun

    def _number(self, key: m.ConversationKey, request_id: str) -> Decision[tuple[BegunTurn, int]]:
        """Decide the next number; the answer has also the turn before it if that is in flight, else 0.

        What is known of the conversation rests on the same transaction, so it is not older than the number.
        """
        ledger = self._ledger
        location_key, turns_key = keys.location_and_turns(key)
        turns, stored = ledger.turns_at(turns_key), ledger.location_at(location_key)
        last, location = turns.value or m.Turns(), stored.value
        compares = same_state(turns, stored)
        known: m.Found | m.MissReason
        if location is None:
            known = self._locations.absence(last)
        else:
            refused, engine_unchanged = self._availability.judge(location)
            compares.append(engine_unchanged)
            known = refused or m.Found(location, stored.revision)
        if last.request_id == request_id and last.latest_turn:
            return Decision((BegunTurn(last.latest_turn, known), 0), compares)
        now = ledger.clock.now_ms()
        in_flight = last.is_in_flight(now)
        begun = replace(
            last,
            latest_turn=max(last.latest_turn + 1, now),
            request_id=request_id,
            in_flight_until_ms=now + self._window_ms,
            wanted_until_ms=0,
        )
        return Decision(
            (BegunTurn(begun.latest_turn, known), last.latest_turn if in_flight else 0),
            compares,
            [ledger.keep_turns(turns_key, begun, self._kept_ms)],
        )

    async def wait_until_settled(
        self, key: m.ConversationKey, turn: int, wait_s: float, known: m.Found | m.MissReason
    ) -> m.Found | m.MissReason:
        """Wait until a turn is announced; returns what is known then, a miss being a turn in flight."""
        clock, turns_key = self._ledger.clock, keys.turns(key)
        ends = clock.monotonic() + wait_s
        with self._ledger.mirror.changes_of(turns_key) as changed:
            while True:
                changed.clear()
                turns = self._ledger.turns_at(turns_key).value
                if turns is None or turns.settled_turn >= turn:
                    return self._locations.lookup(key)
                left = ends - clock.monotonic()
                if left <= 0 or not await wait_for(changed, clock, left):
                    break
        return m.MissReason.TURN_IN_FLIGHT if isinstance(known, m.MissReason) else known

    def in_flight(self, key: m.ConversationKey) -> int:
        """Return the latest turn if it is still in flight, else 0."""
        turns = self._ledger.turns_at(keys.turns(key)).value
        if turns is None or not turns.is_in_flight(self._ledger.clock.now_ms()):
            return 0
        return turns.latest_turn
