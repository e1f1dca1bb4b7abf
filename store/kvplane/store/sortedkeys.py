"""Keys in order, for scans: what a dict does not know."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

_CHUNK_KEYS = 1024


class SortedKeys:
    """A sorted set of keys in chunks, so that adding and removing move little memory.

    `add` and `remove` take O(log n) comparisons, starting an iteration as well. It must not be changed while
    it is iterated over.
    """

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = []  # none is empty
        self._last: list[bytes] = []  # the last key of each

    def add(self, key: bytes) -> None:
        """Add a key that is not in it yet."""
        last = self._last
        place = bisect_left(last, key)
        if place == len(last):  # behind all
            if not last:
                self._chunks.append([])
                last.append(key)
            else:
                place -= 1
                last[place] = key
            chunk = self._chunks[place]
            chunk.append(key)
        else:
            chunk = self._chunks[place]
            insort(chunk, key)
        if len(chunk) > 2 * _CHUNK_KEYS:
            self._chunks.insert(place + 1, chunk[_CHUNK_KEYS:])
            last.insert(place + 1, chunk[-1])
            del chunk[_CHUNK_KEYS:]
            last[place] = chunk[-1]

    def remove(self, key: bytes) -> None:
        """Remove a key that is in it."""
        place = bisect_left(self._last, key)
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, key)]
        if not chunk:
            del self._chunks[place], self._last[place]
        elif self._last[place] == key:
            self._last[place] = chunk[-1]

    def iterate(self, start: bytes, *, inclusive: bool) -> Iterator[bytes]:
        """Yield, ascending, the keys from `start` on."""
        bisect = bisect_left if inclusive else bisect_right
        place = bisect(self._last, start)
        if place == len(self._chunks):
            return
        chunk = self._chunks[place]
        for index in range(bisect(chunk, start), len(chunk)):
            yield chunk[index]
        for later in range(place + 1, len(self._chunks)):
            yield from self._chunks[later]

    def clear(self) -> None:
        """Remove all keys."""
        self._chunks.clear()
        self._last.clear()
