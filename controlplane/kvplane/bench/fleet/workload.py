"""Who talks to the fleet: conversations of chats and agents, with their pauses, or those of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvplane.bench.leases.trace import Turn as TraceTurn

_MOST_TOKENS = 120_000
"""Longer prompts are not asked: the conversation is over."""
_LONGEST_PAUSE_S = 900.0
"""Who is away for longer does not come back."""
_BURST_EVERY_S, _BURST_S, _BURST = 300.0, 60.0, 3.0
"""Bursty arrivals: for a minute in five there are three times as many as else."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what is new in its prompt, its reply, and the pause before it."""

    new_tokens: int
    reply_tokens: int
    pause_s: float
    calls_tools: bool = False
    """The reply calls tools: the next turn comes when they have run."""
    changed: bool = False
    """The reply before it is not as it was: reasoning is stripped, or the text was edited."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation. `ends` says that its client tells when it is over."""

    number: int
    arrival_s: float
    tenant: int
    kind: str
    steps: tuple[Step, ...]
    ends: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. Everything follows from `seed`.

    Attributes:
        conversations: how many.
        hours: within which they begin.
        turns: of a conversation, on average.
        agents: share that are agents, which call tools; the others are chats.
        tenants: the first have more conversations than the last.
        bursty: arrivals come in bursts, not as a Poisson process.
        changed: share of follow-up turns whose history is not just continued.
        ended: share of conversations whose client says when they are over.
        pause: factor of all pauses of people.
    """

    conversations: int = 1000
    hours: float = 0.5
    turns: float = 4.0
    agents: float = 0.5
    tenants: int = 8
    bursty: bool = False
    changed: float = 0.03
    ended: float = 0.1
    pause: float = 1.0
    seed: int = 0

    def system_tokens(self, tenant: int) -> int:
        """Return how long a tenant's system prompt is."""
        return round(_lognormal(Random(self.seed * 1_000_003 + tenant), 1200, 0.6))

    def all(self, templates: Sequence[tuple[Step, ...]] = ()) -> Iterator[Conversation]:
        """Yield all conversations in order of arrival; with `templates`, of these drawn at random."""
        random = Random(self.seed)
        weights = [1.0 / (tenant + 1) for tenant in range(self.tenants)]
        tenants = random.choices(range(self.tenants), weights, k=self.conversations)
        for number, arrival_s in enumerate(self._arrivals(random)):
            own = Random(self.seed << 32 | number)
            kind = "agent" if own.random() < self.agents else "chat"
            if templates:
                kind, steps = "trace", own.choice(templates)
            else:
                steps = self._agent(own) if kind == "agent" else self._chat(own)
            yield Conversation(number, arrival_s, tenants[number], kind, steps, own.random() < self.ended)

    def _arrivals(self, random: Random) -> Iterator[float]:
        span_s = self.hours * 3600
        rate = self.conversations / span_s
        now = 0.0
        mean = (_BURST * _BURST_S + _BURST_EVERY_S - _BURST_S) / _BURST_EVERY_S
        for _ in range(self.conversations):
            at = rate
            if self.bursty:
                at *= (_BURST if now % _BURST_EVERY_S < _BURST_S else 1.0) / mean
            now += random.expovariate(at)
            yield now

    def _count(self, random: Random, mean: float) -> int:
        """Return a number of turns: at least one, and the longer the rarer."""
        if mean <= 1.0:
            return 1
        return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))

    def _pause(self, random: Random, median: float) -> float:
        """Return how long a person takes."""
        return min(_LONGEST_PAUSE_S, self.pause * _lognormal(random, median, 1.1))

    def _chat(self, random: Random) -> tuple[Step, ...]:
        steps = [Step(round(_lognormal(random, 250, 1.0)), _reply(random, 250), 0.0)]
        for _ in range(self._count(random, max(1.0, self.turns * 0.75)) - 1):
            steps.append(
                Step(
                    round(_lognormal(random, 80, 0.9)),
                    _reply(random, 250),
                    self._pause(random, 30),
                    changed=random.random() < self.changed,
                )
            )
        return tuple(steps)

    def _agent(self, random: Random) -> tuple[Step, ...]:
        steps = list[Step]()
        count = self._count(random, self.turns * 1.25)
        tokens = 0
        for place in range(count):
            tools = place + 1 < count and random.random() < 0.85
            before = steps[-1].calls_tools if steps else False
            new = _lognormal(random, 500, 1.1) if steps else _lognormal(random, 3500, 0.8)
            pause = _lognormal(random, 2.5, 1.2) if before else self._pause(random, 45)
            step = Step(
                round(new),
                _reply(random, 120),
                pause if steps else 0.0,
                tools,
                changed=bool(steps) and random.random() < self.changed,
            )
            tokens += step.new_tokens + step.reply_tokens
            if tokens > _MOST_TOKENS and steps:
                break
            steps.append(step)
        return tuple(steps)


def templates(turns: Sequence[TraceTurn], ms_per_token: float) -> list[tuple[Step, ...]]:
    """Return a trace's conversations; a pause is from the end of a reply to the next turn's arrival."""
    chains = dict[int, list[Step]]()
    for turn in turns:
        if turn.previous is None:
            chains[turn.number] = [Step(max(1, turn.input_tokens), max(1, turn.output_tokens), 0.0)]
            continue
        before, chain = turns[turn.previous], chains.pop(turn.previous)
        pause = turn.arrival_s - before.arrival_s - before.output_tokens * ms_per_token / 1000.0
        new = turn.input_tokens - before.input_tokens - before.output_tokens
        chain.append(Step(max(1, new), max(1, turn.output_tokens), max(0.0, pause)))
        chains[turn.number] = chain
    return [tuple(chain) for chain in chains.values()]


def _lognormal(random: Random, median: float, sigma: float) -> float:
    return max(1.0, random.lognormvariate(math.log(median), sigma))


def _reply(random: Random, median: float) -> int:
    return min(4000, round(_lognormal(random, median, 0.8)))
