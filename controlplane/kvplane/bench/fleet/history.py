"""What a conversation's prompts consist of, without any text: tokens that differ where contents do.

Each stretch of a history has a base that no other has; a token is its base and its place. So equal beginnings
have equal tokens, real fingerprints over them are equal exactly where the histories are, and nothing of it
has to be kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvplane.connector.fingerprint import SEGMENT_TOKENS, NamedTokens

_IDS = 2**31 - 2**24
"""Token ids are int32, and grow by one from token to token."""
_SPREAD = 1_000_003
_BLOCKS = 2**24

Stretches = tuple[tuple[int, int], ...]
"""(first token, base) of each stretch, in order."""


class _Tokens(Sequence[int]):
    """The tokens of a history, made when they are asked for."""

    __slots__ = ("_length", "_stretches")

    def __init__(self, stretches: Stretches, length: int) -> None:
        self._stretches = stretches
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._between(start, stop)[::step]
        place = range(self._length)[index]
        return self._between(place, place + 1)[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self._between(0, self._length))

    def _between(self, start: int, stop: int) -> Sequence[int]:
        made: Sequence[int] = ()
        for begin, end, base in _pieces(self._stretches, start, stop):
            first = base * _SPREAD % _IDS
            piece = range(first + begin, first + end)
            made = [*made, *piece] if made else piece
        return made


class _Names(Sequence[bytes]):
    """Names for beginnings of a history, one per segment that is hashed in one go."""

    __slots__ = ("_count", "_stretches")

    def __init__(self, stretches: Stretches, count: int) -> None:
        self._stretches = stretches
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._count))]
        # Whatever comes before the stretch of the last token is told by that stretch.
        last = (index + 1) * SEGMENT_TOKENS - 1
        return b"%d/%d" % (base_at(self._stretches, last), index)


class History:
    """One conversation's history as it is now. `tokens` is its length."""

    __slots__ = ("stretches", "tokens")

    def __init__(self, system: int, system_tokens: int, own: int) -> None:
        self.stretches: Stretches = ((0, system), (system_tokens, own))
        self.tokens = system_tokens

    def change(self, place: int, base: int) -> None:
        """Have all from a token on be something else than before."""
        kept = tuple(stretch for stretch in self.stretches if stretch[0] < place)
        self.stretches = (*kept, (place, base))


def base_at(stretches: Stretches, token: int) -> int:
    """Return the base of the stretch that a token lies in."""
    return next(base for first, base in reversed(stretches) if first <= token)


def tokens_of(stretches: Stretches, count: int) -> NamedTokens:
    """Return the first tokens of a history."""
    return NamedTokens(
        _Tokens(stretches, count), count, _Names(stretches, count // SEGMENT_TOKENS), SEGMENT_TOKENS
    )


def contents(stretches: Stretches, tokens: int, block_tokens: int) -> list[int]:
    """Return for each block of a history's first tokens, the last one perhaps not whole, what is in it.

    Equal numbers stand for equal tokens up to the block's end, behind equal prefixes. Of a block that is not
    whole it is the number that the whole one has.
    """
    made = list[int]()
    blocks = -(-tokens // block_tokens)
    within = [stretch for stretch in stretches if stretch[0] < tokens]
    begin = 0
    for number, (_, base) in enumerate(within):
        # A block belongs to the stretch of its last token, as far as the history goes.
        end = within[number + 1][0] // block_tokens if number + 1 < len(within) else blocks
        if end > begin:
            made.extend(range(base * _BLOCKS + begin, base * _BLOCKS + end))
            begin = end
    return made


def common(left: Stretches, right: Stretches) -> int:
    """Return for how many tokens two histories are the same; 2**62 if neither differs."""
    for (first, base), (other_first, other_base) in zip(left, right, strict=False):
        if first != other_first or base != other_base:
            return min(first, other_first)
    if len(left) == len(right):
        return 2**62
    return (left if len(left) > len(right) else right)[min(len(left), len(right))][0]


def _pieces(stretches: Stretches, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    for number, (first, base) in enumerate(stretches):
        end = stretches[number + 1][0] if number + 1 < len(stretches) else stop
        begin, end = max(first, start), min(end, stop)
        if begin < end:
            yield begin, end, base
