from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.connector.envelope import Outcome
from kvplane.connector.fingerprint import Context, make_chain
from kvplane.connector.groups import CacheLayout, Group
from kvplane.connector.pull import PullPlan, offers_blocks, plan_pull

CONTEXT = Context("m")
LAYOUT = CacheLayout((Group(16),))
CHUNK = 64


def offer(tokens: list[int], layout: CacheLayout = LAYOUT, **changes: Any) -> dict[str, Any]:
    """Return what a router gives a prefill engine for these held tokens."""
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(100, 100 + group.end(len(tokens)))) for group in layout.groups],
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
    layout, held = CacheLayout((Group(block_size),)), list(range(count))
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


HYBRID = CacheLayout((Group(16), Group(16, window=64)))


def test_several_groups_are_cut_each_in_its_way() -> None:
    held = list(range(1000))
    blocks = [list(range(1, 64)), list(range(200, 205))]  # the second group keeps a window
    params = offer(held, HYBRID, remote_block_ids=blocks)
    assert plan(params, [*held, 1], HYBRID) == PullPlan(1000, [blocks[0], blocks[1]])
    made = plan(params, [*held[:900], 1], HYBRID)
    assert made == PullPlan(0, [[], []], Outcome.MISMATCH, "blocks_gone")
    short = offer(held[:60], HYBRID)  # all of it is within the window
    assert plan(short, held[:60], HYBRID).tokens == 60
    assert plan(offer(held[:130], HYBRID), [*held[:70], 5], HYBRID) == PullPlan(
        64, [list(range(100, 104)), list(range(100, 104))]
    )


@pytest.mark.parametrize("blocks", [[[], []], [list(range(1, 64)), []], [list(range(1, 63)), [1]]])
def test_blocks_missing_of_one_group(blocks: list[list[int]]) -> None:
    held = list(range(1000))
    made = plan(offer(held, HYBRID, remote_block_ids=blocks), [*held, 1], HYBRID)
    assert (made.tokens, made.outcome) == (0, Outcome.MISMATCH)


def test_a_freed_block_in_the_middle_is_never_read() -> None:
    held = list(range(1000))
    for group in (0, 1):
        blocks = [list(range(1, 64)), list(range(200, 205))]
        blocks[group][2] = 0
        made = plan(offer(held, HYBRID, remote_block_ids=blocks), [*held, 1], HYBRID)
        assert made == PullPlan(0, [[], []], Outcome.MISMATCH, "blocks_gone")


@pytest.mark.parametrize("told", ["b", "", None, 7])
def test_an_engine_of_other_settings_is_told_apart_by_name(told: object) -> None:
    made = plan(
        offer(list(range(200)), kvplane_settings=told), list(range(300)), context=Context("m", settings="a")
    )
    assert made == PullPlan(0, [[]], Outcome.MISMATCH, "other_settings")


def test_engines_of_equal_settings() -> None:
    params = offer(list(range(200)), kvplane_settings="a")
    chain = make_chain(Context("m", settings="a"), list(range(200)), CHUNK)
    params["kvplane"]["fingerprint"]["chain"] = chain.hex()
    assert plan(params, list(range(300)), context=Context("m", settings="a")).tokens == 200


def test_a_layout_without_reuse_says_why() -> None:
    layout, held = CacheLayout((Group(16),), refusal="recurrent_model"), list(range(200))
    made = plan(offer(held, layout), [*held, 1], layout)
    assert made == PullPlan(0, [[]], Outcome.MISMATCH, "recurrent_model")


@pytest.mark.parametrize(
    ("changes", "reason"), [({"dcp_size": 2}, "dcp_size"), ({"pp_size": 2}, "pipeline_parallel")]
)
def test_ranks_that_cannot_be_read_from(changes: dict[str, Any], reason: str) -> None:
    made = plan(offer(list(range(200)), **changes), list(range(300)))
    assert made == PullPlan(0, [[]], Outcome.MISMATCH, reason)


def test_ranks_of_context_parallelism_that_are_equal() -> None:
    layout, held = CacheLayout((Group(32),), dcp_size=2), list(range(200))
    assert plan(offer(held, layout, dcp_size=2), [*held, 1], layout).tokens == 200
    assert plan(offer(held, layout, dcp_size=1), [*held, 1], layout).detail == "dcp_size"


def test_what_a_drafter_made_of_the_next_token_is_computed_again() -> None:
    layout, held = CacheLayout((Group(16),), lookahead=3), list(range(194))
    assert plan(offer(held, layout), [*held, 1], layout) == PullPlan(191, [list(range(100, 112))])
    assert plan(offer(held[:3], layout), held, layout).detail == "other_tokens"


def test_token_ids_beyond_int32_pull_nothing() -> None:
    assert plan(offer(list(range(200))), [2**40] * 300).outcome is Outcome.MISMATCH


def test_what_counts_as_an_offer() -> None:
    assert offers_blocks(offer([1]))
    assert not offers_blocks({"do_remote_decode": True, "remote_block_ids": None})
    assert not offers_blocks({"do_remote_prefill": True, "remote_block_ids": [[1]]})


@given(st.dictionaries(st.sampled_from(sorted(offer([1]))), st.none() | st.integers() | st.text(max_size=3)))
def test_garbage_is_never_an_error(changes: dict[str, Any]) -> None:
    plan(offer(list(range(200)), **changes), list(range(300)))


def test_params_without_blocks_pull_nothing() -> None:
    params = offer(list(range(100)))
    del params["remote_block_ids"]
    assert plan(params, list(range(100))).tokens == 0
