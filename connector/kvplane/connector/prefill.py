"""The prefill side: remembers what became of each request's pull, and reports it to the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

from kvplane.connector.envelope import Outcome
from kvplane.connector.pull import PullPlan


@dataclass(slots=True)
class _Pull:
    arrived: float
    plan: PullPlan | None = None
    asked: bool = False
    local_tokens: int = 0
    offered_tokens: int = 0
    pulled_tokens: int = 0
    allocated: bool = False
    blocks: Set[int] = field(default_factory=frozenset)
    reading: bool = False
    failed: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A read that ended; `over` if its request had ended before."""

    request_id: str
    failed: bool
    over: bool


class PrefillLedger:
    """One entry per prefill request under way. Belongs to the scheduler thread; every method is O(1)."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._pulls: dict[str, _Pull] = {}
        self._left: dict[str, _Pull] = {}  # requests that ended, aborted, while their read was under way
        self.outcomes: Counter[str] = Counter()
        """How often each outcome was reported, and why, as "outcome" or "outcome:detail"."""

    def __len__(self) -> int:
        return len(self._pulls)

    def arrive(self, request_id: str) -> None:
        """Note a new request. Idempotent."""
        if request_id not in self._pulls:
            self._pulls[request_id] = _Pull(self._monotonic())

    def offered(self, request_id: str, at: float) -> None:
        """Note that what there is to pull was found by this engine, at `at`: it waits since then."""
        self._get(request_id).arrived = at

    def waited(self, request_id: str) -> float:
        """Return for how many seconds the request is here."""
        return self._monotonic() - self._get(request_id).arrived

    def plan(self, request_id: str) -> PullPlan | None:
        """Return the plan made for the request, None if none was made yet."""
        return self._get(request_id).plan

    def planned(self, request_id: str, plan: PullPlan) -> None:
        """Note the plan, once per request."""
        self._get(request_id).plan = plan

    def may_pull(self, request_id: str) -> bool:
        """Whether a pull may still be offered: there is one per request, whatever became of it.

        A request that was preempted, or whose read failed, is asked about again; vLLM would then wait for
        a second read that never begins.
        """
        return not self._get(request_id).allocated

    def asked(self, request_id: str, local_tokens: int, offered_tokens: int) -> None:
        """Note what the scheduler was last told: tokens in the own cache, and tokens to pull beyond."""
        pull = self._get(request_id)
        if pull.allocated:  # preempted, or the read failed: what was pulled is at best in the own cache
            pull.pulled_tokens, pull.lost = 0, True
        pull.asked, pull.local_tokens, pull.offered_tokens = True, local_tokens, offered_tokens

    def allocated(self, request_id: str, pulled_tokens: int, blocks: Iterable[int] = ()) -> None:
        """Note what the scheduler really lets us pull, and into which of our blocks."""
        pull = self._get(request_id)
        if not pull.allocated:
            pull.allocated, pull.pulled_tokens = True, pulled_tokens
            pull.reading = pulled_tokens > 0
            pull.blocks = frozenset(blocks) if pulled_tokens else frozenset()

    def reading(self, request_id: str) -> bool:
        """Whether the request's read is under way."""
        pull = self._pulls.get(request_id) or self._left.get(request_id)
        return pull is not None and pull.reading

    def received(self, done: Iterable[str], failed: Set[str], invalid_blocks: Set[int]) -> list[Read]:
        """Note reads that ended, and return them.

        Which of them failed is said by request or by the blocks they filled; of several ranks one may say so
        before the last is done.
        """
        if invalid_blocks:
            for pull in (*self._pulls.values(), *self._left.values()):
                pull.failed |= bool(pull.blocks & invalid_blocks)
        for request_id in failed:
            late = self._pulls.get(request_id) or self._left.get(request_id)
            if late is not None and late.reading:
                late.failed = True
        reads = list[Read]()
        for request_id in done:
            ended, over = self._pulls.get(request_id), False
            if ended is None:
                ended, over = self._left.pop(request_id, None), True
            if ended is not None and ended.reading:
                ended.reading, ended.blocks = False, frozenset()
                reads.append(Read(request_id, ended.failed, over))
        return reads

    def report(self, request_id: str, prompt_tokens: int) -> dict[str, Any]:
        """Return what the router is told, and forget the request."""
        pull = self._pulls.pop(request_id, None) or _Pull(0.0)
        outcome, detail = self._outcome(pull)
        self.outcomes[f"{outcome}:{detail}" if detail else str(outcome)] += 1
        return {
            "outcome": str(outcome),
            **({"detail": detail} if detail else {}),
            "reused_tokens": pull.pulled_tokens if outcome is Outcome.PULLED else 0,
            "matched_tokens": pull.plan.tokens if pull.plan else 0,
            "local_tokens": pull.local_tokens,
            "prompt_tokens": prompt_tokens,
        }

    def forget(self, request_id: str) -> None:
        """Forget a request that ends without a report, or once its read has ended. Idempotent."""
        pull = self._pulls.pop(request_id, None)
        if pull is not None and pull.reading:
            self._left[request_id] = pull

    @staticmethod
    def _outcome(pull: _Pull) -> tuple[Outcome, str]:
        if pull.plan is None:
            return Outcome.COLD, ""
        if pull.failed:
            return Outcome.FAILED, "read_failed"
        if pull.pulled_tokens > 0:
            return Outcome.PULLED, ""
        if pull.plan.outcome is not None:
            return pull.plan.outcome, pull.plan.detail
        if pull.plan.tokens <= pull.local_tokens:
            return Outcome.LOCAL_HIT, ""
        if pull.lost:
            return Outcome.COLD, "preempted"
        if pull.offered_tokens == 0 and pull.asked:
            return Outcome.BELOW_THRESHOLD, ""
        return Outcome.COLD, "not_pulled"

    def _get(self, request_id: str) -> _Pull:
        self.arrive(request_id)
        return self._pulls[request_id]
