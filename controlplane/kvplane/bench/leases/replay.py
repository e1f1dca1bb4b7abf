"""A trace replayed against ways to decide how long a turn's KV is kept, and whose is given up first.

The model:

- A request arrives at its timestamp and ends `ms_per_token` per token of its reply later, or when the turn
  that continues it arrives, whichever is first. (Time for the prompt is left out.)
- From its end it retains the blocks of prompt and reply, the last one whole, until the turn that continues it
  arrives, its lease ends, it is given up for want of budget, or the trace ends (with the last arrival).
  Blocks are counted for each turn; none is shared.
- A turn that comes back while its last turn is retained, the very end of the lease included, is a hit and
  saves the tokens of the last turn's prompt and reply, or those of its own prompt if it has fewer.
- A policy sees arrivals and ends as they come and nothing of what is to come.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.bench.leases.trace import BLOCK_TOKENS, Turn
from kvplane.connector.returns import KEEP_SHARE, Returns, Traits, lease_class

MS_PER_TOKEN = 30.0
"""How long a token of a reply takes, unless said otherwise."""
_TENANT = "trace"
_GIVEN_UP_AT_ONCE = 0.02
"""Share of the budget that is made free at once, so that values are not asked for at every turn."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all policies are compared under.

    Attributes:
        block_tokens: tokens per block.
        ms_per_token: of the reply.
        budget: blocks that may be retained at once, None for no bound.
    """

    block_tokens: int = BLOCK_TOKENS
    ms_per_token: float = MS_PER_TOKEN
    budget: int | None = None

    def blocks(self, turn: Turn) -> int:
        """Return the blocks of a turn's prompt and reply."""
        return -(-(turn.input_tokens + turn.output_tokens) // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy brought and cost.

    Attributes:
        turns: requests of the trace.
        follow_ups: those that continue another.
        hits: of those, whose last turn was still retained.
        prompt_tokens: of all requests.
        tokens_saved: of those, not computed.
        block_seconds: blocks times seconds retained.
        given_up: turns given up for want of budget.
        most_blocks: most blocks retained at once.
    """

    turns: int
    follow_ups: int
    hits: int
    prompt_tokens: int
    tokens_saved: int
    block_seconds: float
    given_up: int
    most_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the follow-up turns that hit."""
        return self.hits / self.follow_ups if self.follow_ups else 0.0


class Policy(Protocol):
    """Decides on leases; `now` is the replay's time in seconds."""

    def ended(self, turn: Turn, idle_s: float | None, blocks: int, now: float) -> float:
        """Return the lease of a turn that ends; `idle_s` is from its last turn's end to its arrival."""

    def returned(self, turn: Turn, idle_s: float, now: float) -> None:
        """Note that a turn, retained or not, is continued."""

    def worth(self, turn: Turn, idle_s: float, blocks: int) -> float:
        """Return by what retained turns are given up, the least first."""


class Fixed:
    """The same lease for all; the oldest is given up first."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s

    def ended(self, turn: Turn, idle_s: float | None, blocks: int, now: float) -> float:
        """Return the lease."""
        return self.ttl_s

    def returned(self, turn: Turn, idle_s: float, now: float) -> None:
        """Learn nothing."""

    def worth(self, turn: Turn, idle_s: float, blocks: int) -> float:
        """Return less the longer it has been idle."""
        return -idle_s


class Adaptive:
    """What engines do: `kvplane.connector.returns`, from nothing at the beginning of the trace."""

    def __init__(
        self,
        *,
        max_ttl_s: float,
        keep_share: float | None = None,
        block_tokens: int = BLOCK_TOKENS,
        seed: int = 0,
    ) -> None:
        self._now = 0.0
        self.returns = Returns(
            monotonic=lambda: self._now,
            max_ttl_s=max_ttl_s,
            min_ttl_s=min(20.0, max_ttl_s),
            block_tokens=block_tokens,
            seed=seed,
            keep_share=KEEP_SHARE if keep_share is None else keep_share,
        )
        self._classes: dict[int, int] = {}

    def ended(self, turn: Turn, idle_s: float | None, blocks: int, now: float) -> float:
        """Return the learned lease."""
        self._now = now
        traits = Traits(_TENANT, turn.turn_index, turn.input_tokens, turn.output_tokens, idle_s=idle_s)
        number = self._classes[turn.number] = lease_class(traits)
        tokens = turn.input_tokens + turn.output_tokens
        ttl_s = self.returns.ttl_s(_TENANT, number, tokens=tokens, blocks=blocks)
        self.returns.retained(_TENANT, number, tokens=tokens, blocks=blocks)
        return ttl_s

    def returned(self, turn: Turn, idle_s: float, now: float) -> None:
        """Learn from it."""
        self._now = now
        self.returns.returned(_TENANT, self._classes.pop(turn.number), idle_s)

    def worth(self, turn: Turn, idle_s: float, blocks: int) -> float:
        """Return the tokens to be saved per block-second."""
        tokens = turn.input_tokens + turn.output_tokens
        return self.returns.worth(
            _TENANT, self._classes[turn.number], idle_s=idle_s, tokens=tokens, blocks=blocks
        )


def replay(
    turns: Sequence[Turn], policy: Policy, setting: Setting, told: Callable[[int], None] = lambda _: None
) -> Outcome:
    """Play a trace. `told` is called with the number of turns that arrived since the last call.

    O(turns x log retained), and with a budget O(retained) more whenever it is exceeded.
    """
    return _Replay(turns, policy, setting).run(told)


@dataclass(slots=True)
class _Kept:
    """A retained turn: since when, how many blocks, and when its lease ends."""

    since: float
    blocks: int
    until: float


class _Replay:
    def __init__(self, turns: Sequence[Turn], policy: Policy, setting: Setting) -> None:
        self._turns = turns
        self._policy = policy
        self._setting = setting
        self._ends = _ends(turns, setting.ms_per_token)
        self._kept: dict[int, _Kept] = {}
        self._leases: list[tuple[float, int]] = []
        self._blocks = self._most_blocks = self._given_up = 0
        self._block_seconds = 0.0

    def run(self, told: Callable[[int], None]) -> Outcome:
        """Play all events, in order of time and then of the trace; arrivals before their own ends."""
        hits = saved = follow_ups = 0
        events = [(turn.arrival_s, turn.number, False) for turn in self._turns]
        events += [(self._ends[turn.number], turn.number, True) for turn in self._turns]
        for now, number, is_end in sorted(events):
            turn = self._turns[number]
            self._expire(now)
            if is_end:
                self._retain(turn, now)
                continue
            told(1)
            if turn.previous is None:
                continue
            follow_ups += 1
            last = self._turns[turn.previous]
            self._policy.returned(last, now - self._ends[last.number], now)
            if last.number in self._kept:
                hits += 1
                saved += min(last.input_tokens + last.output_tokens, turn.input_tokens)
                self._drop(last.number, now)
        last_arrival = self._turns[-1].arrival_s if self._turns else 0.0
        for number in list(self._kept):
            self._drop(number, max(last_arrival, self._kept[number].since))
        return Outcome(
            turns=len(self._turns),
            follow_ups=follow_ups,
            hits=hits,
            prompt_tokens=sum(turn.input_tokens for turn in self._turns),
            tokens_saved=saved,
            block_seconds=self._block_seconds,
            given_up=self._given_up,
            most_blocks=self._most_blocks,
        )

    def _retain(self, turn: Turn, now: float) -> None:
        blocks = self._setting.blocks(turn)
        idle_s = None if turn.previous is None else turn.arrival_s - self._ends[turn.previous]
        ttl_s = self._policy.ended(turn, idle_s, blocks, now)
        self._kept[turn.number] = _Kept(now, blocks, now + ttl_s)
        heapq.heappush(self._leases, (now + ttl_s, turn.number))
        self._blocks += blocks
        budget = self._setting.budget
        if budget is not None and self._blocks > budget:
            self._give_up(int(budget * (1.0 - _GIVEN_UP_AT_ONCE)), now)
        self._most_blocks = max(self._most_blocks, self._blocks)

    def _give_up(self, budget: int, now: float) -> None:
        """Give up the least valuable until what is left fits."""
        worth = {
            number: self._policy.worth(self._turns[number], now - kept.since, kept.blocks)
            for number, kept in self._kept.items()
        }
        for number in sorted(worth, key=worth.__getitem__):
            if self._blocks <= budget:
                return
            self._given_up += 1
            self._drop(number, now)

    def _expire(self, now: float) -> None:
        while self._leases and self._leases[0][0] < now:
            until, number = heapq.heappop(self._leases)
            if number in self._kept:
                self._drop(number, until)

    def _drop(self, number: int, when: float) -> None:
        kept = self._kept.pop(number)
        self._blocks -= kept.blocks
        self._block_seconds += kept.blocks * (when - kept.since)


def _ends(turns: Sequence[Turn], ms_per_token: float) -> list[float]:
    ends = [turn.arrival_s + turn.output_tokens * ms_per_token / 1000.0 for turn in turns]
    for turn in turns:
        if turn.previous is not None:
            ends[turn.previous] = min(ends[turn.previous], turn.arrival_s)
    return ends
