"""An engine's KV blocks: who uses them, what is in them, and which contents can be found again.

As vLLM has it: full blocks are found by their contents while they last, also free ones; a free block keeps
its content until it is given out again, the longest free first.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Blocks 1 to `total`. Costs are O(blocks given)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        """Blocks that nobody uses, those with contents included."""
        self._users = array("H", bytes(2 * (total + 1)))
        self._contents = array("q", bytes(8 * (total + 1)))
        self._next_fresh = 1
        # May hold a block more than once, and such as are in use again: those are passed over.
        self._queue: deque[int] = deque()
        self._known: dict[int, int] = {}

    def find(self, contents: Sequence[int]) -> list[int]:
        """Return the blocks of the longest beginning that is there."""
        found, known = list[int](), self._known
        for content in contents:
            block = known.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, found: Sequence[int], blocks: int) -> int:
        """Return how many free blocks it takes to use `found` as part of so many blocks."""
        users = self._users
        return blocks - len(found) + sum(not users[block] for block in found)

    def take(self, found: Sequence[int], blocks: int) -> list[int]:
        """Use what was found and as many free blocks as make `blocks` in all: there have to be enough."""
        users, contents, known, queue = self._users, self._contents, self._known, self._queue
        taken = list(found)
        for block in found:
            if not users[block]:
                self.free -= 1
            users[block] += 1
        for _ in range(blocks - len(found)):
            if self._next_fresh <= self.total:
                block = self._next_fresh
                self._next_fresh += 1
            else:
                block = queue.popleft()
                while users[block]:
                    block = queue.popleft()
                old = contents[block]
                if known.get(old) == block:
                    del known[old]
            contents[block] = 0
            users[block] = 1
            taken.append(block)
        self.free -= blocks - len(found)
        return taken

    def fill(self, blocks: Sequence[int], contents: Sequence[int], begin: int, whole: int) -> None:
        """Note what is in blocks from the one at `begin` on; up to `whole` they are full and can be found."""
        known = self._known
        for place in range(begin, len(contents)):
            block, content = blocks[place], contents[place]
            self._contents[block] = content
            if place < whole:
                known.setdefault(content, block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Use blocks no longer."""
        users, queue = self._users, self._queue
        for block in reversed(blocks):  # the beginnings of conversations last longest
            users[block] -= 1
            if not users[block]:
                self.free += 1
                queue.append(block)
        if len(queue) > 4 * self.total + 64:
            self._queue = deque(dict.fromkeys(block for block in queue if not users[block]))

    def content(self, block: int) -> int:
        """Return what is in a block, 0 for nothing known."""
        return self._contents[block]

    def holds(self, blocks: Sequence[int], contents: Sequence[int]) -> bool:
        """Tell whether just these contents are in these blocks, and somebody uses each of them."""
        held, users = self._contents, self._users
        return all(
            held[block] == content and users[block] for block, content in zip(blocks, contents, strict=True)
        )
