"""A control plane in memory with the methods of ControlPlaneClient that router and engines use."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneUnavailableError, LimitExceededError


class FakePlane:
    """Answers as the real one does, without leases and time. `down` makes every call fail.

    `answers` holds back while it is cleared: a plane that takes calls and does not answer.
    """

    def __init__(self) -> None:
        self.down = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.limited = False
        """Whether the tenant asks for more than it may."""
        self.refuse_claims: m.MissReason | None = None
        self.calls: Counter[str] = Counter()
        self.engines: dict[m.EngineId, m.Engine] = {}
        self.locations: dict[m.ConversationKey, m.Location] = {}
        self.claims: dict[str, m.Claim] = {}
        self.claim_requests: list[tuple[str, str]] = []
        """(owner, reader_engine_id) of each claim that was asked for."""
        self.finished: list[str] = []
        self.touched: list[tuple[m.ConversationKey, float, int]] = []
        self.ended: list[m.ConversationKey] = []
        self.begun: dict[str, Any] = {}
        """What begin_turn answers besides: members of BegunTurn."""
        self.turns_begun: Counter[m.ConversationKey] = Counter()
        self._latest: Counter[m.ConversationKey] = Counter()
        self._over: Counter[m.ConversationKey] = Counter()
        """The last number of each conversation, and the last that nobody awaits: announced, or ended."""
        self._changed = asyncio.Event()
        self._last = 0

    async def _enter(self, call: str, timeout_s: float | None = None) -> None:
        self.calls[call] += 1
        if self.down:
            raise ControlPlaneUnavailableError("down")
        if self.limited and call in ("begin_turn", "lookup_location", "claim_location", "touch_conversation"):
            raise LimitExceededError("too many", reason="QUOTA_EXCEEDED")
        try:
            async with asyncio.timeout(timeout_s or 2.0):
                await self.answers.wait()
        except TimeoutError:
            raise ControlPlaneUnavailableError("deadline exceeded") from None

    def _next(self) -> int:
        self._last += 1
        return self._last

    async def list_engines(self) -> list[m.Engine]:
        await self._enter("list_engines")
        return list(self.engines.values())

    async def register_engine(self, spec: m.EngineSpec, *, request_id: str = "") -> m.Registration:
        await self._enter("register_engine")
        epoch = self._next()
        self.engines[spec.engine_id] = m.Engine(spec, epoch, False, True, None)
        self.locations = {k: v for k, v in self.locations.items() if v.engine_id != spec.engine_id}
        return m.Registration(epoch, 10.0, 480.0, 30.0)

    async def renew_engine(
        self, engine_id: m.EngineId, engine_epoch: int, load: m.EngineLoad | None = None
    ) -> tuple[float, bool]:
        await self._enter("renew_engine")
        return 10.0, False

    async def deregister_engine(self, engine_id: m.EngineId, engine_epoch: int) -> None:
        await self._enter("deregister_engine")
        self.engines.pop(engine_id, None)
        self.locations = {k: v for k, v in self.locations.items() if v.engine_id != engine_id}

    async def announce_location(
        self, engine_id: m.EngineId, engine_epoch: int, announcement: m.Announcement
    ) -> m.AnnouncementResult:
        await self._enter("announce_location")
        if self._over[announcement.key] > announcement.turn:
            return m.AnnouncementResult(announcement.request_id, m.AnnounceOutcome.SUPERSEDED, 0.0)
        self._settle(announcement.key, announcement.turn)
        spec = self.engines[engine_id].spec
        self.locations[announcement.key] = m.Location(
            key=announcement.key,
            engine_id=engine_id,
            engine_epoch=engine_epoch,
            request_id=announcement.request_id,
            turn=announcement.turn,
            token_count=announcement.token_count,
            block_count=announcement.block_count,
            kv_transfer_params=announcement.kv_transfer_params,
            fingerprint=announcement.fingerprint,
            remaining_s=announcement.ttl_s,
            revision=self._next(),
            endpoint=spec.endpoint or announcement.endpoint,
            data_parallel_rank=spec.data_parallel_rank,
        )
        return m.AnnouncementResult(announcement.request_id, m.AnnounceOutcome.ACCEPTED, announcement.ttl_s)

    async def withdraw_location(
        self, engine_id: m.EngineId, engine_epoch: int, request_id: m.RequestId
    ) -> m.ReleaseOutcome:
        await self._enter("withdraw_location")
        for key, location in self.locations.items():
            if location.engine_id == engine_id and location.request_id == request_id:
                if location.claimed:
                    return m.ReleaseOutcome.CLAIMED
                del self.locations[key]
                return m.ReleaseOutcome.RELEASED
        return m.ReleaseOutcome.NOTHING

    def _settle(self, key: m.ConversationKey, turn: int) -> None:
        self._over[key] = max(self._over[key], turn)
        self._changed.set()
        self._changed = asyncio.Event()

    def _known(self, key: m.ConversationKey) -> m.Location | m.MissReason:
        location = self.locations.get(key)
        if location is None:
            return m.MissReason.UNKNOWN_CONVERSATION
        return m.MissReason.CLAIMED if location.claimed else location

    async def lookup_location(
        self, key: m.ConversationKey, *, timeout_s: float | None = None, turn_group: str = ""
    ) -> m.Location | m.MissReason:
        await self._enter("lookup_location", timeout_s)
        return self._known(key)

    async def begin_turn(
        self,
        key: m.ConversationKey,
        request_id: str,
        *,
        wait_s: float | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> m.BegunTurn:
        await self._enter("begin_turn", timeout_s)
        in_flight = self._latest[key] if self._latest[key] > self._over[key] else 0
        turn = self._latest[key] = self._next()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s or 0.0):
                while in_flight > self._over[key]:
                    await self._changed.wait()
        known = self._known(key)
        if in_flight > self._over[key] and isinstance(known, m.MissReason):
            known = m.MissReason.TURN_IN_FLIGHT
        found = known if isinstance(known, m.Location) else None
        miss = known if isinstance(known, m.MissReason) else None
        self.turns_begun[key] += 1
        return replace(m.BegunTurn(turn, found, miss, key, self.turns_begun[key]), **self.begun)

    async def claim_location(
        self,
        key: m.ConversationKey,
        request_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> m.Claim | m.MissReason:
        self.claim_requests.append((owner, reader_engine_id))
        await self._enter("claim_location", timeout_s)
        if self.refuse_claims is not None:
            return self.refuse_claims
        known = self._known(key)
        if not isinstance(known, m.Location):
            return known
        if turn and known.turn != turn:
            return m.MissReason.UNKNOWN_CONVERSATION
        claimed = replace(known, claimed=True)
        self.locations[key] = claimed
        claim = self.claims[request_id] = m.Claim(request_id, owner, claimed, 30.0)
        return claim

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        await self._enter("finish_claim")
        self.finished.append(claim_id)
        claim = self.claims.pop(claim_id, None)
        if claim is None:
            return m.ReleaseOutcome.NOTHING
        assert claim.owner == owner
        if self.locations.get(claim.location.key) == claim.location:
            del self.locations[claim.location.key]
        return m.ReleaseOutcome.RELEASED

    async def end_conversation(self, key: m.ConversationKey) -> m.ReleaseOutcome:
        await self._enter("end_conversation")
        self.ended.append(key)
        self._settle(key, self._latest[key])
        gone = self.locations.pop(key, None)
        return m.ReleaseOutcome.NOTHING if gone is None else m.ReleaseOutcome.RELEASED

    async def touch_conversation(
        self, key: m.ConversationKey, ttl_s: float, *, turn: int = 0, timeout_s: float | None = None
    ) -> m.Touched:
        await self._enter("touch_conversation", timeout_s)
        self.touched.append((key, ttl_s, turn))
        known = self.locations.get(key)
        if known is None:
            return m.Touched(self._latest[key] > self._over[key])
        return m.Touched(True, known.remaining_s)

    async def aclose(self) -> None:
        pass
