"""Counts of blocks that several requests hold: turns share their prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_ONE = 1 << 64
_NUMBER = _ONE - 1


class DistinctBlocks:
    """Counts blocks that any of several requests hold, each once. Costs are O(blocks given)."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, blocks: Iterable[int]) -> None:
        """Add a request's blocks, distinct."""
        self._holders.update(blocks)

    def remove(self, blocks: Iterable[int]) -> None:
        """Take a request's blocks off."""
        holders = self._holders
        for block in blocks:
            if holders[block] == 1:
                holders.pop(block)  # a Counter's own way to delete is slow
            else:
                holders[block] -= 1

    def new(self, blocks: Iterable[int]) -> int:
        """Return how many of these distinct blocks nobody holds."""
        holders = self._holders
        return sum(block not in holders for block in blocks)


class SoleBlocks:
    """Also says how many blocks a request holds alone: what would come free without it.

    Requests go by numbers below 2**40, in use once at a time. Costs are O(blocks given), O(1) for `alone`.
    """

    def __init__(self) -> None:
        # How many hold a block and the sum of their numbers, in one integer: of a sole holder, its number.
        self._holders: dict[int, int] = {}
        self._alone: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def alone(self, number: int) -> int:
        """Return how many blocks only this request holds."""
        return self._alone.get(number, 0)

    def add(self, number: int, blocks: Iterable[int]) -> None:
        """Add a request's blocks, distinct."""
        holders, alone = self._holders, self._alone
        mine, add = 0, _ONE + number
        for block in blocks:
            before = holders.get(block, 0)
            holders[block] = before + add
            if not before:
                mine += 1
            elif before >> 64 == 1:
                alone[before & _NUMBER] -= 1
        alone[number] = mine

    def remove(self, number: int, blocks: Iterable[int]) -> int:
        """Take a request's blocks off; returns how many nobody holds any more."""
        holders, alone = self._holders, self._alone
        mine, sub = alone.pop(number), _ONE + number
        for block in blocks:
            left = holders[block] - sub
            if not left:
                del holders[block]
                continue
            holders[block] = left
            if left >> 64 == 1:
                alone[left & _NUMBER] += 1
        return mine
