"""An engine's own /metrics, for what vLLM's cannot show: an idle engine, statistics off, an older vLLM.

vLLM takes up statistics when it steps; an engine with nothing to do does not, and its last values stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvplane.connector.config import ConfigError
from kvplane.connector.metrics import METRICS, PREFIX, Kind, Snapshot, expand


class _Collector:
    """Reads a snapshot when it is asked, on the thread of the one who asks."""

    def __init__(self, read: Callable[[], Snapshot], engine_id: str) -> None:
        self._read = read
        self._engine_id = engine_id

    def collect(self) -> Iterator[Any]:
        """Yield the families, all of them, empty ones too."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {
            metric.name: (CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily)(
                PREFIX + metric.name, metric.text, labels=("engine_id", *metric.labels)
            )
            for metric in METRICS
        }
        for metric, labels, value in expand(self._read()):
            families[metric.name].add_metric([self._engine_id, *labels], value)
        yield from families.values()


class MetricsServer:
    """GET /metrics on a port of its own, from a registry of its own, on a daemon thread.

    Args:
        read: takes a snapshot; called from the server's threads.
        engine_id: goes into the label of that name.
        host: address to listen at.
        port: to listen at; 0 takes a free one.

    Raises:
        ConfigError: the port cannot be had, or prometheus_client is not there.
    """

    def __init__(self, read: Callable[[], Snapshot], *, engine_id: str, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ConfigError("kvplane_metrics_port: needs the package prometheus_client") from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(read, engine_id))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"kvplane_metrics_port: cannot listen at {host}:{port}: {error}") from None
        self.port = int(self._server.server_port)
        """Where it listens."""

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)
