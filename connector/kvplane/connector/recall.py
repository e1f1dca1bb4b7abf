"""Which conversation a prompt goes on with, as far as this engine can tell by itself.

A conversation without an id is found by the control plane if its whole location, reply included, is a prefix
of the prompt. That misses replies which come back as other tokens (a text is not always tokenized as it was
generated, templates strip reasoning) and turns not announced yet. But the *prompt* of the turn before comes
back as it was: who begins with all of it goes on with that conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvplane.client.model import ConversationKey
from kvplane.connector.fingerprint import ENTRY_BYTES, Item

_MAX_PROMPTS = 4096
_MAX_PER_ENTRY = 64

_Tail = tuple[tuple[int, ...], tuple[tuple[str, int, int], ...]]


class PromptMemory:
    """Remembers the last prompt of each conversation. Belongs to one thread; 4096 prompts at most.

    A prompt that two conversations had alike says nothing, and is not answered with either.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._prompts: OrderedDict[tuple[bytes, _Tail], ConversationKey | None] = OrderedDict()
        self._tails: dict[bytes, dict[_Tail, None]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def take(
        self, seed: bytes, chain: bytes, tokens: Sequence[int], items: Sequence[Item] = ()
    ) -> ConversationKey | None:
        """Return the conversation of the longest prompt that `tokens` go on from, and forget that prompt.

        It is forgotten because each prompt has one continuation: a second one is a branch, another
        conversation. O(chunks). `seed` is what the chain was begun with.
        """
        for whole in range(len(tokens) // self._chunk_tokens, -1, -1):
            entry = _entry(seed, chain, whole)
            start = whole * self._chunk_tokens
            for tail in sorted(self._tails.get(entry, ()), key=_length, reverse=True):
                end = start + len(tail[0])
                if end < len(tokens) and self._tail(tokens, items, start, end) == tail:
                    key = self._prompts[entry, tail]
                    if key is not None:
                        self._forget(entry, tail)
                    return key
        return None

    def remember(
        self,
        seed: bytes,
        chain: bytes,
        tokens: Sequence[int],
        key: ConversationKey,
        items: Sequence[Item] = (),
    ) -> None:
        """Note the prompt of a conversation's turn. O(chunk)."""
        whole = len(tokens) // self._chunk_tokens
        entry = _entry(seed, chain, whole)
        tail = self._tail(tokens, items, whole * self._chunk_tokens, len(tokens))
        tails = self._tails.setdefault(entry, {})
        alike = (entry, tail) in self._prompts and self._prompts[entry, tail] != key
        self._prompts[entry, tail] = None if alike else key
        self._prompts.move_to_end((entry, tail))
        tails[tail] = None
        if len(tails) > _MAX_PER_ENTRY:
            self._forget(entry, next(iter(tails)))
        while len(self._prompts) > _MAX_PROMPTS:
            self._forget(*next(iter(self._prompts)))

    def _forget(self, entry: bytes, tail: _Tail) -> None:
        del self._prompts[entry, tail]
        tails = self._tails[entry]
        del tails[tail]
        if not tails:
            del self._tails[entry]

    @staticmethod
    def _tail(tokens: Sequence[int], items: Sequence[Item], start: int, end: int) -> _Tail:
        return tuple(tokens[start:end]), tuple(
            (item.identifier, item.offset - start, item.length)
            for item in items
            if item.offset < end and start < item.offset + item.length
        )


def _entry(seed: bytes, chain: bytes, whole: int) -> bytes:
    return chain[(whole - 1) * ENTRY_BYTES : whole * ENTRY_BYTES] if whole else seed


def _length(tail: _Tail) -> int:
    return len(tail[0])
