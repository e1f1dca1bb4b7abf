from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.connector import fingerprint
from kvplane.connector.chains import ChainCache
from kvplane.connector.fingerprint import (
    Context,
    Item,
    NamedTokens,
    make_chain,
    matching_tokens,
    segment_tokens,
)

BASE = Context("model")
SEGMENT = segment_tokens(64)


def history(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(150_000), k=count)


def named(tokens: Sequence[int], count: int | None = None, per_name: int = 16) -> NamedTokens:
    names, name = list[bytes](), b""
    for start in range(0, len(tokens) // per_name * per_name, per_name):
        name = sha256(name + repr(tokens[start : start + per_name]).encode()).digest()
        names.append(name)
    return NamedTokens(tokens, len(tokens) if count is None else count, names, per_name)


class Unread(list[int]):
    """Tokens that nobody may look at before a place."""

    def __init__(self, tokens: list[int], place: int) -> None:
        super().__init__(tokens)
        self.place = place

    def __getitem__(self, index: object) -> list[int]:  # type: ignore[override]
        assert isinstance(index, slice)
        assert index.start >= self.place
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all tokens are looked at")


def test_what_has_a_known_name_is_not_looked_at() -> None:
    cache, first = ChainCache(), history(5 * SEGMENT)
    make_chain(BASE, named(first), 64, hasher=cache)
    following = [*first, *history(300, 1)]
    names = named(following)._names
    chain = make_chain(BASE, following, 64)
    unread = NamedTokens(Unread(following, 5 * SEGMENT), len(following), names, 16)
    assert make_chain(BASE, unread, 64, hasher=cache) == chain
    assert matching_tokens(chain, len(following), 64, BASE, unread, hasher=cache) == len(following)


def test_a_name_counts_for_what_it_stands_for_only() -> None:
    cache, tokens = ChainCache(), history(3 * SEGMENT)
    item = [Item("cat", SEGMENT + 3, 9)]
    for context in (BASE, replace(BASE, cache_salt="s")):
        for items in ([], item):
            for chunk in (64, 32):
                expected = make_chain(context, tokens, chunk, items)
                assert make_chain(context, named(tokens), chunk, items, cache) == expected
    assert make_chain(BASE, tokens, 64, hasher=cache) == make_chain(BASE, tokens, 64)


@pytest.mark.parametrize("per_name", [7, 16, 1000, 2048])
def test_names_of_any_span_change_no_result(per_name: int) -> None:
    cache, tokens = ChainCache(), history(4 * SEGMENT + 5)
    for count in (len(tokens), 3 * SEGMENT + 1, 10, len(tokens)):
        expected = make_chain(BASE, tokens[:count], 64)
        assert make_chain(BASE, named(tokens, count, per_name), 64, hasher=cache) == expected


def test_tokens_with_names_are_a_sequence() -> None:
    tokens = NamedTokens(list(range(10)), 6, (), 1)
    assert (len(tokens), list(tokens), tokens[-1], tokens[4:9]) == (6, [0, 1, 2, 3, 4, 5], 5, [4, 5])
    with pytest.raises(IndexError):
        tokens[6]
    assert len(NamedTokens([1], 5, (), 1)) == 1


def test_the_next_turn_hashes_what_is_new_in_it() -> None:
    cache, first = ChainCache(), history(10 * SEGMENT + 100)
    make_chain(BASE, first, 64, hasher=cache)
    assert cache.hashed_tokens == len(first)
    following = [*first, *history(300, 1)]
    assert make_chain(BASE, following, 64, hasher=cache) == make_chain(BASE, following, 64)
    assert cache.hashed_tokens == len(first) + 100 + 300  # less than a segment is not remembered
    assert cache.known_tokens == 10 * SEGMENT


def test_verifying_the_next_turn_hashes_what_is_new_in_it() -> None:
    cache, first = ChainCache(), history(4 * SEGMENT)
    following = [*first, *history(2 * SEGMENT, 1)]
    for held in (first, following):
        chain = make_chain(BASE, held, 64)
        assert matching_tokens(chain, len(held), 64, BASE, [*held, 5], hasher=cache) == len(held)
    assert cache.hashed_tokens == len(following)


def test_an_edit_costs_what_comes_after_it() -> None:
    cache, first = ChainCache(), history(8 * SEGMENT)
    make_chain(BASE, first, 64, hasher=cache)
    edited = [*first[: 5 * SEGMENT + 7], 1, *first[5 * SEGMENT + 8 :]]
    assert make_chain(BASE, edited, 64, hasher=cache) == make_chain(BASE, edited, 64)
    assert cache.known_tokens == 5 * SEGMENT


@pytest.mark.parametrize("other", [replace(BASE, cache_salt="s"), replace(BASE, lora_name="a")])
def test_other_circumstances_share_nothing(other: Context) -> None:
    cache, tokens = ChainCache(), history(3 * SEGMENT)
    one = make_chain(BASE, tokens, 64, hasher=cache)
    assert make_chain(other, tokens, 64, hasher=cache) == make_chain(other, tokens, 64) != one
    assert cache.known_tokens == 0


def test_items_are_part_of_what_is_known() -> None:
    cache, tokens = ChainCache(), [9] * (3 * SEGMENT)
    make_chain(BASE, tokens, 64, [Item("cat", SEGMENT + 1, 5)], cache)
    dog = [Item("dog", SEGMENT + 1, 5)]
    assert make_chain(BASE, tokens, 64, dog, cache) == make_chain(BASE, tokens, 64, dog)
    assert cache.known_tokens == SEGMENT


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    cache = ChainCache(max_bytes=20 * (4 * SEGMENT + 600))
    often = history(4 * SEGMENT, 999)
    make_chain(BASE, often, 64, hasher=cache)
    for seed in range(50):
        make_chain(BASE, history(3 * SEGMENT, seed), 64, hasher=cache)
        known = cache.known_tokens
        make_chain(BASE, often, 64, hasher=cache)
        assert cache.known_tokens == known + 4 * SEGMENT
        assert cache.size <= 20 * (4 * SEGMENT + 600)
    assert len(cache) <= 20
    cache.clear()
    assert (len(cache), cache.size) == (0, 0)


def test_more_than_fits_is_hashed_all_the_same() -> None:
    cache, tokens = ChainCache(max_bytes=100), history(3 * SEGMENT)
    assert make_chain(BASE, tokens, 64, hasher=cache) == make_chain(BASE, tokens, 64)
    assert (len(cache), cache.size) == (0, 0)


def test_items_that_are_remembered_count_as_memory() -> None:
    cache, bound = ChainCache(max_bytes=1 << 20), 1 << 20
    for seed in range(40):
        items = [Item(f"{seed}-{'x' * 60}-{index}", index, 1) for index in range(SEGMENT)]
        make_chain(BASE, history(SEGMENT, seed), 64, items, cache)
        assert cache.size <= bound
    assert len(cache) < 10


@settings(max_examples=60)
@given(st.data())
def test_a_memory_changes_no_result(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "SEGMENT_TOKENS", 16)
        cache, now = ChainCache(data.draw(st.sampled_from([3_000, 1 << 20]))), [0] * 20
        for _ in range(data.draw(st.integers(1, 12))):
            place = data.draw(st.integers(0, len(now)))
            now = [*now[:place], *data.draw(st.lists(st.integers(0, 2), max_size=40))]
            now = now or [1]
            chunk = data.draw(st.sampled_from([1, 3, 4, 16, 40]))
            mine = data.draw(st.sampled_from([BASE, replace(BASE, cache_salt="s")]))
            items = data.draw(
                st.lists(
                    st.builds(Item, st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 20)), max_size=3
                )
            )
            chain = make_chain(mine, now, chunk, items)
            assert make_chain(mine, now, chunk, items, cache) == chain
            assert matching_tokens(chain, len(now), chunk, mine, [*now, 1], items, cache) == len(now)
