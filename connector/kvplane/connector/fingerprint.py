"""Fingerprints: which tokens, under which circumstances, a piece of KV stands for.

A fingerprint is a chain of 8-byte hashes, one per chunk of tokens. Entry i hashes entry i - 1 and the tokens
of chunk i, so equal entries mean equal tokens from the very start. The entry before the first is a hash of
everything else KV depends on: model, revision, KV dtype, LoRA adapter, cache salt. Multimodal items, whose
placeholder tokens say nothing of their content, are mixed into each chunk they touch.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

ENTRY_BYTES = 8
"""Size of one chain entry."""

_MAGIC = b"kvplane-fingerprint-1"


@dataclass(frozen=True, slots=True)
class Context:
    """What KV depends on besides tokens. Two engines agree only if all of it is equal.

    `lora_path` is part of it, as in vLLM's own block hashes, so that a name pointed at another adapter
    does not meet the old one's KV. vLLM's numeric adapter id is an engine's own and is left out.
    """

    model: str
    model_revision: str = ""
    kv_dtype: str = ""
    lora_name: str = ""
    lora_path: str = ""
    cache_salt: str = ""

    def seed(self) -> bytes:
        """Return the entry before the first: each field with its length in front, so none can run over."""
        digest = blake2b(_MAGIC, digest_size=ENTRY_BYTES)
        for value in (
            self.model,
            self.model_revision,
            self.kv_dtype,
            self.lora_name,
            self.lora_path,
            self.cache_salt,
        ):
            digest.update(_sized(value))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Item:
    """A multimodal item in the prompt: its content's hash, and the placeholder tokens it takes up."""

    identifier: str
    offset: int
    length: int


def make_chain(
    context: Context, tokens: Sequence[int], chunk_tokens: int, items: Sequence[Item] = ()
) -> bytes:
    """Return the chain over all of `tokens`: ceil(len(tokens) / chunk_tokens) entries.

    The last entry covers what is left over. O(len(tokens)); about half a millisecond per 10,000 tokens.
    Raises OverflowError for a token id outside int32.
    """
    return b"".join(_entries(context.seed(), _packed(tokens), chunk_tokens, items))


def matching_tokens(
    chain: bytes,
    token_count: int,
    chunk_tokens: int,
    context: Context,
    tokens: Sequence[int],
    items: Sequence[Item] = (),
) -> int:
    """Return how many tokens from the start are the same in `chain` (over `token_count` tokens) and `tokens`.

    A multiple of `chunk_tokens`, or `token_count` itself if all of it is equal; never more than
    len(tokens). A chain that does not fit its token count matches nothing. Ends at the first difference.
    """
    if chunk_tokens < 1 or token_count < 1 or len(chain) != ENTRY_BYTES * -(-token_count // chunk_tokens):
        return 0
    comparable = token_count
    if len(tokens) < token_count:  # the chain's last chunks reach past the prompt
        comparable = len(tokens) // chunk_tokens * chunk_tokens
    equal = 0
    mine = _entries(context.seed(), _packed(tokens[:comparable]), chunk_tokens, items)
    for index, entry in enumerate(mine):
        if entry != chain[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]:
            break
        equal = min((index + 1) * chunk_tokens, comparable)
    return equal


def _entries(seed: bytes, packed: bytes, chunk_tokens: int, items: Sequence[Item]) -> Iterator[bytes]:
    ordered = sorted(items, key=lambda item: (item.offset, item.length)) if items else ()
    previous, step = seed, 4 * chunk_tokens
    for start in range(0, len(packed), step):
        message = previous + packed[start : start + step]
        if ordered:
            message += _items_in(ordered, start // 4, min(start + step, len(packed)) // 4)
        previous = blake2b(message, digest_size=ENTRY_BYTES).digest()
        yield previous


def _items_in(items: Sequence[Item], start: int, end: int) -> bytes:
    """Return the items that touch tokens [start, end), placed relative to it."""
    return b"".join(
        _sized(item.identifier) + struct.pack("<qq", item.offset - start, item.length)
        for item in items
        if item.offset < end and start < item.offset + item.length
    )


def _packed(tokens: Sequence[int]) -> bytes:
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _sized(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<q", len(raw)) + raw
