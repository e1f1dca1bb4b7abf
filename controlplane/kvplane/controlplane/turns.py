"""Turn numbers, and the short wait for an announcement that is still on its way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import ContentionError
from kvplane.controlplane.feed import Feed, wait_for
from kvplane.controlplane.ledger import ATTEMPTS, Ledger
from kvplane.controlplane.locations import Locations


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """A numbered turn and what is known of its conversation."""

    turn: int
    known: m.Found | m.MissReason


class Turns:
    """Numbers turns so that the newest wins whatever the order of arrival.

    A number is larger than any before in its conversation, and at least the clock's milliseconds: so it is
    also larger than those given before the conversation's record was forgotten or the store was lost.
    """

    def __init__(self, ledger: Ledger, locations: Locations, feed: Feed, settings: m.Settings) -> None:
        self._ledger = ledger
        self._locations = locations
        self._feed = feed
        self._settings = settings

    async def begin(self, key: m.ConversationKey, request_id: str, wait_s: float | None) -> BegunTurn:
        """Number a turn; then wait for the turn before it, if that is in flight, at most `wait_s`.

        Idempotent by `request_id` while the turn is the latest. Raises ContentionError.
        """
        turn, previous = await self._number(key, request_id)
        known = await self._locations.lookup(key)
        if previous:
            wait_s = self._settings.in_flight_wait_s if wait_s is None else wait_s
            known = await self.wait_until_settled(key, previous, wait_s, known)
        return BegunTurn(turn, known)

    async def _number(self, key: m.ConversationKey, request_id: str) -> tuple[int, int]:
        """Write the next number; returns it, and the turn before it if that is in flight, else 0."""
        for _ in range(ATTEMPTS):
            stored = await self._ledger.turns(key)
            known = stored.value or m.Turns()
            if known.request_id == request_id and known.latest_turn:
                return known.latest_turn, 0
            now = self._ledger.clock.now_ms()
            in_flight = known.latest_turn > known.settled_turn and known.in_flight_until_ms > now
            begun = replace(
                known,
                latest_turn=max(known.latest_turn + 1, now),
                request_id=request_id,
                in_flight_until_ms=now + round(self._settings.in_flight_window_s * 1000),
            )
            put = await self._ledger.put_turns(key, begun, self._settings.turns_kept_ms)
            if await self._ledger.write([stored.unchanged()], [put]):
                return begun.latest_turn, known.latest_turn if in_flight else 0
        raise ContentionError

    async def wait_until_settled(
        self, key: m.ConversationKey, turn: int, wait_s: float, known: m.Found | m.MissReason
    ) -> m.Found | m.MissReason:
        """Wait until a turn is announced; returns what is known then, a miss being a turn in flight."""
        clock = self._ledger.clock
        ends = clock.monotonic() + wait_s
        with self._feed.changes_of(keys.turns(key)) as changed:
            while True:
                changed.clear()
                stored = await self._ledger.turns(key)
                if stored.value is None or stored.value.settled_turn >= turn:
                    return await self._locations.lookup(key)
                left = ends - clock.monotonic()
                if left <= 0 or not await wait_for(changed, clock, left):
                    break
        return m.MissReason.TURN_IN_FLIGHT if isinstance(known, m.MissReason) else known

    async def in_flight(self, key: m.ConversationKey) -> int:
        """Return the latest turn if it is still in flight, else 0."""
        turns = (await self._ledger.turns(key)).value
        if turns is None or turns.latest_turn <= turns.settled_turn:
            return 0
        return turns.latest_turn if turns.in_flight_until_ms > self._ledger.clock.now_ms() else 0
