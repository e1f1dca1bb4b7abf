"""The control plane's metrics: what there is, and how it is read out of what is counted anyway.

Nothing here is on the way of a call: `refresh` reads the counts when somebody asks, on the event loop, and
`collect` hands them out, on any thread. Each metric is in METRICS, and in deploy/METRICS.md with what it
is for.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvplane.controlplane import model as m
from kvplane.controlplane.accounts import Account
from kvplane.controlplane.books import ENGINES
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.replicas import VERSION
from kvplane.controlplane.server import ControlPlane
from kvplane.controlplane.tally import CallTally, Histogram

T = TypeVar("T")

PREFIX = "kvplane_controlplane_"
"""What every name begins with."""

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric's labels, and its value."""
Durations = Iterable[tuple[tuple[str, ...], Histogram]]


class Kind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class View(StrEnum):
    """Of what a metric tells."""

    REPLICA = "replica"
    """Of this process: to be added up over replicas."""
    FLEET = "fleet"
    """Of what all replicas of a store know alike: of them, take one, or the largest."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is without prefix, of counters without "_total"."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    view: View = View.REPLICA

    @property
    def full_name(self) -> str:
        """The name a scrape shows; of histograms without what is put behind it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


def _counter(name: str, text: str, *labels: str, view: View = View.REPLICA) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels, view)


def _gauge(name: str, text: str, *labels: str, view: View = View.REPLICA) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels, view)


def _histogram(name: str, text: str, *labels: str, view: View = View.REPLICA) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, view)


METRICS = (
    _gauge("build_info", "Always 1; its labels tell what runs.", "version", "python", "store"),
    _gauge("healthy", "1 while calls are answered: the store answers and its copy is fresh."),
    _counter("rpcs", "RPCs that have ended, by method and gRPC code.", "method", "code"),
    _gauge("rpcs_in_flight", "RPCs under way, streams included, by method.", "method"),
    _histogram("rpc_duration_seconds", "How long unary RPCs took that were answered OK.", "method"),
    _counter("operations", "Operations of Turns streams, by kind and gRPC code.", "operation", "code"),
    _gauge("operations_in_flight", "Operations of Turns streams under way, by kind.", "operation"),
    _histogram(
        "operation_duration_seconds", "How long operations of Turns streams took, one in eight.", "operation"
    ),
    _counter("refusals", "RPCs and operations refused, by reason.", "reason"),
    _counter("lookups", "Lookups, by what was known: hit, or why nothing could be offered.", "outcome"),
    _counter("turns", "Turns begun, by what was known of their conversation.", "outcome"),
    _counter("claims", "Claims asked for: hit if granted, else why not.", "outcome"),
    _gauge("claims_open", "Claims whose blocks are held for a reader.", view=View.FLEET),
    _histogram(
        "claim_age_seconds", "How long claims were open that have ended, however they did.", view=View.FLEET
    ),
    _counter("claims_ended", "Claims that have ended, by how.", "how"),
    _counter("announcements", "Announcements of retained turns, by outcome.", "outcome"),
    _counter("renewals", "Renewals of locations, by outcome: granted, or nothing to renew.", "outcome"),
    _counter("touches", "Touches of conversations, by outcome: noted, or nothing to keep.", "outcome"),
    _counter("releases", "Releases asked for, by outcome.", "outcome"),
    _counter("locations_ended", "Retained locations that have ended, by how.", "how"),
    _counter("locations_ended_tokens", "Tokens of retained locations that have ended, by how.", "how"),
    _counter("release_orders", "Orders to free blocks that were sent to engines, by reason.", "reason"),
    _counter("conversations_evicted", "Conversations forgotten to make room for others."),
    _counter("contentions", "Decisions made anew because others had changed what they rested on."),
    _gauge("retained_conversations", "Conversations retained, by engine.", "engine_id", view=View.FLEET),
    _gauge("retained_tokens", "Tokens retained, by engine.", "engine_id", view=View.FLEET),
    _gauge("retained_blocks", "KV blocks retained, by engine.", "engine_id", view=View.FLEET),
    _counter(
        "retained_block_seconds",
        "KV blocks held for later turns and for claims, times the seconds they were, by engine.",
        "engine_id",
        view=View.FLEET,
    ),
    _counter("saved_tokens", "Tokens of claims whose readers are done, by engine.", "engine_id"),
    _gauge(
        "tenant_retained_conversations", "Conversations retained, by tenant.", "tenant_id", view=View.FLEET
    ),
    _gauge("tenant_retained_tokens", "Tokens retained, by tenant.", "tenant_id", view=View.FLEET),
    _gauge("tenant_retained_blocks", "KV blocks retained, by tenant.", "tenant_id", view=View.FLEET),
    _counter(
        "tenant_retained_block_seconds",
        "KV blocks held for later turns and for claims, times the seconds they were, by tenant.",
        "tenant_id",
        view=View.FLEET,
    ),
    _counter("tenant_saved_tokens", "Tokens of claims whose readers are done, by tenant.", "tenant_id"),
    _gauge("engines", "Engines on record, by role and state.", "role", "state", view=View.FLEET),
    _counter("engine_events", "What happened to engines here.", "event"),
    _counter(
        "engines_gone",
        "Engines whose record went: deregistered, or not heard of for the length of their lease.",
        view=View.FLEET,
    ),
    _gauge("engine_total_blocks", "KV blocks an engine has.", "engine_id", view=View.FLEET),
    _gauge("engine_free_blocks", "KV blocks free, as last reported.", "engine_id", view=View.FLEET),
    _gauge(
        "engine_held_blocks",
        "KV blocks kept for later turns, as last reported.",
        "engine_id",
        view=View.FLEET,
    ),
    _gauge("engine_running_requests", "Requests running, as last reported.", "engine_id", view=View.FLEET),
    _gauge("engine_waiting_requests", "Requests waiting, as last reported.", "engine_id", view=View.FLEET),
    _gauge("engine_streams", "Streams of engines that are open here."),
    _gauge("mirror_staleness_seconds", "For how long changes by other replicas may have gone unnoticed."),
    _gauge("mirror_records", "Records of the store that are known here."),
    _gauge("sweep_overdue_seconds", "For how long the oldest location or claim that is over awaits its end."),
    _gauge("replicas", "Replicas of the control plane that this one knows to live, itself included."),
    _gauge("replica_rank", "This replica's place among them; the one at 0 sweeps first."),
    _counter("store_calls", "Calls of the store, by method and outcome.", "operation", "outcome"),
    _histogram("store_call_duration_seconds", "How long calls of the store took.", "operation"),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


class ControlPlaneMetrics(Collector):
    """A control plane's metrics, on the registry that is passed in.

    `store` says what kind of store it has, such as "memory".
    """

    def __init__(self, registry: CollectorRegistry, plane: ControlPlane, meter: Meter, *, store: str) -> None:
        self.registry = registry
        self._plane = plane
        self._meter = meter
        self._build = (VERSION, platform.python_version(), store)
        self._ready: list[Family] | None = None
        registry.register(self)

    def describe(self) -> Iterable[Family]:
        """Tell the registry the names, without values."""
        return [_family(metric) for metric in METRICS]

    def refresh(self) -> None:
        """Read all counts, for the `collect` that follows. Belongs to the event loop. O(labels)."""
        self._ready = list(self._families())

    def collect(self) -> Iterator[Family]:
        """Yield all families: as of the last `refresh`, if there was one since the last time."""
        ready, self._ready = self._ready, None
        yield from ready if ready is not None else self._families()

    async def page(self) -> bytes:
        """Return all in Prometheus' text format; the text is made on another thread."""
        self.refresh()
        return await asyncio.to_thread(generate_latest, self.registry)

    def _families(self) -> Iterator[Family]:
        families: dict[str, Any] = {metric.name: _family(metric) for metric in METRICS}
        for source in (self._calls, self._conversations, self._retention, self._engines, self._state):
            for name, samples in source():
                for labels, value in samples:
                    families[name].add_metric(labels, value)
        durations: Sequence[tuple[str, Durations]] = (
            ("rpc_duration_seconds", _took(self._meter.calls)),
            ("operation_duration_seconds", _took(self._meter.operations)),
            ("store_call_duration_seconds", _labelled(self._meter.store_took)),
        )
        for name, histograms in durations:
            for labels, histogram in histograms:
                _add_histogram(families[name], labels, histogram)
        if self._meter.books is not None:
            _add_histogram(families["claim_age_seconds"], (), self._meter.books.ages)
        yield from families.values()

    def _calls(self) -> Iterator[tuple[str, Samples]]:
        meter = self._meter
        yield "rpcs", _codes(meter.calls)
        yield "rpcs_in_flight", (((name,), calls.in_flight) for name, calls in meter.calls.items())
        yield "operations", _codes(meter.operations)
        yield "operations_in_flight", (((name,), taken.in_flight) for name, taken in meter.operations.items())
        yield "refusals", _labelled(meter.tally.refusals)
        yield (
            "store_calls",
            (((operation, outcome), n) for (operation, outcome), n in meter.store_calls.items()),
        )

    def _conversations(self) -> Iterator[tuple[str, Samples]]:
        tally, misses = self._meter.tally, [reason.name.lower() for reason in m.MissReason]
        begun = tally.groups.as_of_now()
        for name, counts in (("lookups", tally.lookups), ("turns", begun), ("claims", tally.claims)):
            yield name, zip(((outcome,) for outcome in ["hit", *misses]), counts, strict=True)
        yield "announcements", _numbered(m.AnnounceOutcome, tally.announcements)
        yield "releases", _numbered(m.ReleaseOutcome, tally.releases)
        yield "release_orders", _numbered(m.ReleaseReason, tally.orders)
        yield "renewals", [(("nothing",), tally.renewals[0]), (("granted",), tally.renewals[1])]
        yield "touches", [(("nothing",), tally.touches[0]), (("noted",), tally.touches[1])]
        yield "locations_ended", _labelled(tally.ended)
        yield "locations_ended_tokens", _labelled(tally.ended_tokens)
        yield "claims_ended", _labelled(tally.claims_ended)
        yield "conversations_evicted", _single(tally.evicted)
        yield "contentions", _single(tally.attempts)
        yield "engine_events", _labelled(tally.engines)

    def _retention(self) -> Iterator[tuple[str, Samples]]:
        books = self._meter.books
        if books is None:
            return
        yield "claims_open", _single(len(books.claims))
        now = books.now()
        for prefix, accounts in (("", books.engines), ("tenant_", books.tenants)):
            rows = list(accounts.rows(now))
            for name, read in _OF_ROWS.items():
                yield prefix + name, [((label,), read(account, now)) for label, account in rows]

    def _engines(self) -> Iterator[tuple[str, Samples]]:
        census = self._meter.census
        if census is None:
            return
        yield "engines", census.by_state().items()
        yield "engines_gone", _single(census.gone)
        some = list(census.engines.items())[:ENGINES]
        yield "engine_total_blocks", [((name,), engine.spec.total_blocks) for name, engine in some]
        loads = [(name, load) for name, engine in some if (load := census.load(engine)) is not None]
        for metric, read in _OF_LOADS.items():
            yield metric, [((name,), read(load)) for name, load in loads]

    def _state(self) -> Iterator[tuple[str, Samples]]:
        plane = self._plane
        yield "build_info", [(self._build, 1)]
        yield "healthy", _single(plane.status.serving)
        yield "engine_streams", _single(plane.attachments.streams)
        yield "mirror_staleness_seconds", _single(plane.mirror.staleness_s)
        yield "mirror_records", _single(len(plane.mirror))
        yield "sweep_overdue_seconds", _single(plane.sweeper.overdue_s())
        yield "replicas", _single(plane.replicas.living())
        yield "replica_rank", _single(plane.replicas.rank())


_OF_ROWS: Mapping[str, Callable[[Account, float], float]] = {
    "retained_conversations": lambda account, now: account.conversations,
    "retained_tokens": lambda account, now: account.tokens,
    "retained_blocks": lambda account, now: account.blocks,
    "retained_block_seconds": lambda account, now: account.block_seconds(now),
    "saved_tokens": lambda account, now: account.saved_tokens,
}
_OF_LOADS: Mapping[str, Callable[[m.EngineLoad], float]] = {
    "engine_free_blocks": lambda load: load.free_blocks,
    "engine_held_blocks": lambda load: load.retained_blocks,
    "engine_running_requests": lambda load: load.running_requests,
    "engine_waiting_requests": lambda load: load.waiting_requests,
}


def _family(metric: Metric) -> Family:
    name, text, labels = PREFIX + metric.name, metric.text, metric.labels
    if metric.kind is Kind.COUNTER:
        return CounterMetricFamily(name, text, labels=labels)
    if metric.kind is Kind.GAUGE:
        return GaugeMetricFamily(name, text, labels=labels)
    return HistogramMetricFamily(name, text, labels=labels)


def _single(value: float) -> Samples:
    return [((), value)]


def _labelled(counts: Mapping[str, T]) -> list[tuple[tuple[str, ...], T]]:
    return [((label,), count) for label, count in counts.items()]


def _numbered(kind: type[IntEnum], counts: Sequence[int]) -> Samples:
    return [((member.name.lower(),), counts[member]) for member in kind]


def _codes(calls: Mapping[str, CallTally]) -> Samples:
    return [((name, code), number) for name, call in calls.items() for code, number in call.codes.items()]


def _took(calls: Mapping[str, CallTally]) -> Durations:
    return [((name,), call.took) for name, call in calls.items() if call.took is not None]


def _add_histogram(family: Any, labels: Sequence[str], histogram: Histogram) -> None:
    counts = list(itertools.accumulate(histogram.counts))
    if labels and not counts[-1]:
        return  # a method that nobody calls needs no twenty lines
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    family.add_metric(labels, buckets=list(zip(bounds, counts, strict=True)), sum_value=histogram.sum_s)
