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
from hashlib import blake2b

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


Hasher = Callable[[bytes, bytes, int, tuple[Item, ...]], bytes]
"""What hash_chunks is. Whatever takes its place returns the same."""


def hash_chunks(previous: bytes, packed: bytes, chunk_tokens: int, items: tuple[Item, ...]) -> bytes:
    """Return the entries of the chunks in `packed`, which follow the entry `previous`.

    `items` are those that touch it, in order, placed relative to its first token.
    """
    entries, step = list[bytes](), 4 * chunk_tokens
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
    hasher: Hasher = hash_chunks,
) -> bytes:
    """Return the chain over all of `tokens`: ceil(len(tokens) / chunk_tokens) entries.

    The last entry covers what is left over. O(len(tokens)); about 0.2 ms per 10,000 tokens, a third of it
    with a `chains.ChainCache` that knows them.
    Raises OverflowError for a token id outside int32.
    """
    return b"".join(_segments(context.seed(), pack(tokens), chunk_tokens, items, hasher))


def matching_tokens(
    chain: bytes,
    token_count: int,
    chunk_tokens: int,
    context: Context,
    tokens: Sequence[int],
    items: Sequence[Item] = (),
    hasher: Hasher = hash_chunks,
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
    packed, same = pack(tokens, comparable), 0
    for mine in _segments(context.seed(), packed, chunk_tokens, items, hasher):
        theirs = chain[same : same + len(mine)]
        if mine != theirs:
            while mine[:ENTRY_BYTES] == theirs[:ENTRY_BYTES]:
                mine, theirs, same = mine[ENTRY_BYTES:], theirs[ENTRY_BYTES:], same + ENTRY_BYTES
            break
        same += len(mine)
    return min(same // ENTRY_BYTES * chunk_tokens, comparable)


def pack(tokens: Sequence[int], count: int | None = None) -> bytes:
    """Return the first `count` token ids (all by default) as little-endian int32.

    Raises OverflowError for one outside int32.
    """
    if count is not None and count < len(tokens):
        tokens = tokens[:count]
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise OverflowError(f"a token id is no int32: {error}") from None


def segment_tokens(chunk_tokens: int) -> int:
    """Return how many tokens are hashed in one go: a whole number of chunks."""
    return max(1, SEGMENT_TOKENS // chunk_tokens) * chunk_tokens


def _segments(
    seed: bytes, packed: bytes, chunk_tokens: int, items: Sequence[Item], hasher: Hasher
) -> Iterator[bytes]:
    """Yield the chain's entries, a segment's at a time."""
    pending = sorted(items, key=lambda item: (item.offset, item.length, item.identifier))
    previous, step = seed, segment_tokens(chunk_tokens)
    count = len(packed) // 4
    for start in range(0, count, step):
        end = min(start + step, count)
        touching = _within(pending, start, end) if pending else ()
        if touching:
            pending = [item for item in pending if item.end > end]
        entries = hasher(previous, packed[4 * start : 4 * end], chunk_tokens, touching)
        previous = entries[-ENTRY_BYTES:]
        yield entries


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
