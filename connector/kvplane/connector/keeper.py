"""The decode side: keeps finished turns, announces them, and gives their blocks back when agreed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvplane.client import events as ev
from kvplane.client.logs import get_logger
from kvplane.client.model import (
    Announcement,
    AnnounceOutcome,
    EngineLoad,
    Fingerprint,
    Registration,
    ReleaseOutcome,
    RequestId,
)
from kvplane.connector.chains import ChainCache
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.envelope import Envelope
from kvplane.connector.fingerprint import Context, Item, make_chain
from kvplane.connector.retention import Retention

_MAX_PARAMS_BYTES = 1 << 20
_MAX_CHAIN_BYTES = 1 << 20
_LATE_CONTACT_S = 10.0
_SUMMARY_EVERY_S = 60.0

_log = get_logger("kvplane.connector")


class Session(Protocol):
    """What is needed of EngineSessionThread. Every method returns at once."""

    @property
    def attached(self) -> bool:
        """Whether the control plane answers now."""

    @property
    def last_contact(self) -> float | None:
        """Latest time at which the control plane can have heard of this engine."""

    @property
    def registration(self) -> Registration | None:
        """The current incarnation."""

    def announce(self, announcement: Announcement, *, expires_at: float) -> None:
        """Queue an announcement."""

    def withdraw(self, request_id: RequestId) -> bool:
        """Ask for blocks back; False if nobody knows of them."""

    def freed(self, request_id: RequestId) -> None:
        """Note that blocks are free."""

    def set_load(self, load: EngineLoad) -> None:
        """Set the load to report."""

    def start_incarnation(self) -> None:
        """Take all locations off the record."""

    def drain_events(self) -> list[ev.Event]:
        """Return what came since the last call."""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn that has just ended on this engine, with its blocks still in place.

    Attributes:
        request_id: the engine's.
        envelope: whose turn it is.
        context: what its KV depends on besides tokens; None if it cannot be named.
        tokens: exactly those whose KV is complete.
        items: multimodal items among them.
        blocks: all block ids, over all groups.
        params: what a reader needs, as the engine made it for these tokens.
        expires_at: when the engine frees the blocks by itself.
    """

    request_id: str
    envelope: Envelope
    context: Context | None
    tokens: Sequence[int]
    items: Sequence[Item]
    blocks: Sequence[int]
    params: dict[str, Any]
    expires_at: float


class Keeper:
    """Joins the retention budget and the session. Belongs to the scheduler thread; nothing in it waits."""

    def __init__(
        self,
        config: ConnectorConfig,
        session: Session,
        retention: Retention,
        *,
        monotonic: Callable[[], float],
        chains: ChainCache | None = None,
    ) -> None:
        self._config = config
        self._chains = chains if chains is not None else ChainCache()
        self._session = session
        self._retention = retention
        self._monotonic = monotonic
        self._draining = False
        self._fenced = False
        self._next_summary = 0.0
        self._summed: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """What happened how often: "retained", "freed", and why turns were not retained."""

    @property
    def retention(self) -> Retention:
        """The budget."""
        return self._retention

    def finish(self, turn: FinishedTurn) -> bool:
        """Retain and announce a turn; False if its blocks are to be freed as ever. O(tokens)."""
        reason = self._refusal(turn)
        announcement = None if reason else self._announcement(turn)
        if announcement is None:
            self.counts[f"not_retained:{reason or 'too_large'}"] += 1
            return False
        self._retention.retain(turn.request_id, turn.envelope.key, turn.blocks)
        self._session.announce(announcement, expires_at=turn.expires_at)
        self.counts["retained"] += 1
        return True

    def step(
        self, free_blocks: int | None, *, wanted_blocks: int = 0, spare: Envelope | None = None
    ) -> list[str]:
        """Look after everything retained; returns the requests whose blocks are to be freed now.

        Args:
            free_blocks: in the pool, None if not known.
            wanted_blocks: that a request needs which waits for them, 0 if none does.
            spare: the conversation of that request.
        """
        for event in self._session.drain_events():
            self._on(event)
        self._retention.tick(self._session.last_contact)
        if free_blocks is not None:
            owner = spare.key if spare is not None else None
            self._retention.relieve(free_blocks, wanted_blocks=wanted_blocks, spare=owner)
        for request_id in self._retention.take_withdrawals():
            self.counts["withdrawn"] += 1
            if not self._session.withdraw(RequestId(request_id)):
                self._retention.withdrawn(request_id, claimed=False)
        self._summarize()
        return self._retention.take_frees()

    def freed(self, request_ids: Iterable[str]) -> None:
        """Note that the engine freed these requests' blocks: read, expired or let go."""
        for request_id in request_ids:
            if self._retention.freed(request_id):
                self.counts["freed"] += 1
                self._session.freed(RequestId(request_id))

    def reset(self) -> bool:
        """Forget everything retained: its KV is no longer what new KV will be. False while any is held."""
        held = len(self._retention)
        if held:
            _log.info("cache_reset_requested", held=held)
            self._retention.withdraw_all()
        self._session.start_incarnation()
        return held == 0

    def report_load(self, *, running: int, waiting: int, free_blocks: int) -> None:
        """Report the engine's load."""
        retention = self._retention
        self._session.set_load(
            EngineLoad(running, waiting, free_blocks, retention.held_blocks, len(retention))
        )

    def _refusal(self, turn: FinishedTurn) -> str:
        if self._fenced:
            return "fenced"
        if self._draining:
            return "draining"
        contact = self._session.last_contact
        if contact is None or (not self._session.attached and self._monotonic() - contact > _LATE_CONTACT_S):
            return "no_control_plane"
        if turn.context is None:
            return "no_fingerprint"
        if not turn.tokens:
            return "no_tokens"
        return self._retention.refusal(turn.blocks)

    def _announcement(self, turn: FinishedTurn) -> Announcement | None:
        assert turn.context is not None
        try:
            chain = make_chain(turn.context, turn.tokens, self._config.chunk_tokens, turn.items, self._chains)
        except OverflowError:
            return None
        params = json.dumps(turn.params, separators=(",", ":")).encode()
        if len(chain) > _MAX_CHAIN_BYTES or len(params) > _MAX_PARAMS_BYTES:
            return None
        return Announcement(
            key=turn.envelope.key,
            request_id=RequestId(turn.request_id),
            turn=turn.envelope.turn,
            token_count=len(turn.tokens),
            block_count=len(set(turn.blocks)),
            kv_transfer_params=params,
            fingerprint=Fingerprint(self._config.chunk_tokens, chain),
            ttl_s=0.0,  # filled in when it is sent
            endpoint=turn.envelope.endpoint or self._config.endpoint,
        )

    def _on(self, event: ev.Event) -> None:
        match event:
            case ev.Announced(result):
                self.counts[f"announced:{result.outcome}"] += 1
                if result.outcome is AnnounceOutcome.REFUSED:
                    _log.warning("announcement_refused", request_id=result.request_id, detail=result.detail)
                    # Not freed at once: refused a second time, it may be on record from the first.
                    self._retention.withdraw(result.request_id)
                elif result.outcome is AnnounceOutcome.CLAIMED:
                    self._retention.claimed(result.request_id)
            case ev.Dropped(request_id, reason):
                self.counts[f"dropped:{reason}"] += 1
                self._retention.release(request_id)
            case ev.Withdrawn(request_id, outcome):
                self._retention.withdrawn(request_id, claimed=outcome is ReleaseOutcome.CLAIMED)
            case ev.Ordered(request_id, reason):
                self.counts[f"ordered:{reason}"] += 1
                self._retention.release(request_id)
            case ev.Registered(registration, first):
                self._retention.lease_ttl_s = registration.lease_ttl_s
                self._retention.claim_timeout_s = registration.claim_timeout_s
                if not first:
                    self._retention.hold()
            case ev.DrainRequested(draining):
                self._draining = draining
                _log.info("draining_changed", draining=draining)
                if draining:  # no new claims are granted: what is not claimed is of no use any more
                    self._retention.withdraw_all()
            case ev.Fenced():
                self._fenced = True
                self._retention.hold()
                for retained in self._retention.request_ids():
                    self._retention.release(retained)

    def _summarize(self) -> None:
        """Log the counts, at most once a minute and only if they changed."""
        now = self._monotonic()
        if now < self._next_summary:
            return
        self._next_summary = now + _SUMMARY_EVERY_S
        if self.counts != self._summed:
            changed = {name.replace(":", "_"): value for name, value in sorted(self.counts.items())}
            _log.info("retention_summary", held_blocks=self._retention.held_blocks, **changed)
            self._summed = self.counts.copy()
