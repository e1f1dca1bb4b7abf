"""Conversations found by what a prompt begins with.

Per tenant, model, adapter and chunk size, the hash of each retained location's last whole chunk leads to the
location: it stands for all tokens up to there. What is found is compared in full before it is offered, so
hashes of hashes that meet by accident cost time and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.availability import Availability
from kvplane.controlplane.ledger import Ledger, Stored, understood
from kvplane.store.base import Event, KeyValue

HASH_BYTES = 8
_MOST_ALIKE = 64
"""Conversations with the same tokens that are looked at, the newest."""
_KEPT_BITS = 60
"""Of a hash: what an int of Python's keeps in two digits."""


class Match(NamedTuple):
    """A conversation whose location's whole chunks all begin the prompt; `refused`: why it is not offered."""

    found: m.Found
    refused: m.MissReason | None


class Prefixes:
    """An index of what is retained, fed by the mirror. One entry, of some hundred bytes, per location."""

    def __init__(self, ledger: Ledger, availability: Availability) -> None:
        self._ledger = ledger
        self._availability = availability
        # Store keys of locations; several, oldest first, where their tokens are the same.
        self._at: dict[int, bytes | dict[bytes, None]] = {}
        ledger.mirror.listen(keys.LOCATIONS, self._on_location)

    def __len__(self) -> int:
        """Return how many different entries there are."""
        return len(self._at)

    def best(self, scope: m.ConversationKey, fingerprint: m.Fingerprint) -> Match | None:
        """Return the conversation that a prompt goes on with, of the tenant, model and adapter of `scope`.

        That is the longest that can be claimed now. Of several with the same tokens, one without a turn in
        flight, and of those the newest. If none can be claimed, the longest. O(chunks of the prompt).
        """
        refused: Match | None = None
        spare: tuple[int, Match] | None = None
        now = self._ledger.clock.now_ms()
        for chunks, stored, location in self._matching(scope, fingerprint):
            if spare is not None and chunks < spare[0]:
                break
            reason, _ = self._availability.judge(location)
            match = Match(m.Found(location, stored.revision), reason)
            if reason is not None:
                refused = refused or match
                continue
            turns = self._ledger.turns_at(keys.turns(location.key)).value
            if turns is None or not turns.is_in_flight(now):
                return match
            spare = spare or (chunks, match)
        return spare[1] if spare is not None else refused

    def _matching(
        self, scope: m.ConversationKey, fingerprint: m.Fingerprint
    ) -> Iterator[tuple[int, Stored[m.Location], m.Location]]:
        """Give the locations that begin the prompt and in how many chunks, longest first, then newest."""
        prefix, at = keys.scope(scope), self._at
        salt = _salt(prefix, fingerprint.chunk_tokens)
        entries = memoryview(fingerprint.chain).cast("Q")
        for number in range(len(entries) - 1, -1, -1):
            found = at.get(_mixed(entries[number], salt))
            if found is None:
                continue
            alike = [found] if isinstance(found, bytes) else list(islice(reversed(found), _MOST_ALIKE))
            matching = list[tuple[int, Stored[m.Location], m.Location]]()
            for key in alike:
                stored = self._ledger.location_at(key)
                if (
                    key.startswith(prefix)
                    and stored.value is not None
                    and _begins(stored.value, fingerprint, number + 1)
                ):
                    matching.append((number + 1, stored, stored.value))
            yield from sorted(matching, key=_turn, reverse=True)

    def _on_location(self, event: Event) -> None:
        old, new = _entry(event.previous), _entry(event.current)
        if old == new:
            return
        if old is not None:
            self._remove(old, event.key)
        if new is not None:
            there = self._at.get(new)
            if there is None:
                self._at[new] = event.key
            elif isinstance(there, dict):
                there[event.key] = None
            elif there != event.key:
                self._at[new] = {there: None, event.key: None}

    def _remove(self, entry: int, key: bytes) -> None:
        there = self._at.get(entry)
        if isinstance(there, dict):
            there.pop(key, None)
            if len(there) == 1:
                self._at[entry] = next(iter(there))
        elif there == key:
            del self._at[entry]


def _turn(match: tuple[int, Stored[m.Location], m.Location]) -> int:
    return match[2].turn


def _begins(location: m.Location, fingerprint: m.Fingerprint, chunks: int) -> bool:
    """Tell whether a location has so many whole chunks, and they are the first of a prompt's."""
    mine = location.fingerprint
    return (
        mine.chunk_tokens == fingerprint.chunk_tokens
        and location.token_count // mine.chunk_tokens == chunks
        and mine.chain[: chunks * HASH_BYTES] == fingerprint.chain[: chunks * HASH_BYTES]
    )


def _entry(item: KeyValue | None) -> int | None:
    """Return where a location is found; None for one of less than a chunk, or none at all."""
    seen = None if item is None else understood(item, records.location_tokens)
    if item is None or seen is None:
        return None
    chunk_tokens, token_count, chain = seen
    end = token_count // chunk_tokens * HASH_BYTES if chunk_tokens > 0 else 0
    if not 0 < end <= len(chain):
        return None
    last = int.from_bytes(chain[end - HASH_BYTES : end], sys.byteorder)
    return _mixed(last, _salt(keys.scope_of(item.key), chunk_tokens))


@lru_cache(maxsize=1024)
def _salt(scope: bytes, chunk_tokens: int) -> int:
    return hash((scope, chunk_tokens)) & ((1 << _KEPT_BITS) - 1)


def _mixed(last: int, salt: int) -> int:
    return last >> (64 - _KEPT_BITS) ^ salt
