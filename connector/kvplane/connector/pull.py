"""What a prefill engine makes of "D holds this prompt's KV": pull the equal prefix, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.connector.envelope import Outcome, read_promise
from kvplane.connector.fingerprint import Context, Item, matching_tokens


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How this engine keeps KV.

    Attributes:
        block_size: tokens per block.
        groups: number of KV cache groups that take part in a transfer.
        cuttable: one full-attention group, where the blocks of a prefix are a prefix of the blocks.
        recurrent: some layer's state stands for a whole sequence (mamba) and cannot be reused at all.
    """

    block_size: int
    groups: int = 1
    cuttable: bool = True
    recurrent: bool = False

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What to do about a prefill request that comes with a location.

    Attributes:
        tokens: length of the prefix to ask the holder for; 0 means pull nothing.
        block_ids: the holder's blocks for it, per group. Never empty as a whole: with no tokens there are
            empty groups, which vLLM answers by telling the holder that it may free. None: leave the holder
            alone; it cannot be told, or its blocks are not to be touched.
        outcome: why there is nothing to pull; None if there is something.
        detail: for the counter of reasons.
    """

    tokens: int
    block_ids: list[list[int]] | None
    outcome: Outcome | None = None
    detail: str = ""


def offers_blocks(params: Mapping[str, Any]) -> bool:
    """Whether a prefill request comes with blocks to pull, well-formed or not."""
    return bool(params.get("do_remote_decode")) and bool(params.get("remote_block_ids"))


def plan_pull(
    params: Mapping[str, Any],
    *,
    layout: CacheLayout,
    context: Context | None,
    tokens: Sequence[int],
    items: Sequence[Item] = (),
    too_late: bool = False,
) -> PullPlan:
    """Decide what to pull for a prompt. Pure; O(equal prefix).

    Args:
        params: the request's kv_transfer_params; nothing in them is trusted.
        layout: of this engine.
        context: of this request; None if its KV cannot be named (prompt embeddings).
        tokens: the prompt.
        items: the prompt's multimodal items.
        too_late: the claim may be over before a read would begin.
    """
    if not _addressable(params):
        return PullPlan(0, None, Outcome.NO_FINGERPRINT, "malformed_params")
    if too_late:
        return PullPlan(0, None, Outcome.COLD, "queued_too_long")
    blocks, count = params["remote_block_ids"], params.get("remote_num_tokens")
    nothing: list[list[int]] = [[] for _ in range(layout.groups)]
    promise = read_promise(params)
    if promise is None or context is None:
        return PullPlan(0, nothing, Outcome.NO_FINGERPRINT, "no_fingerprint")
    if params.get("transfer_mode", "pull") != "pull":
        return PullPlan(0, None, Outcome.MISMATCH, "transfer_mode")
    if promise.token_count != count or not _fits(blocks, promise.token_count, layout):
        return PullPlan(0, nothing, Outcome.MISMATCH, "block_layout")
    if layout.recurrent:
        return PullPlan(0, nothing, Outcome.MISMATCH, "recurrent_model")
    fingerprint = promise.fingerprint
    try:
        equal = matching_tokens(
            fingerprint.chain, promise.token_count, fingerprint.chunk_tokens, context, tokens, items
        )
    except OverflowError:
        equal = 0
    if equal == 0:
        return PullPlan(0, nothing, Outcome.MISMATCH, "other_tokens")
    if layout.cuttable:
        keep = layout.blocks_for(equal)
        return PullPlan(equal, [list(group[:keep]) for group in blocks])
    if equal < promise.token_count:
        return PullPlan(0, nothing, Outcome.MISMATCH, "partial_match_of_several_groups")
    return PullPlan(equal, [list(group) for group in blocks])


def _addressable(params: Mapping[str, Any]) -> bool:
    """Whether the holder can be reached and told: what vLLM's worker takes from the params unseen."""
    names = ("remote_engine_id", "remote_request_id", "remote_host")
    if not all(isinstance(params.get(name), str) and params[name] for name in names):
        return False
    if not _is_int(params.get("remote_port"), 1, 65535):
        return False
    sizes = ("tp_size", "dcp_size", "pp_size")
    if not all(_is_int(params.get(name, 1), 1, 1 << 16) for name in sizes):
        return False
    expiry = params.get("remote_blocks_expiry_time")
    return expiry is None or (isinstance(expiry, int | float) and not isinstance(expiry, bool))


def _fits(blocks: Any, token_count: int, layout: CacheLayout) -> bool:
    """Whether the block ids are what `token_count` tokens need. vLLM lines both sides up from the end."""
    if not isinstance(blocks, list | tuple) or len(blocks) != layout.groups:
        return False
    most = layout.blocks_for(token_count)
    for group in blocks:
        if not isinstance(group, list | tuple) or not all(_is_int(block, 0, 1 << 40) for block in group):
            return False
        if len(group) > most or (layout.cuttable and len(group) != most):
            return False
    return any(len(group) for group in blocks)


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
