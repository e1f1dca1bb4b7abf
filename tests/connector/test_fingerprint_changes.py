"""Any one change of anything KV depends on ends a match where it is, and nowhere else."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplane.connector import fingerprint
from kvplane.connector.chains import ChainCache
from kvplane.connector.fingerprint import Context, Hasher, Item, hash_segment, make_chain, matching_tokens

NAMES = [field.name for field in fields(Context)]
texts = st.text(max_size=6)
contexts = st.builds(Context, **dict.fromkeys(NAMES, texts))
REPRESENTATIONS: list[Callable[[list[int]], Sequence[int]]] = [list, tuple, lambda t: array("i", t)]
HASHERS: list[Callable[[], Hasher]] = [lambda: hash_segment, ChainCache]


@dataclass(frozen=True)
class Prompt:
    context: Context
    tokens: list[int]
    items: tuple[Item, ...] = ()


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=120))
    items, place = [], 0
    for name in draw(st.lists(texts, max_size=4)):
        place += draw(st.integers(0, 20))
        length = draw(st.integers(1, 30))
        if place + length > len(tokens):
            break
        items.append(Item(name, place, length))
        place += length
    return Prompt(draw(contexts), tokens, tuple(items))


@st.composite
def changes(draw: st.DrawFn, held: Prompt) -> tuple[Prompt, int]:
    """Return the prompt with one thing changed, and the first token whose KV the change touches."""
    kinds = ["token", "insert", "delete", "cut", "context", "new_item"]
    kind = draw(st.sampled_from(kinds + ["item", "move_item", "drop_item"] * bool(held.items)))
    place = draw(st.integers(0, len(held.tokens) - 1))
    before, after = held.tokens[:place], held.tokens[place:]
    if kind == "token":
        return replace(held, tokens=[*before, after[0] ^ 1, *after[1:]]), place
    if kind == "insert":
        other = draw(st.integers(0, 2**31 - 1).filter(lambda token: token != after[0]))
        return replace(held, tokens=[*before, other, *after]), place
    if kind == "delete":
        rest = after[1:]
        while rest and rest[0] == after[0]:  # one of a run of equal tokens: the run ends sooner
            rest, place = rest[1:], place + 1
        tokens = [*held.tokens[:place], *held.tokens[place + 1 :]]
        return replace(held, tokens=tokens), place
    if kind == "cut":
        return replace(held, tokens=before), place
    if kind == "context":
        name = draw(st.sampled_from(NAMES))
        value = draw(texts.filter(lambda text: text != getattr(held.context, name)))
        return replace(held, context=replace(held.context, **{name: value})), 0
    if kind == "new_item":
        item = Item(draw(texts), place, draw(st.integers(0, 10)))
        assume(item not in held.items)
        return replace(held, items=(*held.items, item)), place
    index = draw(st.integers(0, len(held.items) - 1))
    item = held.items[index]
    others = [*held.items[:index], *held.items[index + 1 :]]
    if kind == "item":
        changed = replace(item, identifier=draw(texts.filter(lambda text: text != item.identifier)))
        return replace(held, items=(*others, changed)), item.offset
    if kind == "move_item":
        changed = replace(item, offset=item.offset + draw(st.integers(1, 5)))
        return replace(held, items=(*others, changed)), item.offset
    return replace(held, items=tuple(others)), item.offset


def match(held: Prompt, prompt: Prompt, chunk: int, hasher: Hasher = hash_segment) -> int:
    chain = make_chain(held.context, held.tokens, chunk, held.items)
    return matching_tokens(
        chain, len(held.tokens), chunk, prompt.context, prompt.tokens, prompt.items, hasher
    )


@given(st.data(), st.integers(1, 40), st.sampled_from(HASHERS))
def test_one_change_ends_the_match_where_it_is(
    data: st.DataObject, chunk: int, hasher: Callable[[], Hasher]
) -> None:
    held = data.draw(prompts())
    changed, place = data.draw(changes(held))
    assert match(held, changed, chunk, hasher()) == place // chunk * chunk


@given(st.data(), st.integers(1, 40), st.sampled_from(REPRESENTATIONS), st.sampled_from(HASHERS))
def test_equal_input_matches_as_a_whole(
    data: st.DataObject,
    chunk: int,
    represent: Callable[[list[int]], Sequence[int]],
    hasher: Callable[[], Hasher],
) -> None:
    held = data.draw(prompts())
    items = data.draw(st.permutations(held.items))
    more = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    later = [Item("later", len(held.tokens), 2)] if more else []
    chain = make_chain(held.context, represent(held.tokens), chunk, items)
    prompt = represent([*held.tokens, *more])
    matched = matching_tokens(
        chain, len(held.tokens), chunk, held.context, prompt, [*later, *items], hasher()
    )
    assert matched == len(held.tokens)


@given(st.data(), st.integers(1, 40))
def test_never_longer_than_the_common_prefix_nor_shorter_than_its_whole_chunks(
    data: st.DataObject, chunk: int
) -> None:
    one, two = data.draw(st.tuples(*[st.lists(st.integers(0, 1), min_size=1, max_size=60)] * 2))
    same = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    matched = match(Prompt(Context("m"), one), Prompt(Context("m"), two), chunk)
    assert matched == (len(one) if same == len(one) else same // chunk * chunk)


@given(prompts(), st.integers(1, 40), st.sampled_from([16, 1024]))
def test_the_format(held: Prompt, chunk: int, segment: int) -> None:
    """The chain as any other program would make it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "SEGMENT_TOKENS", segment)
        assert make_chain(held.context, held.tokens, chunk, held.items) == reference(held, chunk)


def test_an_item_over_several_segments_counts_in_each() -> None:
    long = Prompt(Context("m"), [7] * 4000, (Item("video", 1000, 1100),))
    assert make_chain(long.context, long.tokens, 64, long.items) == reference(long, 64)


@pytest.mark.parametrize("offset", [0, 63, 64, 100])
def test_an_item_without_placeholders_counts_where_it_stands(offset: int) -> None:
    plain = Prompt(Context("m"), [7] * 300)
    assert match(plain, replace(plain, items=(Item("cat", offset, 0),)), 64) == offset // 64 * 64


def reference(held: Prompt, chunk: int) -> bytes:
    def sized(text: str) -> bytes:
        return struct.pack("<q", len(text.encode())) + text.encode()

    seed = b"kvplane-fingerprint-2" + b"".join(sized(getattr(held.context, name)) for name in NAMES)
    entry, chain = blake2b(seed, digest_size=8).digest(), b""
    for start in range(0, len(held.tokens), chunk):
        part = held.tokens[start : start + chunk]
        mixed = b"".join(
            struct.pack("<qq", item.offset - start, item.length) + sized(item.identifier)
            for item in sorted(held.items, key=lambda item: item.offset)
            if item.offset < start + len(part) and start < item.offset + item.length
        )
        person = blake2b(mixed, digest_size=16).digest() if mixed else b""
        packed = struct.pack(f"<{len(part)}i", *part)
        entry = blake2b(packed, digest_size=8, salt=entry, person=person).digest()
        chain += entry
    return chain


@pytest.mark.parametrize("tokens", [[-(2**31) - 1], [1, 2**31], [2**63], [None], ["1"], [1.5]])
def test_what_is_no_token_is_refused(tokens: list[int]) -> None:
    with pytest.raises(OverflowError):
        make_chain(Context("m"), tokens, 64)


def test_text_that_is_no_unicode_is_hashed_like_any_other() -> None:
    assert Context("m", cache_salt="\ud800").seed() != Context("m", cache_salt="\ud801").seed()
