"""Claims: one reader, once, finally."""

from __future__ import annotations

from msgspec.structs import replace

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.errors import InvalidFieldError
from kvplane.controlplane.ledger import Decision, Ledger, same_state
from kvplane.controlplane.tally import Ended
from kvplane.controlplane.turns import Turns
from kvplane.store.base import Delete

_Answer = m.Claim | m.MissReason


class Claims:
    """Gives each location to at most one reader, over any number of callers and replicas."""

    def __init__(
        self, ledger: Ledger, availability: Availability, turns: Turns, settings: m.Settings
    ) -> None:
        self._ledger = ledger
        self._availability = availability
        self._turns = turns
        self._settings = settings
        self._timeout_ms = round(settings.claim_timeout_s * 1000)

    async def claim(
        self,
        key: m.ConversationKey,
        claim_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
    ) -> m.Claim | m.MissReason:
        """Take the conversation's location, or that of `turn` only. Idempotent by the caller's `claim_id`.

        A repeat gets the same claim while its reader may still begin: until its deadline, and as long as the
        engine's incarnation lives.

        The location leaves the record and the claim enters it in one transaction that also holds the
        engine's incarnation still, so there is no moment at which two callers could win.
        Raises InvalidFieldError for a claim id in use by another owner or conversation, ContentionError.
        """

        def take() -> Decision[_Answer]:
            return self._take(key, claim_id, owner, reader_engine_id, turn)

        outcome = await self._ledger.decide(take)
        if outcome is m.MissReason.UNKNOWN_CONVERSATION and not turn:
            wait_s = self._settings.in_flight_wait_s if wait_s is None else wait_s
            in_flight = self._turns.in_flight(key) if wait_s > 0 else 0
            if in_flight:
                known = await self._turns.wait_until_settled(key, in_flight, wait_s, outcome)
                return known if isinstance(known, m.MissReason) else await self._ledger.decide(take)
        return outcome

    def _take(
        self, key: m.ConversationKey, claim_id: str, owner: str, reader_engine_id: str, turn: int
    ) -> Decision[_Answer]:
        ledger = self._ledger
        mine = ledger.claim(claim_id)
        if mine.value is not None:
            if mine.value.owner != owner or mine.value.location.key != key:
                raise InvalidFieldError("request_id", "names a claim of another owner or conversation")
            over, engine_unchanged = self._availability.judge_claim(mine.value)
            return Decision(over or mine.value, [mine.unchanged(), engine_unchanged])
        location_key, turns_key = keys.location_and_turns(key)
        stored, turns = ledger.location_at(location_key), ledger.turns_at(turns_key)
        known, location = turns.value or m.Turns(), stored.value
        compares = same_state(stored, mine, turns)
        if location is None or turn not in (0, location.turn):
            if known.claimed_turn and known.claimed_turn >= (turn or known.settled_turn):
                return Decision(m.MissReason.CLAIMED)  # which is for good, so there is nothing to make sure
            if known.quota_turn and known.quota_turn >= (turn or known.latest_turn):
                return Decision(m.MissReason.QUOTA, compares)
            return Decision(m.MissReason.UNKNOWN_CONVERSATION, compares)
        refused, engine_unchanged = self._availability.judge(location, reader_engine_id)
        compares.append(engine_unchanged)
        if refused is not None:
            return Decision(refused, compares)
        deadline_ms = min(ledger.clock.now_ms() + self._timeout_ms, location.deadline_ms)
        claim = m.Claim(claim_id, owner, location, deadline_ms)
        claimed = replace(known, claimed_turn=max(known.claimed_turn, location.turn))
        return Decision(
            claim,
            compares,
            [
                Delete(location_key),
                *ledger.keep_claim(claim),
                ledger.keep_turns(turns_key, claimed, self._settings.turns_kept_ms),
            ],
            Ended("claimed", location),
        )
