"""The class vLLM loads: NIXL's pull connector, with kvplane in its scheduler half.

--kv-transfer-config '{"kv_connector": "KVPlaneConnector",
                       "kv_connector_module_path": "kvplane.connector.plugin",
                       "kv_role": "kv_consumer",
                       "kv_connector_extra_config": {"kvplane_address": "10.0.0.5:50051"}}'
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvplane.connector import compat, needs
from kvplane.connector.config import read_config
from kvplane.connector.engine import turn_on_bidirectional
from kvplane.connector.scheduler import KVPlaneConnectorScheduler
from kvplane.connector.stats import KVPlanePromMetrics, KVPlaneStats, for_logging

needs.check_internals()


class KVPlaneConnector(compat.ConnectorBase):  # type: ignore[misc]  # vLLM is not there when this is checked
    """NIXL's pull connector that announces what it retains and verifies what it pulls.

    Raises:
        ConfigError: when it is made, with one line that names the setting.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        read_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        turn_on_bidirectional(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._kvplane: KVPlaneConnectorScheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._kvplane = KVPlaneConnectorScheduler(vllm_config, self.engine_id, kv_cache_config)
            self.connector_scheduler = self._kvplane
            return
        compat.decline_late_reads(self.connector_worker)
        compat.renew_failed_peers(self.connector_worker)
        if vllm_config.kv_transfer_config.kv_role == "kv_consumer":
            compat.quiet_releases(self.connector_worker)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See vLLM."""
        if self._kvplane is not None:
            self._kvplane.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        if self._kvplane is not None:
            self._kvplane.on_new_request(request)

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        if self._kvplane is not None:
            self._kvplane.update_connector_output(connector_output)

    def take_events(self) -> Any:
        """See vLLM, which asks after every step, once the step's outcome is dealt with."""
        if self._kvplane is not None:
            self._kvplane.step_done()
        return super().take_events()

    def has_pending_block_frees(self) -> bool:
        """See vLLM."""
        return self._kvplane is not None and self._kvplane.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        """See vLLM. False while retained blocks are held: they are on their way out, try again."""
        return self._kvplane.reset_cache() if self._kvplane is not None else None

    def get_kv_connector_stats(self) -> Any:
        """See vLLM: NIXL's transfers on a worker; on the scheduler's side what is new of ours."""
        if self._kvplane is None:
            return KVPlaneStats.of_worker(super().get_kv_connector_stats())
        snapshot = self._kvplane.stats()
        return KVPlaneStats.of_scheduler(snapshot) if snapshot is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """See vLLM: what its log shows of the last seconds."""
        return for_logging(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """See vLLM: NIXL's metrics and ours."""
        return KVPlanePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM."""
        compat.rebase_reads(self._get_connector_metadata())
        super().start_load_kv(forward_context, **kwargs)
        compat.order_leases(self.connector_worker)


# Under this name vLLM also makes its checks for NIXL, which go by name (decode context parallelism).
NixlConnector = KVPlaneConnector

# Refused when it is made, with a line that says why; vLLM would only say that there is no such class.
NixlPushConnector = KVPlaneConnector
