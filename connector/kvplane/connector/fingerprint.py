"""Fingerprints: which tokens, under which circumstances, a piece of KV stands for.

A fingerprint is a chain of 8-byte hashes, one per chunk of tokens. Entry i hashes entry i - 1 and the tokens
of chunk i, so equal entries mean equal tokens from the very start. The entry before the first is a hash of
everything else KV depends on: see Context. Multimodal items, whose placeholder tokens say nothing of their
content, are mixed into each chunk they touch.

The format has a number, which is hashed too: engines of different numbers have no entry in common.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import overload

ENTRY_BYTES = 8
"""Size of one chain entry."""

SEGMENT_TOKENS = 1024
"""How many tokens are hashed in one go, about: a whole number of chunks, one at least."""

_MAGIC = b"kvplane-fingerprint-2"


@dataclass(frozen=True, slots=True)
class Context:
    """What KV depends on besides tokens. Two engines agree only if all of it is equal.

    `lora_path` is part of it, as in vLLM's own block hashes, so that a name pointed at another adapter
    does not meet the old one's KV. vLLM's numeric adapter id is an engine's own and is left out. `settings`
    stands for the rest of what makes an engine's numbers: see `settings.kv_settings`.
    """

    model: str
    model_revision: str = ""
    kv_dtype: str = ""
    lora_name: str = ""
    lora_path: str = ""
    cache_salt: str = ""
    settings: str = ""

    def seed(self) -> bytes:
        """Return the entry before the first: each field with its length in front, so none can run over."""
        digest = blake2b(_MAGIC, digest_size=ENTRY_BYTES)
        for value in astuple(self):
            digest.update(_sized(value))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Item:
    """A multimodal item in the prompt: its content's hash, and the placeholder tokens it takes up."""

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past the last token it touches. An item without placeholders counts where it stands."""
        return self.offset + max(1, self.length)


@dataclass(frozen=True, slots=True)
class Segment:
    """Successive chunks of a prompt, to be hashed in one go.

    Attributes:
        previous: the entry before the first.
        tokens: how many.
        chunk_tokens: of a chunk.
        items: those that touch it, in order, placed relative to its first token.
        name: stands for all tokens up to its end, in this process; b"" if there is no such name.
        packed: returns its token ids packed. O(tokens) the first time.
    """

    previous: bytes
    tokens: int
    chunk_tokens: int
    items: tuple[Item, ...]
    name: bytes
    packed: Callable[[], bytes]


Hasher = Callable[[Segment], bytes]
"""What hash_segment is. Whatever takes its place returns the same."""


class NamedTokens(Sequence[int]):
    """The first tokens of a list, with names for beginnings of it that somebody else has hashed already.

    Args:
        tokens: the list; neither copied nor changed.
        count: how many of them.
        names: names[i] stands for the first (i + 1) * `per_name` tokens: never the same for others.
        per_name: tokens per name.
    """

    __slots__ = ("_count", "_names", "_per_name", "_tokens")

    def __init__(self, tokens: Sequence[int], count: int, names: Sequence[bytes], per_name: int) -> None:
        self._tokens, self._count = tokens, min(count, len(tokens))
        self._names, self._per_name = names, per_name

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            return self._tokens[start:stop:step]
        return self._tokens[range(self._count)[index]]

    def __iter__(self) -> Iterator[int]:
        whole = self._count == len(self._tokens)
        return iter(self._tokens) if whole else islice(self._tokens, self._count)

    def name(self, count: int) -> bytes:
        """Return what stands for the first `count` tokens, b"" if nothing does."""
        index, rest = divmod(count, self._per_name)
        return self._names[index - 1] if not rest and 0 < index <= len(self._names) else b""


def hash_segment(segment: Segment) -> bytes:
    """Return the entries of a segment's chunks."""
    previous, packed, items = segment.previous, segment.packed(), segment.items
    entries, step = list[bytes](), 4 * segment.chunk_tokens
    for start in range(0, len(packed), step):
        chunk = packed[start : start + step]
        if items:
            mixed = _mixed(items, start // 4, start // 4 + len(chunk) // 4)
            previous = blake2b(chunk, digest_size=ENTRY_BYTES, salt=previous, person=mixed).digest()
        else:
            previous = blake2b(chunk, digest_size=ENTRY_BYTES, salt=previous).digest()
        entries.append(previous)
    return b"".join(entries)


def make_chain(
    context: Context,
    tokens: Sequence[int],
    chunk_tokens: int,
    items: Sequence[Item] = (),
    hasher: Hasher = hash_segment,
) -> bytes:
    """Return the chain over all of `tokens`: ceil(len(tokens) / chunk_tokens) entries.

    The last entry covers what is left over. O(len(tokens)), some 0.3 ms per 10,000; with a
    `chains.ChainCache` that knows them, a look-up per thousand named tokens.
    Raises OverflowError for a token id outside int32.
    """
    return b"".join(_entries(context.seed(), tokens, len(tokens), chunk_tokens, items, hasher))


def matching_tokens(
    chain: bytes,
    token_count: int,
    chunk_tokens: int,
    context: Context,
    tokens: Sequence[int],
    items: Sequence[Item] = (),
    hasher: Hasher = hash_segment,
) -> int:
    """Return how many tokens from the start are the same in `chain` (over `token_count` tokens) and `tokens`.

    A multiple of `chunk_tokens`, or `token_count` itself if all of it is equal; never more than
    len(tokens). A chain that does not fit its token count matches nothing. Hashes little beyond the first
    difference. Raises OverflowError for a token id outside int32.
    """
    if chunk_tokens < 1 or token_count < 1 or len(chain) != ENTRY_BYTES * -(-token_count // chunk_tokens):
        return 0
    comparable = token_count
    if len(tokens) < token_count:  # the chain's last chunks reach past the prompt
        comparable = len(tokens) // chunk_tokens * chunk_tokens
    same = 0
    for mine in _entries(context.seed(), tokens, comparable, chunk_tokens, items, hasher):
        theirs = chain[same : same + len(mine)]
        if mine != theirs:
            while mine[:ENTRY_BYTES] == theirs[:ENTRY_BYTES]:
                mine, theirs, same = mine[ENTRY_BYTES:], theirs[ENTRY_BYTES:], same + ENTRY_BYTES
            break
        same += len(mine)
    return min(same // ENTRY_BYTES * chunk_tokens, comparable)


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32. Raises OverflowError for one outside int32."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise OverflowError(f"a token id is no int32: {error}") from None


def segment_tokens(chunk_tokens: int) -> int:
    """Return how many tokens are hashed in one go: a whole number of chunks."""
    return max(1, SEGMENT_TOKENS // chunk_tokens) * chunk_tokens


def _entries(
    seed: bytes,
    tokens: Sequence[int],
    count: int,
    chunk_tokens: int,
    items: Sequence[Item],
    hasher: Hasher,
) -> Iterator[bytes]:
    """Yield the entries of the first `count` tokens' chain, a segment's at a time."""
    pending = sorted(items, key=lambda item: (item.offset, item.length, item.identifier))
    previous, step = seed, segment_tokens(chunk_tokens)
    named = tokens if isinstance(tokens, NamedTokens) else None
    packer = _Packer(tokens, count)
    for start in range(0, count, step):
        end = min(start + step, count)
        touching = _within(pending, start, end) if pending else ()
        if touching:
            pending = [item for item in pending if item.end > end]
        name = named.name(end) if named is not None else b""
        packed = partial(packer.packed, start, end)
        entries = hasher(Segment(previous, end - start, chunk_tokens, touching, name, packed))
        previous = entries[-ENTRY_BYTES:]
        yield entries


class _Packer:
    """Packs tokens from where they are first asked for, in one go: what is before is known by name."""

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self._tokens, self._count = tokens, count
        self._start, self._packed = count, b""

    def packed(self, start: int, end: int) -> bytes:
        if start < self._start:
            self._packed = pack(self._tokens[start : self._count])  # of a list, which is quick to pack
            self._start = start
        return self._packed[4 * (start - self._start) : 4 * (end - self._start)]


def _within(items: Sequence[Item], start: int, end: int) -> tuple[Item, ...]:
    """Return the items that touch tokens [start, end), placed relative to it."""
    return tuple(
        Item(item.identifier, item.offset - start, item.length)
        for item in items
        if item.offset < end and start < item.end
    )


def _mixed(items: Sequence[Item], start: int, end: int) -> bytes:
    """Return a hash of the items that touch tokens [start, end); empty if none does."""
    touching = _within(items, start, end)
    if not touching:
        return b""
    digest = blake2b(digest_size=16)
    for item in touching:
        digest.update(struct.pack("<qq", item.offset, item.length) + _sized(item.identifier))
    return digest.digest()


def _sized(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<q", len(raw)) + raw
