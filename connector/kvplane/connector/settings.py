"""What of an engine's settings its KV depends on, besides the model's name and its revision.

Two engines may serve one model and yet compute other numbers, or keep other things in their blocks: quantised
another way, other RoPE scaling, another draft model. All of that goes into a fingerprint's seed, so that such
engines have nothing to reuse from each other, instead of something wrong.

Left out on purpose is how the bytes lie in memory: block size, order of heads and tokens within a block, TP
and PP shards, padding. NIXL translates it or refuses the peer when it first meets it, and block size and
ranks are in the engine's profile; the KV as such is the same. Left out as well is what only rounds
differently: attention backend, compilation, batching.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

from kvplane.connector import compat

_SPEC_FIELDS = (
    "head_size",
    "head_size_v",
    "dtype",
    "kv_quant_mode",
    "sliding_window",
    "attention_chunk_size",
    "tokens_per_state",
    "sink_len",
    "cache_dtype_str",
    "model_version",
)
"""What of a KV cache spec says what is kept of a token. Heads are sharded, so their number is the model's."""

_NOT_NUMBERS = frozenset(
    {"transformers_version", "torch_dtype", "dtype", "architectures", "id2label", "label2id"}
)
"""Members of a model's configuration that say nothing of its numbers, or are told apart elsewhere."""

_STATELESS_METHODS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Ways of speculative decoding that keep nothing in KV blocks."""

_PLAIN_DEPTH = 12


def kv_settings(vllm_config: Any, kv_cache_config: Any, engine_id: str) -> dict[str, Any]:
    """Return everything of an engine's settings that its KV depends on, as plain JSON values.

    Calibrated scales (`calculate_kv_scales`, before vLLM 0.32) are an engine's own: it alone can read its KV.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    own_scales = bool(getattr(cache, "calculate_kv_scales", False))
    return {
        "vllm": compat.vllm_version if _enforces_versions(vllm_config) else "",
        "dtype": plain(getattr(model, "dtype", None)),
        "weights": {
            "code_revision": plain(getattr(model, "code_revision", None)),
            "quantization": plain(getattr(model, "quantization", None)),
            "quantization_config": plain(getattr(model, "quantization_config", None)),
        },
        "model": _numbers(getattr(model, "hf_config", None)),
        "model_overrides": plain(getattr(model, "model_class_overrides", None) or {}),
        "sliding_window_off": bool(getattr(model, "disable_sliding_window", False)),
        "unquantized_layers": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())),
        "scales_of": engine_id if own_scales else "",
        "groups": [_kinds(group) for group in compat.transfer_groups(kv_cache_config)],
        "draft": _draft(vllm_config),
        "multimodal": _multimodal(getattr(model, "multimodal_config", None)),
        "lora_dtype": _lora_dtype(vllm_config),
    }


def digest(settings: Mapping[str, Any]) -> str:
    """Return settings as 32 hexadecimal digits, the same in every process."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON can say it, the same in every process.

    What is not data, such as a function, is represented by its name: never by an address.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if depth > _PLAIN_DEPTH:
        return type(value).__qualname__
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(member, depth + 1) for key, member in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(member, depth + 1) for member in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(member, depth + 1) for member in value]
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        return _data(value.to_dict(), depth)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth + 1) for field in fields(value)}
    if type(value).__module__ == "torch":  # a dtype
        return str(value).removeprefix("torch.")
    return getattr(value, "__qualname__", type(value).__qualname__)


def _numbers(hf_config: Any) -> Any:
    """Return a model's configuration as loaded: overrides (RoPE scaling and the like) are already in it."""
    return plain(hf_config) if hf_config is not None else None


def _data(members: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return a configuration without what is private (where it was loaded from) or no number."""
    return {
        str(name): plain(member, depth + 1)
        for name, member in members.items()
        if not str(name).startswith("_") and name not in _NOT_NUMBERS
    }


def _kinds(group: Any) -> list[Any]:
    """Return what a KV cache group keeps of a token: its kinds of layers, however many there are of each."""
    kinds = (
        [type(spec).__name__, *(plain(getattr(spec, name, None)) for name in _SPEC_FIELDS)]
        for spec in compat.layer_specs(group.kv_cache_spec)
    )
    return sorted(_distinct(kinds), key=repr)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def _draft(vllm_config: Any) -> Any:
    """Return whose state besides the model's is in the blocks: a draft model's; None if nobody's."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or speculative.method in _STATELESS_METHODS:
        return None
    kv_dtype = getattr(speculative, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype
    return {
        "method": plain(speculative.method),
        "model": PurePath(str(draft.model)).name,
        "revision": plain(getattr(draft, "revision", None)),
        "code_revision": plain(getattr(draft, "code_revision", None)),
        "quantization": plain(getattr(draft, "quantization", None)),
        "parallel_drafting": bool(getattr(speculative, "parallel_drafting", False)),
        "kv_dtype": plain(kv_dtype),
        "numbers": _numbers(getattr(draft, "hf_config", None)),
        "lookahead": getattr(vllm_config, "num_prefill_lookahead_tokens", 0),
    }


def _multimodal(config: Any) -> Any:
    """Return how items are made into what the model sees, where their hashes do not say it."""
    if config is None:
        return None
    names = (
        "language_model_only",
        "mm_processor_kwargs",
        "mm_encoder_attn_dtype",
        "video_pruning_rate",
        "video_pruning_method",
        "mm_device_do_normalize",
    )
    return {name: plain(getattr(config, name, None)) for name in names}


def _lora_dtype(vllm_config: Any) -> Any:
    """Return the precision adapters run in; None if it is the model's, or there are none."""
    dtype = plain(getattr(getattr(vllm_config, "lora_config", None), "lora_dtype", None))
    return None if dtype in ("auto", plain(vllm_config.model_config.dtype)) else dtype


def _enforces_versions(vllm_config: Any) -> bool:
    """Whether NIXL refuses a peer of another version anyway, its default."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    return bool(extra.get("enforce_handshake_compat", True))
