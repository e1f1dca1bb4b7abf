"""The connector's metrics on vLLM's own /metrics, beside NIXL's.

A connector's statistics travel from the scheduler, in the engine core's process, with the outputs of a step
to the API server, which asks the connector's class for what to do with them. There they are added to
vLLM's registry; its names begin with "vllm:", ours with "kvplane_connector_".
"""

from __future__ import annotations

import contextlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from kvplane.connector.metrics import METRICS, PREFIX, Kind, Snapshot, expand, merged

MEMBER = "kvplane"
"""Name of the snapshot among NIXL's data."""


class KVPlaneStats(NixlKVConnectorStats):  # type: ignore[misc]  # vLLM is not there when this is checked
    """NIXL's statistics, and the scheduler's snapshot where it is one of the scheduler's."""

    @classmethod
    def of_worker(cls, stats: Any) -> Any:
        """Return NIXL's own statistics as ours, so that a snapshot can be added to them."""
        return cls(data=stats.data) if stats is not None else None

    @classmethod
    def of_scheduler(cls, snapshot: Snapshot) -> KVPlaneStats:
        """Return a snapshot of increments with empty statistics of NIXL's."""
        stats = cls()
        stats.data[MEMBER] = snapshot
        return stats

    def is_empty(self) -> bool:
        """See vLLM."""
        return MEMBER not in self.data and bool(super().is_empty())

    def aggregate(self, other: Any) -> Any:
        """See vLLM."""
        theirs = dict(other.data)
        later, earlier = theirs.pop(MEMBER, None), self.data.pop(MEMBER, None)
        super().aggregate(NixlKVConnectorStats(data=theirs))
        if later is not None or earlier is not None:
            self.data[MEMBER] = merged(earlier or {}, later or {})
        return self


def for_logging(data: dict[str, Any] | None) -> Any:
    """Return what vLLM is to log every few seconds: NIXL's transfers, if there were any."""
    if data is None:
        return KVPlaneStats()
    return KVPlaneStats(data={name: value for name, value in data.items() if name != MEMBER})


class KVPlanePromMetrics(NixlPromMetrics):  # type: ignore[misc]  # vLLM is not there when this is checked
    """NIXL's metrics and ours, in the API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        self._kvplane: dict[str, Any] = {}
        for metric in METRICS:
            labels = [*labelnames, *metric.labels]
            if metric.kind is Kind.COUNTER:
                made = self._counter_cls(
                    name=PREFIX + metric.name, documentation=metric.text, labelnames=labels
                )
            else:
                made = self._gauge_cls(
                    name=PREFIX + metric.name,
                    documentation=metric.text,
                    labelnames=labels,
                    multiprocess_mode="mostrecent",
                )
            self._kvplane[metric.name] = made
            _registered.append(made)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See vLLM."""
        data = dict(transfer_stats_data)
        snapshot = data.pop(MEMBER, None)
        super().observe(data, engine_idx)
        engine = self.per_engine_labelvalues[engine_idx]
        for metric, labels, value in expand(snapshot or {}):
            child = self._kvplane[metric.name].labels(*engine, *labels)
            if metric.kind is Kind.GAUGE:
                child.set(value)
            else:
                child.inc(value)


_registered: list[Any] = []


def _unregister() -> None:
    """Take metrics of an engine that was made before in this process off the registry, as vLLM does."""
    from prometheus_client import REGISTRY

    while _registered:
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(_registered.pop())
