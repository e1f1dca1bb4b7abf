"""The decode side: keeps finished turns, announces them, and gives their blocks back when agreed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    ReleaseReason,
    RequestId,
)
from kvplane.client.sparing import Sparing
from kvplane.connector.chains import ChainCache
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.envelope import Envelope, is_id
from kvplane.connector.fingerprint import Context, Item, make_chain
from kvplane.connector.leases import Leases, Terms
from kvplane.connector.retention import Retention, State
from kvplane.connector.returns import Returns, Traits, lease_class

_MAX_PARAMS_BYTES = 1 << 20
_MAX_CHAIN_BYTES = 1 << 20
_LATE_CONTACT_S = 10.0
_SUMMARY_EVERY_S = 600.0

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

    def renew(self, request_id: RequestId, *, expires_at: float) -> bool:
        """Say that blocks live longer; False if they are not on record."""

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
        prompt_tokens: how many of the tokens are the prompt's.
        finish: why the reply ended: "stop" or "length".
    """

    request_id: str
    envelope: Envelope
    context: Context | None
    tokens: Sequence[int]
    items: Sequence[Item]
    blocks: Sequence[int]
    params: dict[str, Any]
    prompt_tokens: int = 0
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is remembered of a retained turn."""

    tenant_id: str
    lease_class: int
    ended_at: float
    tokens: int


class Keeper:
    """Joins the retention budget, the leases, what is learned, and the session.

    Belongs to the scheduler thread; nothing in it waits.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        session: Session,
        retention: Retention,
        *,
        monotonic: Callable[[], float],
        block_tokens: int = 16,
        chains: ChainCache | None = None,
    ) -> None:
        self._config = config
        self._chains = chains if chains is not None else ChainCache()
        self._session = session
        self._retention = retention
        self._monotonic = monotonic
        self._leases = Leases(monotonic=monotonic, max_age_s=config.max_age_s)
        self._returns = Returns(
            monotonic=monotonic,
            max_ttl_s=config.max_ttl_s,
            min_ttl_s=config.min_ttl_s,
            block_tokens=block_tokens,
        )
        self._kept: dict[str, _Kept] = {}
        self._here: dict[str, Hashable] = {}  # requests that wait or run, and whose they are
        self._waits_since: float | None = None
        retention.worth = self._worth
        retention.shares.weights = config.tenant_weights
        self._draining = False
        self._fenced = False
        self._next_summary = 0.0
        self._summed: Counter[str] = Counter()
        self._sparing = Sparing(monotonic)
        self.counts: Counter[str] = Counter()
        """What happened how often: "retained", "freed", and why turns were not retained.

        "waited" are requests that waited for retained blocks, "waited_ms" the sum of their waiting and
        "waited_ms_most" the longest.
        """

    @property
    def retention(self) -> Retention:
        """The budget."""
        return self._retention

    @property
    def returns(self) -> Returns:
        """What is learned of when conversations come back."""
        return self._returns

    def arrive(self, request_id: str, envelope: Envelope) -> None:
        """Note a request of a conversation that waits here now. Idempotent until it leaves."""
        if request_id in self._here:
            return
        self._here[request_id] = envelope.key
        self._retention.busy(envelope.key, True)
        if envelope.lease_class is not None and envelope.idle_s is not None:
            self._returns.returned(envelope.key.tenant_id, envelope.lease_class, envelope.idle_s)

    def leave(self, request_id: str) -> None:
        """Note that a request is over, however it ended. Idempotent."""
        owner = self._here.pop(request_id, None)
        if owner is not None:
            self._retention.busy(owner, False)

    def admitted(self, blocks: int) -> None:
        """Note that a request was given so many free blocks."""
        self._retention.demand.take(blocks)

    def finish(self, turn: FinishedTurn) -> Terms | None:
        """Retain and announce a turn; returns its deadlines, the blocks' for the engine to set at once.

        None: its blocks are to be freed as ever. O(tokens).
        """
        reason, envelope = self._refusal(turn), turn.envelope
        tenant_id, blocks = envelope.key.tenant_id, len(set(turn.blocks))
        reply_tokens = max(0, len(turn.tokens) - turn.prompt_tokens)
        traits = Traits(
            tenant_id=tenant_id,
            turn_index=envelope.turn_index or 1,
            prompt_tokens=turn.prompt_tokens,
            reply_tokens=reply_tokens,
            finish=turn.finish,
            idle_s=envelope.idle_s,
        )
        number = lease_class(traits)
        announcement = None if reason else self._announcement(turn, number, blocks)
        if announcement is None:
            self.counts[f"not_retained:{reason or 'too_large'}"] += 1
            return None
        ttl_s = self._config.ttl_s
        if ttl_s is None:
            ttl_s = self._returns.ttl_s(tenant_id, number, tokens=len(turn.tokens), blocks=blocks)
        self._returns.retained(tenant_id, number, tokens=len(turn.tokens), blocks=blocks)
        self._kept[turn.request_id] = _Kept(tenant_id, number, self._monotonic(), len(turn.tokens))
        terms = self._leases.begin(turn.request_id, ttl_s)
        self._retention.retain(turn.request_id, envelope.key, turn.blocks, tenant_id)
        self._session.announce(announcement, expires_at=terms.record)
        self.counts["retained"] += 1
        return terms

    def step(
        self, free_blocks: int | None, *, wanted_blocks: int = 0, spare: Envelope | None = None
    ) -> dict[str, float]:
        """Look after everything retained; returns requests whose blocks have a new deadline, now for some.

        To be called once for every step, whose worker is told of the deadlines.

        Args:
            free_blocks: in the pool, None if not known.
            wanted_blocks: that a request needs which waits for them, 0 if none does.
            spare: the conversation of that request.
        """
        for event in self._session.drain_events():
            self._on(event)
        self._retention.tick(self._session.last_contact)
        if free_blocks is not None:
            self._measure(free_blocks, wanted_blocks)
            owner = spare.key if spare is not None else None
            self._retention.relieve(free_blocks, wanted_blocks=wanted_blocks, spare=owner)
        for request_id in self._leases.idle():
            self._idle(request_id)
        self._ask_back()
        self._summarize()
        deadlines, now = self._leases.take_deadlines(), self._monotonic()
        deadlines.update((request_id, now) for request_id in self._retention.take_frees())
        return deadlines

    def step_done(self) -> None:
        """Note that the outcome of the oldest step under way is known, and what it freed has been noted."""
        for request_id, expires_at in self._leases.step_done().items():
            if self._session.renew(RequestId(request_id), expires_at=expires_at):
                self.counts["renewed"] += 1

    def freed(self, request_ids: Iterable[str]) -> None:
        """Note that the engine freed these requests' blocks: read, expired or let go."""
        for request_id in request_ids:
            state = self._retention.state(request_id)
            if self._retention.freed(request_id):
                self.counts["freed"] += 1
                self._session.freed(RequestId(request_id))
                in_time = self._leases.end(request_id)
                self._over(request_id, read=in_time and state is not State.FREEING)

    def reset(self) -> bool:
        """Forget everything retained: its KV is no longer what new KV will be. False while any is held.

        There may be no step for long. So all is asked back here and now: the next incarnation announces again
        what this one still has on record.
        """
        held = len(self._retention)
        if held:
            _log.info("cache_reset_requested", held=held)
            self._retention.withdraw_all()
            self._ask_back()
        self._session.start_incarnation()
        return held == 0

    def report_load(self, *, running: int, waiting: int, free_blocks: int) -> None:
        """Report the engine's load."""
        retention = self._retention
        self._session.set_load(
            EngineLoad(running, waiting, free_blocks, retention.held_blocks, len(retention))
        )

    def _ask_back(self) -> None:
        for request_id in self._retention.take_withdrawals():
            self.counts["withdrawn"] += 1
            if not self._session.withdraw(RequestId(request_id)):
                self._retention.withdrawn(request_id, claimed=False)

    def _refusal(self, turn: FinishedTurn) -> str:
        if self._fenced:
            return "fenced"
        if self._draining:
            return "draining"
        contact = self._session.last_contact
        if contact is None:
            return "no_control_plane"
        # What cannot be asked back is a burden if blocks are short.
        is_lost = self._retention.pressed or self._monotonic() - contact > _LATE_CONTACT_S
        if is_lost and not self._session.attached:
            return "no_control_plane"
        if not is_id(turn.request_id):  # no client's choice of one may cost the session
            return "request_id"
        if turn.context is None:
            return "no_fingerprint"
        if not turn.tokens:
            return "no_tokens"
        return self._retention.refusal(turn.blocks, turn.envelope.key.tenant_id)

    def _worth(self, request_id: str, blocks: int) -> float:
        """Return the tokens that a retained turn is expected to save per block-second from now on."""
        kept = self._kept[request_id]
        idle_s = self._monotonic() - kept.ended_at
        return self._returns.worth(
            kept.tenant_id, kept.lease_class, idle_s=idle_s, tokens=kept.tokens, blocks=blocks
        )

    def _measure(self, free_blocks: int, wanted_blocks: int) -> None:
        """Measure how long the first in line waits, if it would not with nothing retained."""
        waits = free_blocks < wanted_blocks <= free_blocks + self._retention.held_blocks
        if waits and self._waits_since is None:
            self._waits_since = self._monotonic()
        elif not waits and self._waits_since is not None:
            waited_ms = round((self._monotonic() - self._waits_since) * 1000)
            self._waits_since = None
            self.counts["waited"] += 1
            self.counts["waited_ms"] += waited_ms
            self.counts["waited_ms_most"] = max(self.counts["waited_ms_most"], waited_ms)

    def _idle(self, request_id: str) -> None:
        """A turn's next one is not waited for any longer, unless it is here already, waiting or running."""
        if self._retention.state(request_id) is not State.RETAINED:
            return
        if self._retention.is_busy(request_id) and self._leases.extend(request_id, self._config.min_ttl_s):
            return
        self.counts["idle"] += 1
        self._retention.withdraw(request_id)

    def _renew(self, request_id: str, ttl_s: float) -> None:
        """The control plane wants a turn kept on: somebody is active."""
        if self._retention.state(request_id) is not State.RETAINED:
            return
        if self._retention.pressed and not self._retention.is_within_share(request_id):
            self.counts["not_renewed:pressure"] += 1
        elif not self._leases.extend(request_id, ttl_s):
            self.counts["not_renewed:long_enough"] += 1

    def _over(self, request_id: str, *, read: bool) -> None:
        """Learn from the end of a retained turn; only the first call for a turn counts."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            lived_s = self._monotonic() - kept.ended_at
            self._returns.ended(kept.tenant_id, kept.lease_class, lived_s, read=read)

    def _announcement(self, turn: FinishedTurn, number: int, blocks: int) -> Announcement | None:
        assert turn.context is not None
        latest = self._leases.last_possible()
        turn.params["remote_blocks_expiry_time"] = latest  # renewals may keep them until then
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
            block_count=blocks,
            kv_transfer_params=params,
            fingerprint=Fingerprint(self._config.chunk_tokens, chain),
            ttl_s=0.0,  # filled in when it is sent
            endpoint=turn.envelope.endpoint or self._config.endpoint,
            lease_class=number,
        )

    def _on(self, event: ev.Event) -> None:
        match event:
            case ev.Announced(result):
                self.counts[f"announced:{result.outcome}"] += 1
                if result.outcome is AnnounceOutcome.REFUSED:
                    more = self._sparing.fields("announcement_refused")
                    if more is not None:
                        _log.warning(
                            "announcement_refused",
                            request_id=result.request_id,
                            detail=result.detail,
                            **more,
                        )
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
                late = reason is ReleaseReason.CLAIM_TIMEOUT  # its reader may have begun at the last moment
                linger_s = self._retention.claim_timeout_s if late else 0.0
                self._retention.release(request_id, linger_s=linger_s)
                if reason in (ReleaseReason.SUPERSEDED, ReleaseReason.CLAIM_FINISHED):
                    self._over(request_id, read=True)
            case ev.RenewalOrdered(request_id, ttl_s):
                self._renew(request_id, ttl_s)
            case ev.Registered(registration, first):
                self._retention.lease_ttl_s = registration.lease_ttl_s
                self._retention.claim_timeout_s = registration.claim_timeout_s
                self._leases.claim_timeout_s = registration.claim_timeout_s
                self._leases.longest_s = registration.max_location_ttl_s
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
        """Log the counts, at most every ten minutes and only if they changed."""
        now = self._monotonic()
        if now < self._next_summary:
            return
        self._next_summary = now + _SUMMARY_EVERY_S
        if self.counts != self._summed:
            changed = {name.replace(":", "_"): value for name, value in sorted(self.counts.items())}
            _log.info("retention_summary", held_blocks=self._retention.held_blocks, **changed)
            self._summed = self.counts.copy()
