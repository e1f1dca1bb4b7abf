"""Checks of what an engine's settings and a request make of a fingerprint's seed, on vLLM's own classes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig
from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.request import Request

from kvplane.connector import compat
from kvplane.connector.config import ConfigError
from kvplane.connector.engine import base_context, request_context, request_items, turn_on_bidirectional
from kvplane.connector.fingerprint import Context, Item
from kvplane.connector.settings import kv_settings, plain
from tests.vllm.group_checks import BLOCK, HEADS, full, layout_of, sliding
from tests.vllm.runner import run
from tests.vllm.scheduler_checks import config, scheduler

BASE = Context("m", "r", "bfloat16", settings="s")


def engine() -> Any:
    """Return an engine's configuration with everything this looks at."""
    made = config("kv_consumer")
    made.model_config = SimpleNamespace(
        model="/models/tiny",
        revision="main",
        code_revision=None,
        dtype=torch.bfloat16,
        served_model_name="tiny",
        quantization=None,
        quantization_config=None,
        model_class_overrides={},
        disable_sliding_window=False,
        hf_config=LlamaConfig(rope_theta=10000.0),
        multimodal_config=SimpleNamespace(
            language_model_only=False,
            mm_processor_kwargs={"num_crops": 4},
            mm_encoder_attn_dtype=None,
            video_pruning_rate=None,
            video_pruning_method="evs",
            mm_device_do_normalize=True,
        ),
    )
    made.cache_config.kv_cache_dtype_skip_layers = []
    made.speculative_config = None
    made.lora_config = None
    return made


def drafting(method: str, **changes: Any) -> SimpleNamespace:
    draft = {"model": "org/draft", "revision": None, "code_revision": None, "quantization": None}
    return SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(**{**draft, "hf_config": LlamaConfig(), **changes}),
        parallel_drafting=False,
        kv_cache_dtype=None,
    )


def seed(made: Any, specs: list[Any] | None = None, engine_id: str = "e") -> bytes:
    return base_context(made, layout_of(specs or [full()]), engine_id).seed()


def set_to(path: str, value: Any) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            made = getattr(made, owner)
        setattr(made, name, value)

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "model": set_to("model_config.model", "/models/other"),
    "revision": set_to("model_config.revision", "other"),
    "code": set_to("model_config.code_revision", "other"),
    "precision": set_to("model_config.dtype", torch.float16),
    "KV precision": set_to("cache_config.cache_dtype", "fp8"),
    "layers not quantised": set_to("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "quantised weights": set_to("model_config.quantization", "fp8"),
    "how weights are quantised": set_to("model_config.quantization_config", {"bits": 4}),
    "RoPE scaling": set_to("model_config.hf_config.rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    "another number": set_to("model_config.hf_config.rms_norm_eps", 1e-3),
    "another class": set_to("model_config.model_class_overrides", {"A": "B"}),
    "windows as full attention": set_to("model_config.disable_sliding_window", True),
    "image processing": set_to("model_config.multimodal_config.mm_processor_kwargs", {"num_crops": 8}),
    "video pruning": set_to("model_config.multimodal_config.video_pruning_rate", 0.5),
    "vision encoder's precision": set_to("model_config.multimodal_config.mm_encoder_attn_dtype", "fp8"),
    "adapters' precision": set_to("lora_config", SimpleNamespace(lora_dtype=torch.float32)),
    "eagle": set_to("speculative_config", drafting("eagle3")),
    "a draft model": set_to("speculative_config", drafting("draft_model")),
    "another draft": set_to("speculative_config", drafting("eagle3", model="org/other")),
    "another revision of the draft": set_to("speculative_config", drafting("eagle3", revision="v2")),
    "hidden states": set_to("speculative_config", drafting("extract_hidden_states")),
}


def check_each_setting_that_changes_kv_changes_the_seed() -> None:
    seeds = {"": seed(engine())}
    for name, change in CHANGES.items():
        made = engine()
        change(made)
        seeds[name] = seed(made)
    assert len(set(seeds.values())) == len(seeds), sorted(seeds.items(), key=lambda item: item[1])


def check_tokens_a_drafter_looks_ahead_change_the_seed() -> None:
    seeds = set()
    for lookahead in (1, 2, 3):
        made = engine()
        made.speculative_config, made.num_prefill_lookahead_tokens = drafting("mtp"), lookahead
        seeds.add(seed(made))
    assert len(seeds) == 3


def check_each_kind_of_layers_changes_the_seed() -> None:
    kinds: list[list[Any]] = [
        [full()],
        [full(sliding_window=40)],
        [full(attention_chunk_size=40)],
        [sliding(40)],
        [sliding(41)],
        [full(), sliding(40)],
        [sliding(40), full()],
        [full(head_size_v=32)],
        [MLAAttentionSpec(block_size=BLOCK, **HEADS)],
        [MLAAttentionSpec(block_size=BLOCK, **HEADS, cache_dtype_str="fp8_ds_mla")],
    ]
    assert len({seed(engine(), specs) for specs in kinds}) == len(kinds)


def check_what_does_not_change_kv_does_not_change_the_seed() -> None:
    def same(change: Callable[[Any], None], specs: list[Any] | None = None) -> None:
        made = engine()
        change(made)
        assert seed(made, specs) == seed(engine())

    same(set_to("model_config.model", "elsewhere/tiny"))
    same(set_to("model_config.served_model_name", "other"))
    same(set_to("model_config.hf_config", LlamaConfig(rope_theta=10000.0, name_or_path="/elsewhere")))
    same(set_to("speculative_config", drafting("ngram")))
    same(set_to("speculative_config", drafting("suffix")))
    same(set_to("lora_config", SimpleNamespace(lora_dtype=torch.bfloat16)))
    same(set_to("parallel_config.tensor_parallel_size", 4))
    same(set_to("cache_config.block_size", 64))
    same(lambda _: None, [full(32)])
    same(lambda _: None, [type(full())(**{**HEADS, "block_size": BLOCK, "num_kv_heads": 4})])


def check_calibrated_scales_are_an_engines_own() -> None:
    made = engine()
    made.cache_config.calculate_kv_scales = True
    assert seed(made, engine_id="d0") != seed(made, engine_id="p0")
    assert seed(made, engine_id="d0") == seed(made, engine_id="d0")
    assert seed(engine(), engine_id="d0") == seed(engine(), engine_id="p0")


def check_versions_count_where_nixl_insists_on_them() -> None:
    made = engine()
    settings = kv_settings(made, layout_of([full()]), "e")
    assert settings["vllm"]
    made.kv_transfer_config.kv_connector_extra_config["enforce_handshake_compat"] = False
    assert not kv_settings(made, layout_of([full()]), "e")["vllm"]


def check_values_are_the_same_in_every_process() -> None:
    made = plain({"f": lambda: 1, "s": {"b", "a"}, "d": torch.bfloat16, "o": SimpleNamespace(), 3: (1, None)})
    assert made["s"] == ["a", "b"]
    assert made["d"] == "bfloat16"
    assert made["3"] == [1, None]
    assert "0x" not in repr(made)
    loop: dict[str, Any] = {}
    loop["again"] = loop
    assert plain(loop)


def request(prompt: list[int] | None = None, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=8)
    return Request("r", [1, 2, 3] if prompt is None else prompt, sampling, None, **more)


def check_what_a_request_adds_to_the_seed() -> None:
    lora = LoRARequest("a", 1, "/a")
    requests = [
        request(),
        request(cache_salt="s"),
        request(lora_request=lora),
        request(lora_request=LoRARequest("b", 1, "/a")),
        request(lora_request=LoRARequest("a", 1, "/b")),
        request(lora_request=lora, cache_salt="s"),
    ]
    made = [request_context(BASE, one) for one in requests]
    assert len({context.seed() for context in made if context}) == len(requests)
    assert request_context(BASE, request(lora_request=LoRARequest("a", 7, "/a"))) == made[2]


def check_what_cannot_be_named_is_not_reused() -> None:
    embeds = torch.zeros(3, 4)
    mixed = request(prompt_embeds=embeds, prompt_is_token_ids=[True, False, True])
    assert request_context(BASE, mixed) is None
    assert request_context(BASE, request(prompt_embeds=embeds)) is None
    assert request_context(BASE, Request("r", None, SamplingParams(), None, prompt_embeds=embeds)) is None
    assert request_context(BASE, Request("r", [1], None, PoolingParams(task="embed"))) is None
    replaced = LoRARequest("a", 1, "/a", load_inplace=True)
    assert request_context(BASE, request(lora_request=replaced)) is None


def check_items_are_named_by_content_and_place() -> None:
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=at, length=2)
        )
        for name, at in (("cat", 1), ("dog", 5))
    ]
    assert request_items(request(list(range(9)), mm_features=features)) == [
        Item("cat", 1, 2),
        Item("dog", 5, 2),
    ]


def check_pushed_kv_is_refused_at_the_start() -> None:
    for name, extra in (
        ("NixlPushConnector", {}),
        ("KVPlaneConnector", {"transfer_mode": "push"}),
        ("KVPlaneConnector", {"push_registration_timeout": 5}),
    ):
        made = engine()
        made.kv_transfer_config.kv_connector = name
        made.kv_transfer_config.kv_connector_extra_config = extra
        said = refusal(turn_on_bidirectional, made)
        assert "push" in said
        assert "\n" not in said


def refusal(function: Callable[..., object], *args: object) -> str:
    try:
        function(*args)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was taken")


def check_vllm_finds_the_class_that_refuses_to_push() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    made = engine()
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="NixlPushConnector",
        kv_connector_module_path="kvplane.connector.plugin",
        kv_role="kv_consumer",
        kv_connector_extra_config={"kvplane_address": "127.0.0.1:1"},
    )
    kind = KVConnectorFactory.get_connector_class(made.kv_transfer_config)
    assert "NixlPushConnector" in refusal(kind, made, None, layout_of([full()]))


def check_what_people_want_to_know_is_in_the_registration() -> None:
    made = scheduler("kv_producer")
    said = made._session.spec.settings
    assert (said.kv_role, said.refusal, said.kv_blocks_ttl_s) == ("kv_producer", "", 480.0)
    # What it is announced under; the port is vLLM's own, one for each rank.
    assert said.side_channel_host == "10.0.0.9"
    assert said.side_channel_port == envs.VLLM_NIXL_SIDE_CHANNEL_PORT + 3
    assert said.kv_digest == made._context.settings
    assert len(said.kv_digest) == 32


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
