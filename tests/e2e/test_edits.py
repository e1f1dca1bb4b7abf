"""The generator of histories, and the count of what they can reuse."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.e2e.edits import (
    Ask,
    Edit,
    History,
    Message,
    Step,
    chat,
    next_prompts,
    plan,
    reply_of,
    tokens,
)
from tests.e2e.truth import Circumstances, Kept, Knowledge, cached, common_prefix, kept_after, pullable

WORDS: History = (
    Message("system", ("be", "kind")),
    Message("user", ("one", "two", "three")),
    Message("assistant", ("think", "think", "four")),
)
TOKENS: History = (
    Message("system", (20, 21)),
    Message("user", (30, 31, 32)),
    Message("assistant", (40, 41, 42)),
)
HERE = Circumstances("m")


def after(edit: Edit, history: History, seed: str = "s") -> list[History]:
    return next_prompts(Step(edit, Ask.PULL, seed, 5), history, history is TOKENS)


def test_a_run_is_repeatable_and_another_seed_gives_another() -> None:
    assert [plan(1, number) for number in range(20)] == [plan(1, number) for number in range(20)]
    assert plan(1, 3) != plan(2, 3)
    assert plan(1, 3) != plan(1, 4)


def test_a_run_meets_every_edit_every_path_and_both_apis() -> None:
    plans = [plan(7, number) for number in range(40)]
    steps = [step for one in plans for step in one.steps]
    assert {step.edit for step in steps} == set(Edit)
    assert {step.ask for step in steps} == set(Ask)
    assert {one.as_tokens for one in plans} == {True, False}
    assert all(one.steps[0].edit is Edit.CONTINUE for one in plans), "something is held before it is edited"


def test_without_adapters_none_is_asked_for() -> None:
    steps = [step for number in range(60) for step in plan(7, number, adapters=False).steps]
    assert not {step.edit for step in steps} & {Edit.ADAPTER, Edit.OFFERED}


@pytest.mark.parametrize("history", [WORDS, TOKENS], ids=["words", "tokens"])
@pytest.mark.parametrize(
    "edit", [Edit.PIECE, Edit.MESSAGE, Edit.INSERT, Edit.DELETE, Edit.SWAP, Edit.STRIP, Edit.SYSTEM]
)
def test_an_edit_changes_the_history_and_asks_something_new(edit: Edit, history: History) -> None:
    for number in range(30):
        (prompt,) = after(edit, history, f"{number}")
        assert prompt[:-1] != history
        assert prompt[-1].role == "user"
        assert len(prompt) == len(history) + 1 + {Edit.INSERT: 1, Edit.DELETE: -1}.get(edit, 0)


def test_one_piece_is_one_piece() -> None:
    for number in range(50):
        (prompt,) = after(Edit.PIECE, TOKENS, f"{number}")
        before, now = tokens(TOKENS), tokens(prompt[:-1])
        assert len(before) == len(now)
        assert sum(one != other for one, other in zip(before, now, strict=True)) == 1


def test_kinds_that_change_no_message() -> None:
    for edit in (Edit.CONTINUE, Edit.ADAPTER, Edit.OFFERED, Edit.SALT):
        (prompt,) = after(edit, WORDS)
        assert prompt[:-1] == WORDS
    assert after(Edit.REGENERATE, WORDS) == [WORDS[:-1]]
    (branch,) = after(Edit.BRANCH, WORDS)
    assert branch[:-1] == WORDS[:-2]
    assert branch[-1] != WORDS[-2]
    one, other = after(Edit.AT_ONCE, WORDS)
    assert one[:-1] == other[:-1] == WORDS
    assert one[-1] != other[-1]


def test_reasoning_is_the_first_half_of_a_reply() -> None:
    (prompt,) = after(Edit.STRIP, WORDS)
    assert prompt[2].pieces == ("think", "four")


def test_rendering() -> None:
    assert chat(WORDS[:1]) == [{"role": "system", "content": "be kind"}]
    assert tokens(TOKENS[:2]) == [1, 5, 20, 21, 2, 1, 6, 30, 31, 32, 2, 1, 7]
    assert reply_of(False, "a  b", [1, 2]).text == "a  b", "the text comes back as it was"
    assert reply_of(True, "a  b", [1, 2]).pieces == (1, 2)


def test_a_history_of_tokens_extends_what_is_held() -> None:
    prompt = tokens(TOKENS[:2])
    kept = kept_after(HERE, prompt, [40, 41, 42])
    assert common_prefix(kept.tokens, tokens(TOKENS)) == len(kept.tokens) == len(prompt) + 2


def test_common_prefix_against_a_plain_count() -> None:
    source = random.Random(5)
    for _ in range(300):
        one = [source.randrange(2) for _ in range(source.randrange(8))]
        other = [source.randrange(2) for _ in range(source.randrange(8))]
        length = 0
        while length < min(len(one), len(other)) and one[length] == other[length]:
            length += 1
        assert common_prefix(one, other) == length


@pytest.mark.parametrize(
    ("prefix", "expected"), [(0, 0), (63, 0), (64, 64), (127, 64), (128, 128), (149, 128), (150, 150)]
)
def test_whole_chunks_or_all_that_is_held_is_pulled(prefix: int, expected: int) -> None:
    kept = Kept(HERE, tuple(range(150)))
    prompt = [*range(prefix), *[9999] * 100]
    assert pullable(kept, HERE, prompt, chunk=64, threshold=64) == expected


def test_what_is_below_the_threshold_is_not_pulled() -> None:
    kept = Kept(HERE, tuple(range(50)))
    assert pullable(kept, HERE, list(range(100)), chunk=64, threshold=64) == 0
    assert pullable(kept, HERE, list(range(100)), chunk=64, threshold=0) == 50


def test_other_circumstances_share_nothing() -> None:
    kept = Kept(HERE, tuple(range(150)))
    for other in (Circumstances("m", "salt"), Circumstances("n")):
        assert pullable(kept, other, list(range(200)), chunk=64, threshold=64) == 0
        assert cached([kept], other, list(range(200)), block=32) == 0


def test_the_holder_finds_whole_blocks_and_computes_one_token() -> None:
    short, long = Kept(HERE, tuple(range(70))), Kept(HERE, tuple(range(100)))
    assert cached([short, long], HERE, list(range(200)), block=32) == 96
    assert cached([short], HERE, list(range(200)), block=32) == 64
    assert cached([long], HERE, list(range(64)), block=32) == 32
    assert cached([], HERE, list(range(64)), block=32) == 0


def test_knowledge_is_by_model() -> None:
    knowledge = Knowledge()
    base, other = Kept(HERE, (1, 2)), Kept(dataclasses.replace(HERE, model="n"), (1, 2))
    knowledge.announced([base])
    knowledge.announced([other])
    assert knowledge.offered("m") == [base]
    knowledge.taken("m")
    assert knowledge.offered("m") == []
    assert knowledge.offered("n") == [other]
    assert knowledge.ever == [base, other]
