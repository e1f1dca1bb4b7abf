"""What was hashed lately: the next turn of a conversation hashes only what is new in it.

A conversation's next turn begins with the tokens of the last one, and many conversations begin with the same
system prompt. hash_chunks is a function of what it is given, so remembering its results by the very bytes it
was given is safe whatever happens to a history: an edit costs what comes after it, nothing else.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from kvplane.connector.fingerprint import Item, hash_chunks, segment_tokens

CACHE_BYTES = 64 << 20
"""Default bound of a cache: some 15 million tokens."""

_ENTRY_OVERHEAD = 400
"""What one remembered segment costs besides its bytes: key, objects, its place in the order of use."""


class ChainCache:
    """A hasher (see fingerprint.Hasher) with a memory. Belongs to one thread.

    Remembers whole segments only; what is left over at the end of a prompt, less than a segment, is hashed
    each time. The least recently used segments go first.

    Args:
        max_bytes: what its keys and values may take up, about.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[tuple[bytes, bytes, int, tuple[Item, ...]], bytes] = OrderedDict()
        self.hashed_tokens = 0
        """Tokens that had to be hashed."""
        self.known_tokens = 0
        """Tokens that were found."""

    @property
    def size(self) -> int:
        """Bytes it takes up, about."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, previous: bytes, packed: bytes, chunk_tokens: int, items: tuple[Item, ...]) -> bytes:
        """See fingerprint.hash_chunks."""
        if len(packed) < 4 * segment_tokens(chunk_tokens):
            self.hashed_tokens += len(packed) // 4
            return hash_chunks(previous, packed, chunk_tokens, items)
        key = (previous, packed, chunk_tokens, items)
        entries = self._known.get(key)
        if entries is not None:
            self._known.move_to_end(key)
            self.known_tokens += len(packed) // 4
            return entries
        self.hashed_tokens += len(packed) // 4
        entries = self._known[key] = hash_chunks(previous, packed, chunk_tokens, items)
        self._bytes += _cost(packed, entries, items)
        while self._bytes > self._max_bytes:
            (_, old, _, of), value = self._known.popitem(last=False)
            self._bytes -= _cost(old, value, of)
        return entries

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._bytes = 0


def _cost(packed: bytes, entries: bytes, items: tuple[Item, ...]) -> int:
    held = sum(sys.getsizeof(item.identifier) + 100 for item in items)
    return len(packed) + len(entries) + held + _ENTRY_OVERHEAD
