"""All of vLLM's inside that the connector lives on, so that a version without it is found at start."""

from __future__ import annotations

from kvplane.connector import compat
from kvplane.connector.internals import Need, check

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

NEEDS = (
    Need(
        compat.SchedulerBase,
        "keep a finished turn's blocks, renew them and give them back",
        methods={
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
            "build_connector_meta": ("scheduler_output",),
            "request_finished": ("request", "block_ids"),
            "shutdown": (),
        },
        attributes=(
            "_reqs_need_recv",
            "_reqs_need_send",
            "_reqs_in_batch",
            "_reqs_not_processed",
            "use_host_buffer",
            "vllm_config",
            "kv_cache_config",
            "engine_id",
        ),
    ),
    Need(
        compat.ConnectorBase,
        "be loaded as vLLM's connector",
        methods={
            "__init__": ("vllm_config", "role", "kv_cache_config"),
            "build_connector_meta": ("scheduler_output",),
            "request_finished_all_groups": ("request", "block_ids"),
            "update_connector_output": ("connector_output",),
            "get_kv_connector_stats": (),
            "take_events": (),
            "start_load_kv": ("forward_context",),
            "reset_cache": (),
        },
        attributes=("connector_scheduler", "connector_worker", "engine_id"),
    ),
    Need(
        "vllm.v1.request:Request",
        "name what a request's KV depends on",
        attributes=(
            "request_id",
            "status",
            "kv_transfer_params",
            "prompt_token_ids",
            "prompt_embeds",
            "all_token_ids",
            "num_tokens",
            "num_prompt_tokens",
            "num_computed_tokens",
            "num_in_flight_tokens|num_output_placeholders",
            "lora_request",
            "cache_salt",
            "mm_features",
        ),
    ),
    Need(
        "vllm.v1.outputs:KVConnectorOutput",
        "learn which reads ended",
        attributes=("finished_sending", "finished_recving", "invalid_block_ids", "kv_connector_stats"),
    ),
    Need(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        "know how KV is laid out",
        attributes=("num_blocks", "kv_cache_groups"),
    ),
    Need(
        "vllm.v1.core.block_pool:BlockPool",
        "keep retention within its budget",
        methods={"get_num_free_blocks": ()},
        attributes=("num_gpu_blocks",),
    ),
    Need(
        "vllm.v1.engine.core:EngineCore",
        "give everything back when the engine pauses or its weights change",
        methods={
            "collective_rpc": ("method",),
            "reset_prefix_cache": ("reset_running_requests", "reset_connector"),
            "is_scheduler_paused": (),
            "add_lora": ("lora_request",),
        },
    ),
    Need(
        "vllm.v1.engine.core:EngineCoreProc",
        "let the engine end in time",
        attributes=("shutdown_state", "is_running"),
    ),
    Need(
        f"{_NIXL}.stats:NixlKVConnectorStats",
        "report metrics beside NIXL's",
        attributes=("data", "aggregate", "is_empty"),
    ),
    Need(
        f"{_NIXL}.stats:NixlPromMetrics",
        "report metrics beside NIXL's",
        methods={
            "__init__": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
            "observe": ("transfer_stats_data", "engine_idx"),
        },
    ),
)
"""Everything of vLLM's inside that the connector uses."""


def check_internals() -> None:
    """Compare what the connector uses with what this vLLM has.

    Raises:
        VersionError: something is missing.
    """
    check(NEEDS, version=compat.vllm_version, known=compat.RUN_WITH)
