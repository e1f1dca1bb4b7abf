"""The prefill side as a whole: what is asked, read, failed and reported, request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import Any

from kvplane.client.logs import get_logger
from kvplane.connector.asking import Asker
from kvplane.connector.breaker import PeerBreaker
from kvplane.connector.envelope import MEMBER, Outcome
from kvplane.connector.inquiry import Question
from kvplane.connector.prefill import PrefillLedger
from kvplane.connector.pull import PullPlan

_log = get_logger("kvplane.connector")


class Reader:
    """Joins ledger, breaker and asker. Belongs to the scheduler thread; every method returns at once."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.ledger = PrefillLedger(monotonic)
        self.breaker = PeerBreaker(monotonic)
        self.asker: Asker | None = None
        """Set once there is a session; None: nothing is asked."""
        self.counts: Counter[str] = Counter()
        """Reads by how they ended: "read", "read_failed"; "breaker_opened"."""
        self._peers: dict[str, str] = {}  # by request: admitted, and nothing heard of it yet

    def settle(self, request_id: str, params: dict[str, Any], make: Callable[[], Question | None]) -> bool:
        """Find out what a request may pull, if no router of ours has said. False: ask again later.

        Changes `params` to those of the location that was claimed. `make` makes the question.
        """
        if self.asker is None or not (MEMBER not in params or self.asker.knows(request_id)):
            return True
        answer = self.asker.settle(request_id, make)
        if answer is None:
            return False
        if self.ledger.plan(request_id) is not None:
            return True
        self.ledger.offered(request_id, self.asker.asked_at(request_id))
        plan = answer.plan
        if answer.claim is not None and answer.params is not None:
            plan = self.admitted(request_id, plan, answer.claim.location.engine_id)
            if plan.outcome is None:
                params.update(answer.params)
                params["remote_num_tokens"], params["remote_block_ids"] = plan.tokens, plan.block_ids
            else:
                self.asker.finish(request_id)
        self.ledger.planned(request_id, plan)
        return True

    def admitted(self, request_id: str, plan: PullPlan, peer: object) -> PullPlan:
        """Return the plan, or that to pull nothing where reads from `peer` have failed too often."""
        if plan.outcome is not None or not isinstance(peer, str):
            return plan
        if not self.breaker.admits(peer):
            return PullPlan(0, None, Outcome.COLD, "peer_breaker")
        self._peers[request_id] = peer
        return plan

    def dropped(self, request_id: str) -> None:
        """Note that a request which might have read will not."""
        self._unused(request_id)
        if self.asker is not None:
            self.asker.finish(request_id)

    def allocated(self, request_id: str, pulled_tokens: int, blocks: Iterable[int]) -> None:
        """See PrefillLedger."""
        self.ledger.allocated(request_id, pulled_tokens, blocks)
        if not self.ledger.reading(request_id):
            self._unused(request_id)

    def received(self, done: Iterable[str], failed: Set[str], invalid_blocks: Set[int]) -> None:
        """Note reads that ended. What could not be read is finished, so that its engine frees it."""
        for read in self.ledger.received(done, failed, invalid_blocks):
            peer = self._peers.pop(read.request_id, "")
            self.counts["read_failed" if read.failed else "read"] += 1
            if not read.failed:
                self.breaker.succeeded(peer)
            elif peer and self.breaker.failed(peer):
                self.counts["breaker_opened"] += 1
                _log.warning("peer_breaker_opened", remote_engine_id=peer)
            if self.asker is not None:
                self.asker.finish(read.request_id)
                if read.over:
                    self.asker.end(read.request_id)

    def offered_tokens(self, request_id: str) -> int | None:
        """Return how many tokens the location holds that was found for a request, None if none was."""
        begun = self.asker.begun(request_id) if self.asker is not None else None
        return begun.location.token_count if begun is not None and begun.location is not None else None

    def report(self, request_id: str, prompt_tokens: int) -> dict[str, Any]:
        """End a request: return what became of it, with whose turn it is if this engine began it."""
        report = {**self.ledger.report(request_id, prompt_tokens), **self._envelope(request_id)}
        self._end(request_id, reading=False)
        return report

    def forget(self, request_id: str) -> None:
        """End a request that nobody is told of: aborted, at any moment. Idempotent."""
        reading = self.ledger.reading(request_id)
        self.ledger.forget(request_id)
        self._end(request_id, reading=reading)

    def _end(self, request_id: str, *, reading: bool) -> None:
        if not reading:
            self._unused(request_id)
        if self.asker is not None:
            self.asker.end(request_id, reading=reading)

    def _envelope(self, request_id: str) -> dict[str, Any]:
        begun = self.asker.begun(request_id) if self.asker is not None else None
        if begun is None:
            return {}
        envelope = {
            "tenant_id": begun.key.tenant_id,
            "model": begun.key.model,
            "adapter": begun.key.adapter,
            "conversation_id": begun.key.conversation_id,
            "turn": begun.turn,
            "turn_index": begun.turn_index,
            "idle_s": begun.idle_s,
            "lease_class": begun.lease_class,
        }
        return {name: value for name, value in envelope.items() if value is not None}

    def _unused(self, request_id: str) -> None:
        peer = self._peers.pop(request_id, None)
        if peer is not None:
            self.breaker.unused(peer)
