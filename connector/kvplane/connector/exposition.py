"""An engine's own /metrics, for what vLLM's cannot show: an idle engine, statistics off, an older vLLM.

vLLM takes up statistics when it steps; an engine with nothing to do does not, and its last values stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvplane.client.files import FileError
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
        tls: paths of a certificate, its key, and authorities of scrapers or ""; without them in clear.

    Raises:
        ConfigError: the port cannot be had, a file is of no use, or prometheus_client is not there.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        *,
        engine_id: str,
        host: str,
        port: int,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry

            from kvplane.connector.scrapes import FollowedTls, ScrapeServer, TlsFiles
        except ImportError:
            raise ConfigError("kvplane_metrics_port: needs the package prometheus_client") from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(read, engine_id))
        try:
            followed = None if tls is None else FollowedTls(TlsFiles(*tls)).current
            self._server = ScrapeServer(host, port, registry, followed)
        except FileError as error:
            raise ConfigError(f"kvplane_metrics_tls_cert, _tls_key, _client_ca: {error}") from None
        except OSError as error:
            raise ConfigError(f"kvplane_metrics_port: cannot listen at {host}:{port}: {error}") from None
        self.port = int(self._server.server_port)
        """Where it listens."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvplane-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)
