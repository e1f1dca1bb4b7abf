"""What vLLM says about an engine and a request: who it is, how it keeps KV, what that KV depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvplane.client.model import ConversationKey, EngineId, EngineProfile, EngineRole, EngineSpec
from kvplane.connector import compat
from kvplane.connector.config import ConfigError, ConnectorConfig
from kvplane.connector.described import describe_settings
from kvplane.connector.envelope import is_id, salted_id
from kvplane.connector.fingerprint import Context, Item, NamedTokens
from kvplane.connector.groups import CacheLayout, Group
from kvplane.connector.settings import digest, kv_settings

BIDIRECTIONAL = "bidirectional_kv_xfer"
_ROLES = {
    "kv_producer": EngineRole.PREFILL,
    "kv_consumer": EngineRole.DECODE,
    "kv_both": EngineRole.BOTH,
}


_REFUSED_KINDS = {
    "MambaSpec": "recurrent_model",
    "CircularBufferSpec": "recurrent_model",
    "CrossAttentionSpec": "cross_attention",
    "EncoderOnlyAttentionSpec": "cross_attention",
    "RSWASpec": "reference_window",  # a reply's KV is not what the same tokens in a prompt would have
}


def refuse_push(vllm_config: Any) -> None:
    """Refuse a configuration that asks for pushed KV, which nobody can read back.

    Raises:
        ConfigError: it does, by the connector's name or by a setting that only pushing has.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config or {}
    asked = [name for name in ("push_registration_timeout",) if name in extra]
    if str(extra.get("transfer_mode", "pull")) != "pull":
        asked.append("transfer_mode")
    if asked:
        raise ConfigError(
            f"kv_connector_extra_config: {asked[0]} asks to push KV, which cannot be read back: leave it out"
        )
    if "push" in str(transfer.kv_connector).lower():
        raise ConfigError(
            f"kv_connector: {transfer.kv_connector}: pushed KV cannot be read back; use KVPlaneConnector"
        )


def turn_on_bidirectional(vllm_config: Any) -> None:
    """Turn on vLLM's bidirectional transfer, which this connector is all about.

    Raises:
        ConfigError: it was turned off, or KV is to be pushed, or the connector's name keeps vLLM from setting
            up DCP.
    """
    refuse_push(vllm_config)
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if not extra.setdefault(BIDIRECTIONAL, True):
        raise ConfigError(
            f"kv_connector_extra_config: {BIDIRECTIONAL} is off; kvplane needs it on: leave it out"
        )
    dcp_size = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    if dcp_size > 1 and transfer.kv_connector != "NixlConnector":
        raise ConfigError(
            "kv_connector: with decode_context_parallel_size > 1 vLLM looks for the name NixlConnector; set"
            ' "kv_connector":"NixlConnector" and leave kv_connector_module_path as it is'
        )


def describe_engine(
    scheduler: Any, config: ConnectorConfig, total_blocks: int, layout: CacheLayout, context: Context
) -> EngineSpec:
    """Return the engine of a scheduler half of NIXL's connector as it registers with the control plane."""
    vllm_config, engine_id = scheduler.vllm_config, scheduler.engine_id
    side_channel = (getattr(scheduler, "side_channel_host", ""), getattr(scheduler, "side_channel_port", 0))
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    served = getattr(model, "served_model_name", None) or model.model
    names = [served] if isinstance(served, str) else list(served)
    rank = getattr(parallel, "data_parallel_index", None)
    return EngineSpec(
        engine_id=EngineId(engine_id),
        role=_ROLES[vllm_config.kv_transfer_config.kv_role],
        profile=EngineProfile(
            model=_model_name(model),
            model_revision=getattr(model, "revision", None) or "",
            kv_dtype=_kv_dtype(vllm_config),
            block_size=vllm_config.cache_config.block_size,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            decode_context_parallel_size=getattr(parallel, "decode_context_parallel_size", 1),
            engine_version=compat.vllm_version[:64],
        ),
        endpoint=config.endpoint,
        data_parallel_rank=int(rank if rank is not None else parallel.data_parallel_rank),
        total_blocks=total_blocks,
        served_models=tuple(names[:64]),
        settings=describe_settings(
            vllm_config, config, side_channel, refusal=layout.refusal, kv_digest=context.settings
        ),
    )


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """Return how the engine keeps KV, and why none of it can be reused if so."""
    parallel = vllm_config.parallel_config
    dcp_size = getattr(parallel, "decode_context_parallel_size", 1)
    # Under context parallelism a block of the scheduler's spans the ranks' blocks.
    ranks = dcp_size * getattr(parallel, "prefill_context_parallel_size", 1)
    groups, refusal = list[Group](), ""
    for group in compat.transfer_groups(kv_cache_config):
        spec = group.kv_cache_spec
        made, why = _group(spec, ranks if getattr(spec, "dcp_sharded", True) else 1)
        groups.append(made)
        refusal = refusal or why
    specs = [
        spec for group in kv_cache_config.kv_cache_groups for spec in compat.layer_specs(group.kv_cache_spec)
    ]
    if any(isinstance(spec, MambaSpec) for spec in specs):
        refusal = "recurrent_model"
    if parallel.pipeline_parallel_size > 1:
        # vLLM reads from a holder's first stage alone, and the holder counts readers by their TP rank alone:
        # it would free blocks under those of other stages.
        refusal = refusal or "pipeline_parallel"
    return CacheLayout(
        groups=tuple(groups),
        refusal=refusal,
        lookahead=getattr(vllm_config, "num_prefill_lookahead_tokens", 0),
        dcp_size=dcp_size,
    )


def bytes_per_block(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many bytes one block of the scheduler's takes, on all ranks together; 0 if not known."""
    tensors = getattr(kv_cache_config, "kv_cache_tensors", None) or ()
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return int(sum(tensor.size for tensor in tensors) // max(1, kv_cache_config.num_blocks) * ranks)


def _group(spec: Any, ranks: int) -> tuple[Group, str]:
    """Return a KV cache group, and why its KV cannot be reused ("" if it can)."""
    kinds = [_kind(layer) for layer in compat.layer_specs(spec)]
    window, chunk, refusal = kinds[0]
    refusal = next((why for _, _, why in kinds if why), "") or refusal
    if any((other[0], other[1]) != (window, chunk) for other in kinds):
        refusal = refusal or "unknown_kv_kind"
    return Group(spec.block_size * ranks, window, chunk), refusal


def _kind(spec: Any) -> tuple[int, int, str]:
    """Return a layer's sliding window and local attention chunk, 0 for none, and why not to reuse its KV.

    Anything not known here is not reused: what a block of it stands for is anybody's guess.
    """
    for kind in type(spec).__mro__:
        if kind.__name__ in _REFUSED_KINDS:
            return 0, 0, _REFUSED_KINDS[kind.__name__]
    if getattr(spec, "non_causal", False):
        return 0, 0, "non_causal_attention"  # KV of a prefix depends on what follows it
    if getattr(spec, "prefix_replay_tokens", 0):
        return 0, 0, "bounded_replay"
    if isinstance(spec, FullAttentionSpec):
        return 0, 0, ""
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window + getattr(spec, "extra_retained_tokens", 0), 0, ""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return 0, spec.attention_chunk_size, ""
    return 0, 0, "unknown_kv_kind"


def base_context(vllm_config: Any, kv_cache_config: Any, engine_id: str, weight_version: str = "") -> Context:
    """Return what all of the engine's KV depends on. `weight_version` is the caller's, "" if it gave none."""
    model = vllm_config.model_config
    revision = getattr(model, "revision", None) or ""
    return Context(
        _model_name(model),
        f"{revision}@{weight_version}" if weight_version else revision,
        _kv_dtype(vllm_config),
        settings=digest(kv_settings(vllm_config, kv_cache_config, engine_id)),
    )


def request_context(base: Context, request: Any) -> Context | None:
    """Return what a request's KV depends on, None if it cannot be named.

    Prompt embeddings, all of a prompt or part of one, have no token ids; an adapter loaded in place of
    another has its name and its path; pooling models need not attend as a decoder does.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    if getattr(request, "prompt_is_token_ids", None) is not None or request.pooling_params is not None:
        return None
    lora = request.lora_request
    if lora is not None and getattr(lora, "load_inplace", False):
        return None
    return replace(
        base,
        lora_name=lora.lora_name if lora is not None else "",
        lora_path=lora.lora_path if lora is not None else "",
        cache_salt=request.cache_salt or "",
    )


def request_tokens(request: Any, tokens: Sequence[int], count: int, kv_cache_config: Any) -> NamedTokens:
    """Return the first `count` of a request's tokens, with vLLM's hashes of its blocks as names if it may.

    vLLM has hashed every full block, with everything before it, for its prefix cache; those hashes say which
    tokens they stand for as surely as SHA-256 does, within this process. They are names for what is
    remembered here, and never leave it. Left aside where they are not exactly what is expected.
    """
    per_name = getattr(kv_cache_config, "hash_block_size", None) or 0
    names = getattr(request, "block_hashes", None) or ()
    sound = per_name > 0 and len(names) == request.num_tokens // per_name
    if not sound or not names or len(names[0]) != hashlib.sha256().digest_size:
        return NamedTokens(tokens, count, (), 1)
    return NamedTokens(tokens, count, names, per_name)


def request_items(request: Any) -> Sequence[Item]:
    """Return a request's multimodal items."""
    return [
        Item(str(feature.identifier), feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features or ()
    ]


def _model_name(model: Any) -> str:
    return PurePath(str(model.model)).name[:256] or str(model.model)[:256]


def _kv_dtype(vllm_config: Any) -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(vllm_config.model_config.dtype)
    return dtype.removeprefix("torch.")


def conversation_key(tenant_id: str, model: str, request: Any) -> ConversationKey | None:
    """Return whose turn a request is, with an empty conversation_id if it does not say; None if unusable.

    The id is `conversation_id` in its kv_transfer_params, else the `session_id` that vLLM's API takes; with a
    `cache_salt`, which tells users apart, it is an id of that salt's own (see `salted_id`). The engine does
    not know under which of its names the model was asked for.
    """
    ids = ((request.kv_transfer_params or {}).get("conversation_id"), getattr(request, "session_id", None))
    conversation_id = next((str(value) for value in ids if is_id(value)), "")
    if conversation_id and request.cache_salt:
        conversation_id = salted_id(conversation_id, request.cache_salt)
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    if not is_id(model) or (adapter and not is_id(adapter)):
        return None
    return ConversationKey(tenant_id, model, conversation_id, adapter)
