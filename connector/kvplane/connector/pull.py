"""What a prefill engine makes of "D holds this prompt's KV": pull the equal prefix, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.connector.envelope import SETTINGS, Outcome, read_promise
from kvplane.connector.fingerprint import Context, Hasher, Item, hash_segment, matching_tokens
from kvplane.connector.groups import CacheLayout


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
    hasher: Hasher = hash_segment,
) -> PullPlan:
    """Decide what to pull for a prompt. O(equal prefix), less what `hasher` remembers.

    Args:
        params: the request's kv_transfer_params; nothing in them is trusted.
        layout: of this engine.
        context: of this request; None if its KV cannot be named (prompt embeddings).
        tokens: the prompt.
        items: the prompt's multimodal items.
        too_late: the claim may be over before a read would begin.
        hasher: for the prompt's tokens.
    """
    if not _addressable(params):
        return PullPlan(0, None, Outcome.NO_FINGERPRINT, "malformed_params")
    if too_late:
        return PullPlan(0, None, Outcome.COLD, "queued_too_long")
    blocks, count = params.get("remote_block_ids") or [], params.get("remote_num_tokens")
    nothing: list[list[int]] = [[] for _ in layout.groups]
    promise = read_promise(params)
    if promise is None or context is None:
        return PullPlan(0, nothing, Outcome.NO_FINGERPRINT, "no_fingerprint")
    if params.get("transfer_mode", "pull") != "pull":
        return PullPlan(0, None, Outcome.MISMATCH, "transfer_mode")
    if layout.refusal:
        return PullPlan(0, nothing, Outcome.MISMATCH, layout.refusal)
    if params.get(SETTINGS, context.settings) != context.settings:  # in the fingerprint too; this has a name
        return PullPlan(0, nothing, Outcome.MISMATCH, "other_settings")
    if params.get("dcp_size", 1) != layout.dcp_size:
        return PullPlan(0, nothing, Outcome.MISMATCH, "dcp_size")
    if params.get("pp_size", 1) != 1:
        return PullPlan(0, nothing, Outcome.MISMATCH, "pipeline_parallel")
    if promise.token_count != count or not layout.fits(blocks, promise.token_count):
        return PullPlan(0, nothing, Outcome.MISMATCH, "block_layout")
    fingerprint = promise.fingerprint
    try:
        equal = matching_tokens(
            fingerprint.chain, promise.token_count, fingerprint.chunk_tokens, context, tokens, items, hasher
        )
    except OverflowError:
        equal = 0
    usable = equal - layout.lookahead
    if usable <= 0:
        return PullPlan(0, nothing, Outcome.MISMATCH, "other_tokens")
    needed = layout.cut(blocks, promise.token_count, usable)
    if needed is None:
        return PullPlan(0, nothing, Outcome.MISMATCH, "blocks_gone")
    return PullPlan(usable, needed)


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


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
