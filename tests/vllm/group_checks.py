"""Checks of what is cut per KV cache group, against vLLM's own block managers and NIXL's pairing of blocks.

A decode engine's manager runs a turn, a prefill engine's manager makes room for a prefix of it; NIXL's worker
pairs the blocks of both. Each pair must be the same place of the sequence.
"""

from __future__ import annotations

import json
import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request, RequestStatus

from kvplane.connector import compat
from kvplane.connector import scheduler as under_test
from kvplane.connector.engine import cache_layout, request_context, request_tokens
from kvplane.connector.fingerprint import make_chain
from tests.vllm.runner import run
from tests.vllm.scheduler_checks import Recorder, config

BLOCK = 16
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
ENVELOPE = {"tenant_id": "t", "model": "m", "conversation_id": "c", "turn": 1}

init_none_hash(sha256)


def full(block: int = BLOCK, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **HEADS, **more)


def sliding(window: int, block: int = BLOCK, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=window, dcp_sharded=False, **HEADS, **more)


def local(chunk: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=chunk, **HEADS)


LAYOUTS: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "full, window computed only": [full(sliding_window=40)],
    "mla": [MLAAttentionSpec(block_size=BLOCK, **HEADS)],
    "window": [sliding(40)],
    "window of whole blocks": [sliding(64)],
    "hybrid": [full(), sliding(40)],
    "hybrid, two windows": [full(), sliding(33), sliding(100)],
    "hybrid, kept beyond the window": [full(), sliding(40, extra_retained_tokens=2)],
    "hybrid of block sizes": [full(), sliding(70, 32)],
    "local": [full(), local(64)],
    "local alone": [local(160)],
}


def layout_of(specs: list[KVCacheSpec], blocks: int = 400) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Side:
    """An engine's scheduler side: vLLM's block manager and the connector."""

    def __init__(self, role: str, specs: list[KVCacheSpec], rng: random.Random, chunk: int = 64) -> None:
        self.rng = rng
        self.layout = layout_of(specs)
        sizes = [spec.block_size for spec in specs]
        self.layout.hash_block_size = math.gcd(*sizes)
        self.manager = KVCacheManager(
            self.layout,
            max_model_len=4096,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            max_in_flight_tokens=256,
        )
        self.hasher = get_request_block_hasher(math.gcd(*sizes), sha256)
        settings = config(role)
        settings.scheduler_config.disable_hybrid_kv_cache_manager = False
        settings.kv_transfer_config.kv_connector_extra_config["kvplane_chunk_tokens"] = chunk
        under_test.EngineSessionThread = Recorder  # type: ignore[attr-defined, assignment]  # replaced, here only
        self.connector: Any = under_test.KVPlaneConnectorScheduler(settings, f"{role}_dp0", self.layout)
        self.connector.bind_gpu_block_pool(
            SimpleNamespace(num_gpu_blocks=401, get_num_free_blocks=lambda: 300)
        )
        for name in range(rng.randrange(4)):  # so that block ids are in no order
            self.free(self.run([rng.randrange(9) for _ in range(rng.randrange(1, 200))], 1, f"warm{name}"))

    def request(self, tokens: list[int], name: str, params: dict[str, Any] | None = None) -> Request:
        sampling = SamplingParams(max_tokens=999, extra_args={"kv_transfer_params": params})
        return Request(name, list(tokens), sampling, None, block_hasher=self.hasher)

    def run(self, prompt: list[int], reply: int, name: str, params: dict[str, Any] | None = None) -> Request:
        """Run a whole turn: prefill in pieces, then one token at a time."""
        made = self.request(prompt, name, params)
        self.connector.on_new_request(made)
        blocks, known, _ = self.manager.get_computed_blocks(made)
        at = known
        while at < len(prompt):
            step = min(len(prompt) - at, self.rng.randrange(1, 100))
            first = (known, blocks) if at == known else (0, None)
            assert self.manager.allocate_slots(made, step, *first) is not None
            at += step
            made.num_computed_tokens = at
        for _ in range(reply - 1):
            made.append_output_token_ids(self.rng.randrange(1000))
            assert self.manager.allocate_slots(made, 1) is not None
            made.num_computed_tokens += 1
        made.append_output_token_ids(self.rng.randrange(1000))
        return made

    def free(self, made: Request) -> None:
        self.manager.free(made)

    def blocks(self, made: Request) -> tuple[list[int], ...]:
        blocks: tuple[list[int], ...] = self.manager.get_block_ids(made.request_id)
        return blocks


def retain(side: Side, made: Request, in_flight: int) -> tuple[dict[str, Any], list[int]] | None:
    """Finish a turn as vLLM does; returns what P is told and the tokens that stand for it."""
    made.status = RequestStatus.FINISHED_STOPPED
    for _ in range(in_flight):  # steps that run beyond the end
        assert side.manager.allocate_slots(made, 1) is not None
        made.num_computed_tokens += 1
        made.num_in_flight_tokens += 1
    settled = made.num_computed_tokens - in_flight
    side.manager.remove_skipped_blocks(made.request_id, settled, made.num_prompt_tokens)
    ids = side.manager.get_block_ids_for_computed_tokens(made.request_id, made.num_computed_tokens)
    delay, _ = side.connector.request_finished(made, ids)
    if not delay:
        return None
    sent = side.connector._session.announced[-1]
    assert sent.token_count == settled
    params = {
        **json.loads(sent.kv_transfer_params),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "kvplane": {
            "fingerprint": {
                "chunk_tokens": sent.fingerprint.chunk_tokens,
                "chain": sent.fingerprint.chain.hex(),
            },
            "token_count": sent.token_count,
        },
    }
    return params, list(made.all_token_ids[:settled])


def pull(p: Side, prompt: list[int], params: dict[str, Any]) -> tuple[int, list[tuple[int, int, int]]]:
    """Admit a prompt on P as vLLM does; returns the tokens pulled, and (group, place, remote block) read."""
    made = p.request(prompt, "turn", params)
    p.connector.on_new_request(made)
    cached, known, _, _ = p.manager.get_computed_blocks_for_connector(made)
    pulled, later = p.connector.get_num_new_matched_tokens(made, known)
    if not pulled:
        return 0, []
    assert later
    assert p.manager.allocate_slots(made, 0, known, cached, 0, pulled, delay_cache_blocks=True) is not None
    p.connector.update_state_after_alloc(made, p.manager.get_blocks(made.request_id), pulled)
    meta = p.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})).reqs_to_recv["turn"]
    mine, theirs = NixlBaseConnectorWorker._apply_prefix_caching(
        SimpleNamespace(_has_mamba=False), meta.local_block_ids, meta.remote.block_ids, 1, 1
    )
    read = []
    for group, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        places = p.blocks(made)[group]
        read += [(group, places.index(a), b) for a, b in zip(here, there, strict=True)]
        # Everything not in P's own cache, and still attended to, is read.
        wanted = [b.block_id for b in p.manager.get_blocks(made.request_id).blocks[group]]
        hashed = {b.block_id for b in p.manager.get_blocks(made.request_id).blocks[group] if b.block_hash}
        missing = [index for index, b in enumerate(wanted) if b and b not in hashed]
        assert [place for of, place, _ in read if of == group] == missing
    return known + pulled, read


def trial(specs: list[KVCacheSpec], seed: int) -> str:
    rng = random.Random(seed)
    chunk = rng.choice([64, 16, 48, 100])  # of D's; P's own is another
    d, p = Side("kv_consumer", specs, rng, chunk), Side("kv_producer", specs, rng, 32)
    prompt = [rng.randrange(1000) for _ in range(rng.randrange(120, 500))]
    turn = d.run(prompt, rng.randrange(1, 120), "r", {"kvplane": ENVELOPE})
    d.connector.update_state_after_alloc(turn, None, 0)
    kept = retain(d, turn, rng.choice([0, 0, 1]))
    if kept is None:
        return "not retained"
    params, held = kept
    if rng.random() < 0.5:  # P has some of it in its own cache
        p.free(p.run(held[: rng.randrange(1, len(held))], 1, "before"))
    same = rng.choice([len(held), len(held), rng.randrange(chunk, len(held))])
    following = [*held[:same], *(1000 + rng.randrange(9) for _ in range(rng.randrange(1, 90)))]
    tokens, read = pull(p, following, params)
    places = d.blocks(turn)
    for group, place, block in read:
        assert block, "a freed block was read"
        assert places[group][place] == block, "a block of another place was read"
    assert tokens == 0 or tokens == (len(held) if same == len(held) else same // chunk * chunk)
    if tokens:
        return "whole" if same == len(held) else "cut"
    plan = p.connector._ledger.plan("turn")
    return "local" if plan.outcome is None else plan.detail


def check_every_block_read_is_of_the_place_it_is_read_into() -> None:
    for name, specs in LAYOUTS.items():
        outcomes = [trial(specs, seed) for seed in range(24)]
        assert "whole" in outcomes, f"{name}: nothing was reused"
        assert set(outcomes) <= {"whole", "cut", "local", "blocks_gone"}, f"{name}: {set(outcomes)}"
        if all(isinstance(spec, FullAttentionSpec) for spec in specs):
            assert "cut" in outcomes
            assert "blocks_gone" not in outcomes, name
        elif "local" not in name:
            assert "blocks_gone" in outcomes, f"{name}: windows are freed, and yet every prefix was there"


def check_a_window_that_holds_the_whole_turn_is_cut() -> None:
    assert "cut" in [trial([full(), sliding(2000)], seed) for seed in range(30)]


def settings_of(specs: list[KVCacheSpec], **parallel: int) -> Any:
    settings = config("kv_consumer")
    for name, value in parallel.items():
        setattr(settings.parallel_config, name, value)
    return cache_layout(settings, layout_of(specs))


def check_what_is_not_reused_says_why() -> None:
    mamba = MambaSpec(
        block_size=BLOCK,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )
    mixed = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": full(), "b": sliding(40)})
    for specs, reason in (
        ([mamba], "recurrent_model"),
        ([full(), mamba], "recurrent_model"),
        ([full(), CrossAttentionSpec(block_size=BLOCK, **HEADS)], "cross_attention"),
        ([RSWASpec(block_size=BLOCK, rswa_window=64, **HEADS)], "reference_window"),
        ([full(non_causal=True)], "non_causal_attention"),
        ([KVCacheSpec(block_size=BLOCK)], "unknown_kv_kind"),
        ([mixed], "unknown_kv_kind"),
    ):
        assert settings_of(specs).refusal == reason, (reason, settings_of(specs))
    assert settings_of([full()], pipeline_parallel_size=2).refusal == "pipeline_parallel"
    assert settings_of([full(), sliding(40), local(64)]).refusal == ""


def check_a_block_spans_the_ranks_of_context_parallelism() -> None:
    made = settings_of([full(), sliding(40)], decode_context_parallel_size=4)
    assert [group.block_size for group in made.groups] == [64, 16]
    assert made.dcp_size == 4


def check_a_recurrent_model_retains_nothing_and_counts_it() -> None:
    d = Side("kv_consumer", [full()], random.Random(0))
    d.connector._layout = settings_of([full(non_causal=True)])
    d.connector._retains = False
    turn = d.run(list(range(100)), 5, "r", {"kvplane": ENVELOPE})
    assert retain(d, turn, 0) is None
    assert d.connector._keeper.counts["not_retained:non_causal_attention"] == 1


def check_the_next_turn_is_hashed_for_what_is_new() -> None:
    rng = random.Random(3)
    d, p = Side("kv_consumer", [full()], rng), Side("kv_producer", [full()], rng)
    history = [rng.randrange(1000) for _ in range(2100)]
    turn = d.run(history, 4, "r", {"kvplane": ENVELOPE})
    d.connector.update_state_after_alloc(turn, None, 0)
    kept = retain(d, turn, 0)
    assert kept is not None
    assert d.connector._chains.hashed_tokens == len(kept[1]) == 2103
    assert kept[0]["kvplane"]["fingerprint"]["chain"] == make_chain(p.connector._context, kept[1], 64).hex()
    made = p.request([*kept[1], 1, 2], "turn", kept[0])
    for _ in range(5):  # asked again and again while it waits, and after a preemption
        assert p.connector.get_num_new_matched_tokens(made, 0) == (2103, True)
    assert p.connector._chains.hashed_tokens == 2103
    following = d.run([*kept[1], *range(50)], 3, "r2", {"kvplane": ENVELOPE})
    d.connector.update_state_after_alloc(following, None, 0)
    assert retain(d, following, 0) is not None
    assert d.connector._chains.known_tokens == 2048
    assert d.connector._chains.hashed_tokens == 2103 + (2103 - 2048) + 50 + 2


def check_vllms_hashes_are_names_only_where_they_fit() -> None:
    side = Side("kv_consumer", [full()], random.Random(0))
    made = side.request(list(range(2000)), "r")
    named = request_tokens(made, made.all_token_ids, 1990, side.layout)
    assert (len(named), list(named), named[-1]) == (1990, list(range(1990)), 1989)
    assert named.name(1024) == made.block_hashes[63]
    assert not named.name(1025)
    assert not named.name(0)
    plain = Request("r", list(range(2000)), SamplingParams(), None)
    short = side.request(list(range(9)), "r")
    for of, layout in (
        (plain, side.layout),  # no prefix cache
        (short, side.layout),
        (made, layout_of([full()])),  # vLLM does not say how many tokens a hash is for
    ):
        assert not request_tokens(of, of.all_token_ids, of.num_tokens, layout).name(16)
    made.block_hashes = [b"x" * 16 for _ in made.block_hashes]  # not SHA-256
    assert not request_tokens(made, made.all_token_ids, 2000, side.layout).name(1024)
    del made.block_hashes[0]
    assert not request_tokens(made, made.all_token_ids, 2000, side.layout).name(1024)


def check_the_same_tokens_under_another_salt_are_hashed_again() -> None:
    side = Side("kv_consumer", [full()], random.Random(0))
    chains = set()
    for salt in (None, "a", "b", "a"):
        made = Request(
            "r", list(range(2048)), SamplingParams(), None, cache_salt=salt, block_hasher=side.hasher
        )
        context = request_context(side.connector._context, made)
        assert context is not None
        tokens = request_tokens(made, made.all_token_ids, 2048, side.layout)
        chain = make_chain(context, tokens, 64, hasher=side.connector._chains)
        assert chain == make_chain(context, list(range(2048)), 64)
        chains.add(chain)
    assert len(chains) == 3
    assert side.connector._chains.hashed_tokens == 3 * 2048


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
