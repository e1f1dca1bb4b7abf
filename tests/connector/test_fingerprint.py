from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.connector.fingerprint import ENTRY_BYTES, Context, Item, make_chain, matching_tokens

BASE = Context("model", "main", "bfloat16")
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)
chunks = st.integers(1, 80)


def match(
    held: list[int], prompt: list[int], chunk: int = 8, mine: Context = BASE, items: tuple[Item, ...] = ()
) -> int:
    return matching_tokens(make_chain(BASE, held, chunk), len(held), chunk, mine, prompt, items)


def test_no_tokens_no_entries() -> None:
    assert make_chain(BASE, [], 64) == b""
    assert matching_tokens(b"", 0, 64, BASE, [1, 2]) == 0
    assert matching_tokens(b"", 64, 64, BASE, [1, 2]) == 0


@given(tokens, chunks)
def test_one_entry_per_chunk_the_last_for_what_is_left(held: list[int], chunk: int) -> None:
    assert len(make_chain(BASE, held, chunk)) == ENTRY_BYTES * -(-len(held) // chunk)


@given(tokens, tokens, chunks)
def test_a_continued_history_matches_as_a_whole(held: list[int], more: list[int], chunk: int) -> None:
    assert match(held, held + more, chunk) == len(held)
    assert match(held, held, chunk) == len(held)


@given(tokens, tokens, chunks)
def test_never_more_than_what_is_really_equal(held: list[int], prompt: list[int], chunk: int) -> None:
    equal = 0
    while equal < min(len(held), len(prompt)) and held[equal] == prompt[equal]:
        equal += 1
    matched = match(held, prompt, chunk)
    assert matched == (len(held) if equal == len(held) else equal // chunk * chunk)


@given(tokens, chunks, st.data())
def test_reuse_ends_at_an_edit(held: list[int], chunk: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(held) - 1))
    prompt = [*held[:place], held[place] ^ 1, *held[place + 1 :], 7]
    assert match(held, prompt, chunk) == place // chunk * chunk


@given(tokens, chunks, st.data())
def test_a_cut_prompt_matches_in_whole_chunks(held: list[int], chunk: int, data: st.DataObject) -> None:
    prompt = held[: data.draw(st.integers(0, len(held) - 1))]
    assert match(held, prompt, chunk) == len(prompt) // chunk * chunk


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model="other"),
        replace(BASE, model_revision="other"),
        replace(BASE, kv_dtype="float32"),
        replace(BASE, lora_name="a"),
        replace(BASE, lora_path="/a"),
        replace(BASE, cache_salt="s"),
        replace(BASE, settings="s"),
        Context("modelmain", "", "bfloat16"),
        Context("model", "mainbfloat16", ""),
    ],
)
def test_whatever_kv_depends_on_is_in_the_seed(other: Context) -> None:
    assert match(list(range(100)), list(range(100)), mine=other) == 0
    assert match(list(range(100)), list(range(100)), mine=replace(BASE)) == 100


@given(
    st.lists(st.text(max_size=4), min_size=7, max_size=7),
    st.lists(st.text(max_size=4), min_size=7, max_size=7),
)
def test_seeds_differ_where_any_field_does(one: list[str], two: list[str]) -> None:
    assert (Context(*one).seed() == Context(*two).seed()) == (one == two)


def test_items_count_in_the_chunks_they_touch_and_all_after() -> None:
    held, image = [9] * 64, (Item("cat", 20, 10),)
    chain = make_chain(BASE, held, 8, image)
    assert matching_tokens(chain, 64, 8, BASE, held, image) == 64
    assert matching_tokens(chain, 64, 8, BASE, held, (Item("dog", 20, 10),)) == 16
    assert matching_tokens(chain, 64, 8, BASE, held, (Item("cat", 21, 10),)) == 16
    assert matching_tokens(chain, 64, 8, BASE, held, (Item("cat", 20, 11),)) == 16
    assert matching_tokens(chain, 64, 8, BASE, held) == 16
    assert matching_tokens(chain, 64, 8, BASE, held, (*image, Item("later", 40, 8))) == 40


def test_an_item_may_span_chunks_and_begin_at_zero() -> None:
    held, image = [9] * 64, (Item("cat", 0, 64),)
    assert matching_tokens(make_chain(BASE, held, 8, image), 64, 8, BASE, held) == 0


@pytest.mark.parametrize(
    ("chain", "count", "chunk"), [(b"1234567", 8, 8), (bytes(16), 8, 8), (bytes(8), 8, 0)]
)
def test_a_chain_that_does_not_fit_matches_nothing(chain: bytes, count: int, chunk: int) -> None:
    assert matching_tokens(chain, count, chunk, BASE, list(range(8))) == 0


def test_the_format_is_as_documented() -> None:
    # Both sides of a fleet must agree on it across versions: a change here is a change of protocol.
    chain = make_chain(Context("m", "r", "bfloat16", cache_salt="s"), list(range(100)), 64)
    assert chain.hex() == CHAIN


def test_token_ids_beyond_int32_are_refused() -> None:
    with pytest.raises(OverflowError):
        make_chain(BASE, [2**31], 8)


CHAIN = "6405de16eb2ec9fd3c72145f295b1aa2"
