"""What an engine holds of a conversation, and how much of it a prompt can use: counted on token ids.

Written without kvplane's fingerprints, which it judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What KV depends on besides tokens, as far as these conversations change it."""

    model: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens whose KV an engine holds."""

    circumstances: Circumstances
    tokens: tuple[int, ...]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens from the start are the same."""
    for index, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return index
    return min(len(one), len(other))


def kept_after(circumstances: Circumstances, prompt: Sequence[int], reply: Sequence[int]) -> Kept:
    """Return what is held after a turn: the last token of the reply was never computed on."""
    return Kept(circumstances, (*prompt, *reply[:-1]))


def prefix_of(kept: Kept, circumstances: Circumstances, prompt: Sequence[int]) -> int:
    """Return the true common prefix of a prompt with what is held; none under other circumstances."""
    return common_prefix(kept.tokens, prompt) if kept.circumstances == circumstances else 0


def pullable(
    kept: Kept, circumstances: Circumstances, prompt: Sequence[int], *, chunk: int, threshold: int
) -> int:
    """Return the tokens a prefill engine with an empty cache is to pull: whole chunks, or all that is held.

    `threshold` is vLLM's: less is computed anew.
    """
    prefix = prefix_of(kept, circumstances, prompt)
    whole = prefix if prefix == len(kept.tokens) else prefix // chunk * chunk
    return whole if whole >= threshold else 0


def cached(kept: Iterable[Kept], circumstances: Circumstances, prompt: Sequence[int], *, block: int) -> int:
    """Return the tokens the holder itself finds: whole blocks, and at least one token left to compute."""
    best = max((prefix_of(one, circumstances, prompt) for one in kept), default=0)
    return min(best, len(prompt) - 1) // block * block


@dataclass(slots=True)
class Knowledge:
    """What is known to be held of one conversation, by model name: the name is part of its key.

    `on_offer` has several entries where two turns ran at once and either may have been the last.
    """

    on_offer: dict[str, list[Kept]] = field(default_factory=dict)
    ever: list[Kept] = field(default_factory=list)

    def announced(self, turns: Sequence[Kept]) -> None:
        """Note turns that ended: one, or several that ran at once."""
        self.on_offer[turns[0].circumstances.model] = list(turns)
        self.ever += turns

    def taken(self, model: str) -> None:
        """Note that what was on offer has been claimed."""
        self.on_offer.pop(model, None)

    def offered(self, model: str) -> list[Kept]:
        """Return what may be on offer for a request that names this model."""
        return self.on_offer.get(model, [])
