from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.connector.envelope import Outcome
from kvplane.connector.fingerprint import Context, make_chain
from kvplane.connector.pull import CacheLayout, PullPlan, offers_blocks, plan_pull

CONTEXT = Context("m")
LAYOUT = CacheLayout(block_size=16)
CHUNK = 64


def offer(tokens: list[int], layout: CacheLayout = LAYOUT, **changes: Any) -> dict[str, Any]:
    """Return what a router gives a prefill engine for these held tokens."""
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(100, 100 + layout.blocks_for(len(tokens))))] * layout.groups,
        "remote_engine_id": "d0",
        "remote_request_id": "r0",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "remote_num_tokens": len(tokens),
        "remote_blocks_expiry_time": 12345.5,
        "transfer_mode": "pull",
        "kvplane": {
            "fingerprint": {"chunk_tokens": CHUNK, "chain": make_chain(CONTEXT, tokens, CHUNK).hex()},
            "token_count": len(tokens),
        },
    }
    return {**params, **changes}


def plan(params: dict[str, Any], prompt: list[int], layout: CacheLayout = LAYOUT, **more: Any) -> PullPlan:
    return plan_pull(params, **{"layout": layout, "context": CONTEXT, "tokens": prompt, **more})


def test_a_continued_history_is_pulled_whole() -> None:
    held = list(range(1000))
    assert plan(offer(held), [*held, 1, 2]) == PullPlan(1000, [list(range(100, 163))])


def test_an_edit_cuts_tokens_and_blocks_together() -> None:
    held = list(range(1000))
    prompt = [*held[:700], 5, *held[701:], 1]
    assert plan(offer(held), prompt) == PullPlan(640, [list(range(100, 140))])


@given(st.integers(1, 500), st.integers(0, 600), st.sampled_from([16, 32, 48, 128]))
def test_blocks_are_always_those_of_the_tokens(count: int, place: int, block_size: int) -> None:
    layout, held = CacheLayout(block_size), list(range(count))
    prompt = [-1 if index == place else token for index, token in enumerate(held)]
    made = plan(offer(held, layout), [*prompt, 9], layout)
    assert made.block_ids is not None
    assert len(made.block_ids[0]) == layout.blocks_for(made.tokens)
    assert made.tokens <= count
    assert made.tokens <= place or place >= count
    assert made.block_ids[0] == list(range(100, 100 + len(made.block_ids[0])))


def test_another_prompt_pulls_nothing_and_has_the_holder_told() -> None:
    made = plan(offer(list(range(200))), [7] * 300)
    assert made == PullPlan(0, [[]], Outcome.MISMATCH, "other_tokens")
    assert made.block_ids  # truthy for vLLM: it notifies where there are blocks and no tokens to pull


def test_a_prompt_shorter_than_what_is_held() -> None:
    held = list(range(1000))
    assert plan(offer(held), held[:130]).tokens == 128


@pytest.mark.parametrize(
    "body", [None, {}, "x", {"fingerprint": {"chunk_tokens": 64, "chain": "q"}, "token_count": 200}]
)
def test_without_a_fingerprint_nothing_is_pulled(body: object) -> None:
    made = plan(offer(list(range(200)), kvplane=body), list(range(300)))
    assert made == PullPlan(0, [[]], Outcome.NO_FINGERPRINT, "no_fingerprint")


def test_prompt_embeddings_are_never_reused() -> None:
    made = plan(offer(list(range(200))), list(range(300)), context=None)
    assert (made.tokens, made.outcome) == (0, Outcome.NO_FINGERPRINT)


def test_other_circumstances_are_a_mismatch() -> None:
    made = plan(offer(list(range(200))), list(range(300)), context=Context("m", cache_salt="other"))
    assert (made.tokens, made.outcome) == (0, Outcome.MISMATCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_engine_id": None},
        {"remote_request_id": ""},
        {"remote_host": 5},
        {"remote_port": "5601"},
        {"remote_port": 0},
        {"tp_size": 0},
        {"pp_size": "1"},
        {"remote_blocks_expiry_time": "soon"},
    ],
)
def test_a_holder_that_cannot_be_addressed_is_left_alone(changes: dict[str, Any]) -> None:
    made = plan(offer(list(range(200)), **changes), list(range(300)))
    assert made == PullPlan(0, None, Outcome.NO_FINGERPRINT, "malformed_params")


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_num_tokens": 199},
        {"remote_num_tokens": None},
        {"remote_block_ids": [[1, 2]]},
        {"remote_block_ids": [list(range(14))]},
        {"remote_block_ids": [list(range(13)), list(range(13))]},
        {"remote_block_ids": [["1"] * 13]},
        {"remote_block_ids": [[-1] * 13]},
        {"remote_block_ids": [[1.0] * 13]},
        {"remote_block_ids": [None]},
        {"remote_block_ids": "blocks"},
        {"remote_block_ids": {"0": []}},
    ],
)
def test_blocks_that_do_not_fit_the_tokens_are_not_pulled(changes: dict[str, Any]) -> None:
    made = plan(offer(list(range(200)), **changes), list(range(300)))
    assert made == PullPlan(0, [[]], Outcome.MISMATCH, "block_layout")


def test_pushed_blocks_cannot_be_read_back() -> None:
    made = plan(offer(list(range(200)), transfer_mode="push"), list(range(300)))
    assert made == PullPlan(0, None, Outcome.MISMATCH, "transfer_mode")


def test_too_late_leaves_the_holder_alone() -> None:
    made = plan(offer(list(range(200))), list(range(300)), too_late=True)
    assert made == PullPlan(0, None, Outcome.COLD, "queued_too_long")


def test_several_groups_all_or_nothing() -> None:
    layout, held = CacheLayout(16, groups=2, cuttable=False), list(range(1000))
    blocks = [list(range(63)), list(range(200, 205))]  # the second group keeps a window
    params = offer(held, layout, remote_block_ids=blocks)
    assert plan(params, [*held, 1], layout) == PullPlan(1000, blocks)
    made = plan(params, [*held[:900], 1], layout)
    assert made == PullPlan(0, [[], []], Outcome.MISMATCH, "partial_match_of_several_groups")
    assert plan({**params, "remote_block_ids": [[], []]}, [*held, 1], layout).detail == "block_layout"


def test_recurrent_state_is_never_reused() -> None:
    layout, held = CacheLayout(16, recurrent=True), list(range(200))
    assert plan(offer(held, layout), [*held, 1], layout).detail == "recurrent_model"


def test_token_ids_beyond_int32_pull_nothing() -> None:
    assert plan(offer(list(range(200))), [2**40] * 300).outcome is Outcome.MISMATCH


def test_what_counts_as_an_offer() -> None:
    assert offers_blocks(offer([1]))
    assert not offers_blocks({"do_remote_decode": True, "remote_block_ids": None})
    assert not offers_blocks({"do_remote_prefill": True, "remote_block_ids": [[1]]})


@given(st.dictionaries(st.sampled_from(sorted(offer([1]))), st.none() | st.integers() | st.text(max_size=3)))
def test_garbage_is_never_an_error(changes: dict[str, Any]) -> None:
    plan(offer(list(range(200)), **changes), list(range(300)))
