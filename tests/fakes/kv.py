"""The inside of a fake engine: tokens, blocks and what is in them, without any arithmetic of a model.

A token's KV is a number that depends on all tokens before it, as real KV does, and a reply is a function
of the KV that was really used: whoever reads somebody else's blocks says something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from zlib import crc32

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
STOP_WORD = "stop_at_once"
"""A prompt that ends with this word makes the first token the end of the reply."""

_ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
_END = 5
EOS = 6
_FIRST_REPLY_TOKEN = 10
_REPLY_TOKENS = 900_000
_GENERATED = re.compile(r"t(\d{2,6})")
_MASK = (1 << 61) - 1


def tokenize(text: str) -> list[int]:
    """One token per word; words that an engine generated are the tokens they came from."""
    tokens = []
    for word in text.split():
        generated = _GENERATED.fullmatch(word)
        tokens.append(int(generated[1]) if generated else 1_000_000 + crc32(word.encode()) % 1_000_000)
    return tokens


def prompt_tokens(body: dict[str, Any]) -> list[int]:
    """Return the prompt of a request. Raises ValueError, LookupError or TypeError for what is none."""
    if "messages" not in body:
        prompt = body["prompt"]
        return list(prompt) if isinstance(prompt, list) else tokenize(prompt)
    tokens = tokenize(json.dumps(body["tools"])) if body.get("tools") else []
    for message in body["messages"]:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        tokens += [_ROLES.get(message["role"], 7), *tokenize(content), _END]
    return [*tokens, _ROLES["assistant"]]


def next_kv(kv: int, token: int) -> int:
    """Return the KV of a token after those that led to `kv`."""
    return ((kv * 1_000_003) ^ (token * 0x9E3779B97F4A7C15)) & _MASK


def chain(tokens: Sequence[int], kvs: Sequence[int] = (), seed: int = 7) -> list[int]:
    """Return the KV of all tokens; the first ones may be given, right or wrong."""
    result = list(kvs[: len(tokens)])
    for token in tokens[len(result) :]:
        result.append(next_kv(result[-1] if result else seed, token))
    return result


def reply_token(kv: int) -> int:
    """Return what is said after the token with this KV."""
    return _FIRST_REPLY_TOKEN + kv % _REPLY_TOKENS


def word_of(token: int) -> str:
    """Return a reply's token as text."""
    return f"t{token}"


def fingerprint(model: str, tokens: Sequence[int]) -> bytes:
    """Return the chain of hashes over the tokens, as the connector makes it (with another seed)."""
    entry, hashes = blake2b(model.encode(), digest_size=8).digest(), bytearray()
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + CHUNK_TOKENS])
        entry = blake2b(entry + chunk, digest_size=8).digest()
        hashes += entry
    return bytes(hashes)


def matching_tokens(model: str, hashes: bytes, token_count: int, tokens: Sequence[int]) -> int:
    """Return the length of the prefix that a fingerprint and a prompt have in common."""
    own, equal = fingerprint(model, tokens[:token_count]), 0
    for start in range(0, len(hashes), 8):
        end = min((start // 8 + 1) * CHUNK_TOKENS, token_count)
        if own[start : start + 8] != hashes[start : start + 8] or end > len(tokens):
            break
        equal = end
    return equal


class PoolFullError(Exception):
    """No free block is left."""


@dataclass
class BlockPool:
    """KV blocks with reference counts. A freed block is the next to be given out, so that late reads show."""

    size: int = 4096
    content: dict[int, list[int]] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _references: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _cached_as: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.size, 0, -1))

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._references)

    def cached_prefix(self, keys: Sequence[int]) -> list[int]:
        """Take the blocks that hold the longest known prefix; `keys` are the prompt's true KV."""
        blocks = []
        for end in range(BLOCK_TOKENS, len(keys) + 1, BLOCK_TOKENS):
            block = self._cached.get(keys[end - 1])
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            if block not in self._references:
                self._free.remove(block)
            self._references[block] = self._references.get(block, 0) + 1
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Take free blocks. Raises PoolFullError."""
        if count > len(self._free):
            raise PoolFullError
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self.content[block] = []
            self._cached.pop(self._cached_as.pop(block, 0), None)
        return blocks

    def write(self, blocks: Sequence[int], kvs: Sequence[int], keys: Sequence[int]) -> None:
        """Put KV into blocks; full ones can be found again by what they should hold."""
        for index, block in enumerate(blocks):
            start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
            self.content[block] = list(kvs[start:end])
            if len(keys) >= end and keys[end - 1] not in self._cached:
                self._cached[keys[end - 1]] = block
                self._cached_as[block] = keys[end - 1]

    def read(self, blocks: Sequence[int]) -> list[int]:
        """Return what is in blocks, whoever holds them."""
        return [kv for block in blocks for kv in self.content.get(block, [0] * BLOCK_TOKENS)]

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self._free.append(block)
