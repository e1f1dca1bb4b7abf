"""Claims: one reader, once, finally."""

from __future__ import annotations

from dataclasses import replace

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.errors import ContentionError, InvalidFieldError
from kvplane.controlplane.ledger import ATTEMPTS, Ledger
from kvplane.controlplane.turns import Turns
from kvplane.store.base import Delete


class Claims:
    """Gives each location to at most one reader, over any number of callers and replicas."""

    def __init__(
        self, ledger: Ledger, availability: Availability, turns: Turns, settings: m.Settings
    ) -> None:
        self._ledger = ledger
        self._availability = availability
        self._turns = turns
        self._settings = settings

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

        The location leaves the record and the claim enters it in one transaction that also holds the
        engine's incarnation still, so there is no moment at which two callers could win.
        Raises InvalidFieldError for a claim id in use by another owner or conversation, ContentionError.
        """
        wait_s = self._settings.in_flight_wait_s if wait_s is None else wait_s
        outcome = await self._take(key, claim_id, owner, reader_engine_id, turn)
        if outcome is m.MissReason.UNKNOWN_CONVERSATION and not turn and wait_s > 0:
            in_flight = await self._turns.in_flight(key)
            if in_flight:
                known = await self._turns.wait_until_settled(key, in_flight, wait_s, outcome)
                if isinstance(known, m.MissReason):
                    return known
                return await self._take(key, claim_id, owner, reader_engine_id, turn)
        return outcome

    async def _take(
        self, key: m.ConversationKey, claim_id: str, owner: str, reader_engine_id: str, turn: int
    ) -> m.Claim | m.MissReason:
        for _ in range(ATTEMPTS):
            mine = await self._ledger.claim(claim_id)
            if mine.value is not None:
                if mine.value.owner != owner or mine.value.location.key != key:
                    raise InvalidFieldError("request_id", "names a claim of another owner or conversation")
                return mine.value
            stored, turns = await self._ledger.location(key), await self._ledger.turns(key)
            known = turns.value or m.Turns()
            if stored.value is None or turn not in (0, stored.value.turn):
                was_claimed = known.claimed_turn and known.claimed_turn >= (turn or known.settled_turn)
                return m.MissReason.CLAIMED if was_claimed else m.MissReason.UNKNOWN_CONVERSATION
            reason, engine_unchanged = await self._availability.judge(stored.value, reader_engine_id)
            if reason is not None:
                return reason
            deadline_ms = self._ledger.clock.now_ms() + round(self._settings.claim_timeout_s * 1000)
            claim = m.Claim(claim_id, owner, stored.value, min(deadline_ms, stored.value.deadline_ms))
            claimed = replace(known, claimed_turn=max(known.claimed_turn, stored.value.turn))
            operations = [
                Delete(keys.location(key)),
                *await self._ledger.put_claim(claim),
                await self._ledger.put_turns(key, claimed, self._settings.turns_kept_ms),
            ]
            compares = [stored.unchanged(), mine.unchanged(), turns.unchanged(), engine_unchanged]
            if await self._ledger.write(compares, operations):
                return claim
        raise ContentionError
