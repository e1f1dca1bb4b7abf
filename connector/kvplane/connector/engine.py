"""What vLLM says about an engine and a request: who it is, how it keeps KV, what that KV depends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvplane.client.model import EngineId, EngineProfile, EngineRole, EngineSpec
from kvplane.connector import compat
from kvplane.connector.config import ConfigError, ConnectorConfig
from kvplane.connector.fingerprint import Context, Item
from kvplane.connector.pull import CacheLayout

BIDIRECTIONAL = "bidirectional_kv_xfer"
_ROLES = {
    "kv_producer": EngineRole.PREFILL,
    "kv_consumer": EngineRole.DECODE,
    "kv_both": EngineRole.BOTH,
}


def turn_on_bidirectional(vllm_config: Any) -> None:
    """Turn on vLLM's bidirectional transfer, which this connector is all about.

    Raises:
        ConfigError: it was turned off, or the connector's name keeps vLLM from setting up DCP.
    """
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
    vllm_config: Any, engine_id: str, config: ConnectorConfig, total_blocks: int
) -> EngineSpec:
    """Return the engine as it registers with the control plane."""
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
    )


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """Return how the engine keeps KV."""
    groups = compat.transfer_groups(kv_cache_config)
    specs = [group.kv_cache_spec for group in groups]
    parallel = vllm_config.parallel_config
    # Under context parallelism a block of the scheduler's spans the ranks' blocks.
    ranks = getattr(parallel, "decode_context_parallel_size", 1) * getattr(
        parallel, "prefill_context_parallel_size", 1
    )
    cuttable = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)
    block_size = specs[0].block_size if cuttable else vllm_config.cache_config.block_size
    all_specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return CacheLayout(
        block_size=block_size * ranks,
        groups=len(specs),
        cuttable=cuttable,
        recurrent=any(isinstance(spec, MambaSpec) for spec in all_specs)
        or bool(getattr(kv_cache_config, "has_mamba_layers", False)),
    )


def base_context(vllm_config: Any) -> Context:
    """Return what all of the engine's KV depends on."""
    model = vllm_config.model_config
    return Context(_model_name(model), getattr(model, "revision", None) or "", _kv_dtype(vllm_config))


def request_context(base: Context, request: Any) -> Context | None:
    """Return what a request's KV depends on, None if tokens do not say it (prompt embeddings)."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    lora = request.lora_request
    return Context(
        base.model,
        base.model_revision,
        base.kv_dtype,
        lora.lora_name if lora is not None else "",
        lora.lora_path if lora is not None else "",
        request.cache_salt or "",
    )


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
