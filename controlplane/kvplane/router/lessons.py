"""What the answers to legs teach: the sizes of prompts, the rates of engines, the worth of prefix caches."""

from __future__ import annotations

from kvplane.router.engine import Engine
from kvplane.router.learned import Memory, RateBook
from kvplane.router.policy import Path
from kvplane.router.turn import Turn
from kvplane.router.upstream import Prefilled


class Lessons:
    """Takes what a leg shows into the memory and the rates."""

    def __init__(self, memory: Memory, rates: RateBook) -> None:
        self._memory = memory
        self._rates = rates

    def prefilled(self, turn: Turn, prefilled: Prefilled, ahead: int, computed_before: int) -> None:
        """Learn from a prefill leg: what was `ahead` of it in its queue, and its last prompt's tokens."""
        tokens, url = prefilled.prompt_tokens, prefilled.engine.url
        if prefilled.envelope:
            self._rates.hit(url, computed_before, prefilled.count("local_tokens"))
        elif turn.path is Path.COLD and prefilled.cached_tokens is not None:
            self._rates.hit(url, computed_before, prefilled.cached_tokens)
        if turn.key is not None:
            self._memory.remember(turn.key, turn.text, tokens, url, before=turn.before)
        if tokens is None:
            return
        pulled = prefilled.count("reused_tokens")
        computed = tokens - pulled - prefilled.count("local_tokens")
        if turn.path is Path.COLD:
            self._rates.computed(url, computed + ahead, prefilled.seconds)
        elif turn.holder is not None:
            self._rates.pulled(turn.holder.url, url, pulled, computed + ahead, prefilled.seconds)

    def remembered(self, turn: Turn) -> None:
        """Keep what a turn's prompt was, where no prefill engine has computed it."""
        if turn.key is not None and turn.prefilled is None:
            self._memory.remember(turn.key, turn.text, None, before=turn.before)

    def answered(self, turn: Turn, prompt_tokens: int | None) -> None:
        """Learn from the prompt's length that an answer told, where no prefill engine did so before."""
        if turn.key is None or not prompt_tokens:
            return
        if turn.prefilled is None or turn.prefilled.prompt_tokens is None:
            self._memory.learn(turn.key, turn.text, prompt_tokens)

    def began(self, turn: Turn, engine: Engine, ahead: int, seconds: float) -> None:
        """Learn from the time between sending a decode leg and its first byte."""
        prefilled = turn.prefilled
        if turn.path is Path.DIRECT and turn.decision is not None:
            self._rates.computed(engine.url, turn.decision.new_tokens + ahead, seconds)
        elif prefilled is not None and prefilled.params is not None and not ahead:
            held = turn.location.token_count if turn.location is not None and engine is turn.holder else 0
            tokens = (prefilled.prompt_tokens or 0) - held
            self._rates.received(prefilled.engine.url, engine.url, tokens, seconds)
