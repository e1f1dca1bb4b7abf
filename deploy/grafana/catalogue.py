"""All metrics of all parts, as registered: documentation, dashboard and alerts are held against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kvplane.connector import metrics as connector
from kvplane.controlplane import metrics as controlplane
from kvplane.router.metrics import RouterMetrics

SCRAPED = ("job", "instance")
"""Labels that Prometheus adds to everything."""


_OF_ENGINES = ("engine_id", "model_name", "engine")


@dataclass(frozen=True, slots=True)
class Known:
    """A metric by its full name; of histograms without "_bucket" and the like.

    Attributes:
        name: as a scrape shows it.
        kind: "counter", "gauge" or "histogram".
        labels: its own, in order.
        part: "controlplane", "router" or "connector".
        added: labels that its exposition adds: of the connector, those of vLLM or its own.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    part: str
    added: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{what}" for what in ("bucket", "sum", "count"))

    @property
    def all_labels(self) -> frozenset[str]:
        """Every label that one of its series may have."""
        more = ("le",) if self.kind == "histogram" else ()
        return frozenset((*self.labels, *self.added, *more, *SCRAPED))


def catalogue() -> dict[str, Known]:
    """Return every metric by name."""
    known = [
        Known(metric.full_name, str(metric.kind), metric.labels, "controlplane")
        for metric in controlplane.METRICS
    ]
    known += [
        Known(
            metric.full_name,
            str(metric.kind),
            metric.labels,
            "connector",
            ("engine_id", "model_name", "engine"),
        )
        for metric in connector.METRICS
    ]
    known += map(_of_router, _collectors(RouterMetrics(CollectorRegistry())))
    return {metric.name: metric for metric in known}


def _collectors(metrics: RouterMetrics) -> list[Any]:
    found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return [*found, *metrics.engine_gauges.values()]


def _of_router(metric: Any) -> Known:
    # The library says neither labels nor kind of a metric without children but here.
    suffix = "_total" if metric._type == "counter" else ""
    return Known(metric._name + suffix, metric._type, tuple(metric._labelnames), "router")
