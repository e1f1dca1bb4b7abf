"""How long each retained turn is kept: deadlines of idle time, of the record, and of the blocks.

Pure bookkeeping: no vLLM, no network, time injected. Of each turn there are three deadlines, each some
seconds after the one before:

- idle: the turn's next one is not waited for any longer, and the engine asks its blocks back;
- record: the control plane stops to hand it out by itself, should the engine not be heard;
- blocks: vLLM's worker frees the blocks by itself. It is so late that whoever was given the location at the
  last moment of its record is done; usually the blocks have been given back by agreement long before.

A renewal moves all three, the blocks' first. vLLM's worker takes a deadline over in a step; steps may take
long, and one that is under way may still free the blocks at the old deadline. So the record is renewed only
when the outcome of the step that carried the new deadline is known and the blocks were not freed by then.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_CLAIM_TAIL_S = 10.0
"""A claim is granted only with this much life left on record: the control plane's `min_remaining`."""
_MESSAGE_S = 5.0
"""What a session takes off each life that it announces, for the way of the message."""
_LEAST_S = 1.0


class Terms(NamedTuple):
    """Deadlines of one retained turn, on the engine's clock.

    `record` is what a session is to be told, which takes the message's margin off.
    """

    idle: float
    record: float
    blocks: float


@dataclass(slots=True)
class _Lease:
    began: float
    terms: Terms
    unsent: bool = False  # the blocks' deadline has yet to go into a step


class Leases:
    """Deadlines of all retained turns. Belongs to the scheduler thread.

    Costs are O(log n) for a lease that begins, moves or ends, and O(1) for a step with none of these.

    Args:
        monotonic: the clock of everything here.
        max_age_s: for how long after its beginning a lease may be renewed to.
        claim_timeout_s: after which a reader is done, counted from its claim.
        longest_s: what the control plane grants at most.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        max_age_s: float,
        claim_timeout_s: float = 40.0,
        longest_s: float = math.inf,
    ) -> None:
        self.max_age_s = max_age_s
        self.claim_timeout_s = claim_timeout_s
        self.longest_s = longest_s
        self._monotonic = monotonic
        self._leases: dict[str, _Lease] = {}
        self._ends: list[tuple[float, str]] = []  # a heap; what was renewed since is passed over
        self._unsent: list[str] = []
        self._unconfirmed: deque[tuple[int, str, float]] = deque()  # step, request, record's deadline
        self._begun = 0  # steps
        self._done = 0

    def __len__(self) -> int:
        return len(self._leases)

    def last_possible(self) -> float:
        """Return when the blocks of a turn that ends now will be gone, however often it is renewed."""
        return self._terms(self._monotonic() + self.max_age_s).blocks

    def begin(self, request_id: str, ttl_s: float) -> Terms:
        """Begin a lease; its blocks' deadline is the caller's to see to."""
        now = self._monotonic()
        idle = now + min(ttl_s, self.max_age_s, self._most_s())
        lease = self._leases[request_id] = _Lease(now, self._terms(idle))
        heapq.heappush(self._ends, (idle, request_id))
        return lease.terms

    def extend(self, request_id: str, ttl_s: float) -> bool:
        """Keep a turn for `ttl_s` seconds from now, but no longer than its maximum age; never shortens.

        Returns whether that is longer than before, by a second at least. The new deadline of the blocks is in
        the next `take_deadlines`, that of the record comes from `step_done` once it is safe.
        """
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        idle = min(self._monotonic() + min(ttl_s, self._most_s()), lease.began + self.max_age_s)
        if idle < lease.terms.idle + _LEAST_S:
            return False
        lease.terms = self._terms(idle)
        heapq.heappush(self._ends, (idle, request_id))
        if not lease.unsent:
            lease.unsent = True
            self._unsent.append(request_id)
        return True

    def end(self, request_id: str) -> bool:
        """Forget a lease: its blocks are free. Returns whether that was before their deadline. Idempotent."""
        lease = self._leases.pop(request_id, None)
        if len(self._ends) > 64 and len(self._ends) > 4 * len(self._leases):
            self._ends = [(lease.terms.idle, name) for name, lease in self._leases.items()]
            heapq.heapify(self._ends)
        return lease is not None and self._monotonic() < lease.terms.blocks

    def idle(self) -> list[str]:
        """Return the turns that are not waited for any longer, once each unless renewed."""
        over, now = list[str](), self._monotonic()
        while self._ends and self._ends[0][0] <= now:
            idle, request_id = heapq.heappop(self._ends)
            lease = self._leases.get(request_id)
            if lease is not None and lease.terms.idle == idle:
                over.append(request_id)
        return over

    def take_deadlines(self) -> dict[str, float]:
        """Return new deadlines of blocks for the step that begins now. Call it once for every step."""
        self._begun += 1
        taken = dict[str, float]()
        for request_id in self._unsent:
            lease = self._leases.get(request_id)
            if lease is not None and lease.unsent:
                lease.unsent = False
                taken[request_id] = lease.terms.blocks
                self._unconfirmed.append((self._begun, request_id, lease.terms.record))
        self._unsent.clear()
        return taken

    def step_done(self) -> dict[str, float]:
        """Note that the outcome of the oldest step under way is known, and what it freed has been said.

        Returns the turns whose record may be renewed now, and to when.
        """
        self._done = min(self._begun, self._done + 1)
        safe = dict[str, float]()
        while self._unconfirmed and self._unconfirmed[0][0] <= self._done:
            _, request_id, record = self._unconfirmed.popleft()
            if request_id in self._leases:
                safe[request_id] = record
        return safe

    def _most_s(self) -> float:
        return max(0.0, self.longest_s - _CLAIM_TAIL_S)

    def _terms(self, idle: float) -> Terms:
        record = idle + _CLAIM_TAIL_S + _MESSAGE_S
        return Terms(idle, record, record + self.claim_timeout_s)
