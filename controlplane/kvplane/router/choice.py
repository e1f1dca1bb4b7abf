"""Which prefill engine computes a prompt: the one that will have done so first, by what is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplane.router.engine import Engine
from kvplane.router.learned import Memory, RateBook
from kvplane.router.policy import Path
from kvplane.router.pool import EnginePool

if TYPE_CHECKING:
    from kvplane.router.turn import Turn

_UNKNOWN_PROMPT_TOKENS = 512
"""Taken for prompts that nobody has measured."""


class PrefillChoice:
    """Weighs queue, speed and what an engine's prefix cache should still have of the conversation."""

    def __init__(self, pool: EnginePool, memory: Memory, rates: RateBook) -> None:
        self._pool = pool
        self._memory = memory
        self._rates = rates

    def computed_before(self, turn: Turn, engine: Engine) -> int:
        """Return how many of the prompt's tokens an engine has computed for the conversation's last one."""
        if turn.known_key is None or turn.history_changed:
            return 0
        return min(self._memory.prompt_at(turn.known_key, engine.url), turn.prompt_tokens)

    def local_tokens(self, turn: Turn, engine: Engine, *, unknown_share: float = 0.0) -> int:
        """Return how many of the prompt's tokens an engine is expected to have in its prefix cache.

        How much of such prompts it still had when they came back, is learned; `unknown_share` counts before.
        """
        tokens = self.computed_before(turn, engine)
        if not tokens:
            return 0
        share = self._rates.hit_share(engine.url)
        return int(tokens * (unknown_share if share is None else share))

    def work(self, turn: Turn, engine: Engine) -> int:
        """Return how many tokens an engine will probably compute for a turn's prompt."""
        prompt = turn.prompt_tokens or _UNKNOWN_PROMPT_TOKENS
        # Going to the one that may have it costs nothing, so that is how it is found out.
        there = self.local_tokens(turn, engine, unknown_share=1.0)
        if turn.path is Path.PULL and turn.location is not None and not turn.history_changed:
            there = max(there, min(turn.location.token_count, prompt))
        return prompt - min(there, prompt)

    def choose(
        self, turn: Turn, engines: Sequence[Engine], *, exclude: set[Engine] | frozenset[Engine] = frozenset()
    ) -> Engine | None:
        """Return the engine for a turn's prompt; see EnginePool.choose for those that are not well."""
        if len(engines) < 2:
            return self._pool.choose(engines, exclude=exclude)
        last = self._memory.prefilled_by(turn.known_key) if turn.known_key is not None else ""
        return self._pool.choose(
            engines,
            exclude=exclude,
            cost=self._cost(turn, engines),
            draw_too=next((e for e in engines if e.url == last), None),
        )

    def likely(self, turn: Turn, engines: Sequence[Engine]) -> Engine | None:
        """Return the engine that will probably be chosen, without choosing it."""
        if len(engines) < 2:
            return engines[0] if engines else None
        return min(engines, key=self._cost(turn, engines))

    def _cost(self, turn: Turn, engines: Sequence[Engine]) -> Callable[[Engine], float]:
        """Return what says of one of these engines in how many seconds it will have computed a prompt.

        There may be hundreds of them: what is the same for all is looked up once.
        """
        last = self._memory.prefilled_by(turn.known_key) if turn.known_key is not None else ""
        elsewhere = next((self.work(turn, engine) for engine in engines if engine.url != last), 0)
        compute = self._rates.compute
        rates = {engine: rate for engine in engines if (rate := compute(engine.url))}
        # What nothing is known of is taken for the average of the others.
        default = sum(rates.values()) / len(rates) if rates else 1.0

        def cost(engine: Engine) -> float:
            work = self.work(turn, engine) if engine.url == last else elsewhere
            ahead = engine.ahead_tokens + engine.waiting * _UNKNOWN_PROMPT_TOKENS
            return (ahead + work) / rates.get(engine, default)

        return cost
