"""How an engine keeps KV: its groups of layers, and which blocks of each stand for a prefix.

vLLM gives the layers of a group one list of blocks per sequence. Full attention needs all of a prefix; a
sliding window and chunked local attention need the end of it only, and vLLM frees what came before while a
sequence runs on. So a shorter prefix than the one that was kept may need blocks that are gone.

Lists of blocks travel without what was freed at their start; their end is at the last token they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group that takes part in a transfer.

    Attributes:
        block_size: tokens per block.
        window: tokens a sliding window spans, the one that attends included, and those vLLM keeps beyond it;
            0 for none.
        chunk: tokens per chunk of chunked local attention; 0 for none.
    """

    block_size: int
    window: int = 0
    chunk: int = 0

    @property
    def whole(self) -> bool:
        """Whether all blocks of a sequence are kept."""
        return not self.window and not self.chunk

    def end(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take up from the very start."""
        return -(-tokens // self.block_size)

    def start(self, tokens: int) -> int:
        """Return the first block that the token after `tokens` tokens still attends to."""
        unseen = 0
        if self.window:
            unseen = max(0, tokens - self.window + 1)
        elif self.chunk:
            unseen = tokens // self.chunk * self.chunk
        return unseen // self.block_size

    def cut(self, blocks: Sequence[int], held: int, tokens: int) -> list[int] | None:
        """Return those of the blocks kept for `held` tokens that `tokens` of them need.

        None if some of them are gone. vLLM lines lists of both sides up at their ends, so this is exactly
        what a reader of `tokens` tokens has places for, less what is in its own cache.
        """
        first, start, end = self.end(held) - len(blocks), self.start(tokens), self.end(tokens)
        if first < 0 or start < min(first, end):
            return None
        needed = list(blocks[start - first : end - first]) if start < end else []
        return needed if all(needed) else None  # vLLM writes its placeholder, block 0, where it freed one

    def kept(self, blocks: Sequence[int], tokens: int) -> list[int] | None:
        """Return what a sequence's blocks, from the very start, still have for `tokens` tokens.

        None if that is less than the next token attends to.
        """
        kept = list(blocks[: self.end(tokens)])
        if len(kept) < self.end(tokens):
            return None
        if not self.whole:
            gone = next((index for index in range(len(kept) - 1, -1, -1) if not kept[index]), -1) + 1
            kept = kept[gone:]
        return kept if self.cut(kept, tokens, tokens) is not None else None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How this engine keeps KV.

    Attributes:
        groups: those that take part in a transfer, in vLLM's order.
        refusal: why no KV of this engine can be reused, "" if it can. See deploy/CONNECTOR.md.
        lookahead: tokens at the end of a prefix whose KV depends on what comes next (a drafter's).
        dcp_size: ranks of decode context parallelism.
    """

    groups: tuple[Group, ...]
    refusal: str = ""
    lookahead: int = 0
    dcp_size: int = 1

    @property
    def block_size(self) -> int:
        """Tokens per block, of the group that has the smallest."""
        return min((group.block_size for group in self.groups), default=1)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens hold, over all groups, when all are computed."""
        return sum(group.end(tokens) - group.start(tokens) for group in self.groups)

    def cut(self, blocks: Sequence[Sequence[int]], held: int, tokens: int) -> list[list[int]] | None:
        """Return Group.cut of each group; None if any of them has lost what it needs."""
        needed = [group.cut(of, held, tokens) for group, of in zip(self.groups, blocks, strict=True)]
        return [of for of in needed if of is not None] if None not in needed else None

    def kept(self, blocks: Sequence[Sequence[int]], tokens: int) -> list[list[int]] | None:
        """Return Group.kept of each group; None if any of them has lost what it needs."""
        kept = [group.kept(of, tokens) for group, of in zip(self.groups, blocks, strict=True)]
        return [of for of in kept if of is not None] if None not in kept else None

    def fits(self, blocks: object, tokens: int) -> bool:
        """Whether these can be block ids of `tokens` tokens. Nothing about them is taken for granted."""
        if not isinstance(blocks, list | tuple) or len(blocks) != len(self.groups):
            return False
        return all(_fits(group, of, tokens) for group, of in zip(self.groups, blocks, strict=True))


def _fits(group: Group, blocks: object, tokens: int) -> bool:
    if not isinstance(blocks, list | tuple) or len(blocks) > group.end(tokens):
        return False
    if group.whole and len(blocks) != group.end(tokens):
        return False
    return all(type(block) is int and 0 <= block < 1 << 40 for block in blocks)
