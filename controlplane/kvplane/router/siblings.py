"""Router processes behind one port: their metrics added up, whichever of them is asked."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, values
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead


class Siblings:
    """The processes that share a directory, and which of them this is.

    The environment's PROMETHEUS_MULTIPROC_DIR must name `directory` from the process's start.
    """

    def __init__(self, directory: Path, number: int, processes: int = 1) -> None:
        self._directory = directory
        self._number = number
        self.processes = processes
        """How many there are."""

    def share_metrics(self) -> None:
        """Keep metrics made from now on where the siblings see them; once, before any is made.

        A process that takes the place of a dead one goes on counting where that one stopped.
        """
        values.ValueClass = values.MultiProcessValue(lambda: self._number)  # type: ignore[no-untyped-call]  # the library leaves it so

    def metrics(self) -> bytes:
        """Return the metrics of all, in Prometheus' text format. Reads files: not for an event loop."""
        return generate_latest(self._registry())

    def collect(self) -> list[Metric]:
        """Return the metrics of all. Reads files: not for an event loop."""
        return list(self._registry().collect())

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._directory))  # type: ignore[no-untyped-call]  # the library leaves it so
        return registry


def forget_gauges(directory: Path, number: int) -> None:
    """Take what a dead process said of the present out of the metrics. Its counters stay."""
    mark_process_dead(number, str(directory))  # type: ignore[no-untyped-call]  # the library leaves it so
