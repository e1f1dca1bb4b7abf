"""What really happened, next to what the parts believe: counted, and never wrong to begin with.

It looks into the engines' blocks as no part can, at the beginning and at the end of each read.
"""

from __future__ import annotations

from collections import Counter

from kvplane.bench.fleet.blocks import BlockPool

Holder = tuple[str, int, str]
"""Engine, incarnation, request."""


class Oracle:
    """Counts what must not happen, and what may."""

    def __init__(self) -> None:
        self._claimed: set[Holder] = set()
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        """The first few things that must not happen, in words."""

    def claimed(self, holder: Holder) -> None:
        """Note a claim that was granted: of each holder there is to be one at most."""
        self.counts["claims"] += 1
        if holder in self._claimed:
            self._wrong("double_claims", f"{holder} was claimed twice")
        self._claimed.add(holder)

    def read(
        self, holder: Holder, held: bool, pool: BlockPool, blocks: list[int], contents: list[int]
    ) -> None:
        """Look at blocks that are read now: `held` says whether the request is still there."""
        self.counts["looks"] += 1
        self.counts["blocks_looked_at"] += len(blocks)
        if not held:
            self._wrong("freed_under_reader", f"{holder} is read and was let go")
        if not pool.holds(blocks, contents):
            self._wrong("stale_reads", f"{holder} is read and holds something else")

    @property
    def wrong(self) -> int:
        """How much happened that must not."""
        return sum(self.counts[name] for name in ("double_claims", "stale_reads", "freed_under_reader"))

    def _wrong(self, name: str, example: str) -> None:
        self.counts[name] += 1
        if len(self.examples) < 5:
            self.examples.append(example)
