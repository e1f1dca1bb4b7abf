"""What people may want to know of an engine's settings. Needs no vLLM; nothing depends on it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from kvplane.client.model import EngineSettings
from kvplane.connector.config import VLLM_TTL, VLLM_TTL_S, ConnectorConfig


def describe_settings(
    vllm_config: Any, config: ConnectorConfig, side_channel: tuple[Any, Any], *, refusal: str, kv_digest: str
) -> EngineSettings:
    """Return what else people may want to know of an engine's configuration.

    `side_channel` is the host and port at which vLLM tells others to find its KV. What cannot be told is left
    out: nothing depends on it.
    """
    transfer = vllm_config.kv_transfer_config
    ttl_s = (transfer.kv_connector_extra_config or {}).get(VLLM_TTL, VLLM_TTL_S)
    caching = getattr(vllm_config.cache_config, "enable_prefix_caching", None)
    host, port = side_channel
    return EngineSettings(
        kv_role=str(transfer.kv_role)[:64],
        kvplane_version=_version()[:64],
        side_channel_host=_host(config.remote_host or str(host)),
        side_channel_port=port if isinstance(port, int) and 0 <= port <= 65_535 else 0,
        prefix_caching=None if caching is None else bool(caching),
        kv_load_failure_policy=str(getattr(transfer, "kv_load_failure_policy", None) or "")[:64],
        kv_blocks_ttl_s=float(ttl_s) if isinstance(ttl_s, int | float) and ttl_s > 0 else 0.0,
        max_ttl_s=config.max_ttl_s,
        refusal=refusal[:64],
        kv_digest=kv_digest[:64],
    )


def _host(host: str) -> str:
    """Return a host as a registration takes it; vLLM's is from the environment, and may be anything."""
    return host if len(host.encode("utf-8", "replace")) <= 256 and host.isprintable() else ""


def _version() -> str:
    try:
        return importlib.metadata.version("kvplane")
    except importlib.metadata.PackageNotFoundError:  # it runs from a source tree
        return ""
