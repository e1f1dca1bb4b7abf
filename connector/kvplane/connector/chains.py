"""What was hashed lately: the next turn of a conversation hashes only what is new in it.

A conversation's next turn begins with the tokens of the last one, and many conversations begin with the same
system prompt. hash_segment is a function of what it is given, so remembering its results by the very bytes it
was given is safe whatever happens to a history: an edit costs what comes after it, nothing else. Where a
segment has a name, the name is remembered instead, and its tokens are not even looked at.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from kvplane.connector.fingerprint import Item, Segment, hash_segment, segment_tokens

_Key = tuple[bytes, bool, bytes, int, tuple[Item, ...]]

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
        self._known: OrderedDict[_Key, bytes] = OrderedDict()
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

    def __call__(self, segment: Segment) -> bytes:
        """See fingerprint.hash_segment."""
        if segment.tokens < segment_tokens(segment.chunk_tokens):
            self.hashed_tokens += segment.tokens
            return hash_segment(segment)
        what = segment.name or segment.packed()
        key = (segment.previous, bool(segment.name), what, segment.chunk_tokens, segment.items)
        entries = self._known.get(key)
        if entries is not None:
            self._known.move_to_end(key)
            self.known_tokens += segment.tokens
            return entries
        self.hashed_tokens += segment.tokens
        entries = self._known[key] = hash_segment(segment)
        self._bytes += _cost(key, entries)
        while self._bytes > self._max_bytes:
            self._bytes -= _cost(*self._known.popitem(last=False))
        return entries

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._bytes = 0


def _cost(key: _Key, entries: bytes) -> int:
    _, _, what, _, items = key
    held = sum(sys.getsizeof(item.identifier) + 100 for item in items)
    return len(what) + len(entries) + held + _ENTRY_OVERHEAD
