"""The connector's metrics: what there is, and how it is read out of what the connector keeps anyway.

The scheduler's thread only counts (a dictionary and an addition); everything else happens when somebody
looks: once a second for vLLM's own /metrics (`stats`), or at a request to `kvplane_metrics_port`. Each metric
is in METRICS, and in deploy/METRICS.md with what it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from kvplane.connector.envelope import Outcome

PREFIX = "kvplane_connector_"
"""What every name begins with; vLLM's begin with "vllm:"."""

Sample = tuple[list[str], float]
"""Values of a metric's labels, and its value."""
Snapshot = dict[str, list[Sample]]
"""All that is known now, by name without prefix. Counters are totals since the start."""


class Kind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is without prefix, of counters without "_total"."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name a scrape shows."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


METRICS = (
    _gauge("retained_blocks", "distinct KV blocks that are to stay for later turns"),
    _gauge("held_blocks", "distinct KV blocks held, those on their way out included"),
    _gauge("budget_blocks", "distinct KV blocks that may stay"),
    _gauge("retained_bytes", "bytes of the blocks that are to stay, over all ranks of the engine"),
    _gauge("retained_conversations", "conversations of which a turn is held"),
    _counter("retained_turns", "turns retained and announced"),
    _counter("freed_turns", "retained turns whose blocks are free again: read, expired or given back"),
    _counter("not_retained_turns", "finished turns that were not retained", "reason"),
    _counter("announcements", "announcements answered by the control plane", "outcome"),
    _counter("early_frees", "retained turns on their way out before their time", "reason"),
    _counter("prefills", "prefill turns handed over, by what became of their pull", "outcome", "detail"),
    _counter("pulls", "pulls that brought tokens"),
    _counter("read_failures", "pulls whose read failed"),
    _counter("pulled_tokens", "tokens pulled from decode engines"),
    _counter("pulled_bytes", "bytes pulled, estimated: blocks of the pulled tokens times bytes per block"),
    _counter("verified_tokens", "offered tokens found equal to the prompt's"),
    _counter("mismatched_tokens", "offered tokens refused, for they are not the prompt's"),
    _gauge("control_plane_attached", "1 while the control plane answers, else 0"),
    _gauge("control_plane_silence_seconds", "seconds since the control plane was last in contact"),
    _gauge("queue_entries", "what waits to be said to the control plane, or to be heard", "queue"),
    _counter("dropped_announcements", "announcements dropped unsent"),
    _counter("cache_resets", "times everything retained was forgotten", "cause"),
    _counter("faults", "faults of the connector itself; each costs reuse, never a request", "where"),
    _counter("questions", "questions of this prefill engine to the control plane", "outcome"),
    _counter("question_seconds", "seconds that answers to those questions took, of answered ones"),
    _counter("reads", "reads by this prefill engine, and its peers put on the breaker", "outcome"),
    _counter("events", "whatever else the connector counts", "event"),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


class Meter:
    """What the scheduler's thread counts that nobody else keeps."""

    def __init__(self, block_size: int, bytes_per_block: int) -> None:
        self._block_size = block_size
        self.bytes_per_block = bytes_per_block
        """Of KV, in bytes."""
        self.faults: Counter[str] = Counter()
        """Faults by place."""
        self.resets: Counter[str] = Counter()
        """Cache resets by cause."""
        self.tokens: Counter[str] = Counter()
        """verified, mismatched, pulled; and pulled_bytes."""

    def compared(self, offered: object, equal: int, outcome: Outcome | None) -> None:
        """Note what came of comparing `offered` tokens with a prompt; other outcomes compared nothing."""
        if isinstance(offered, int) and outcome in (None, Outcome.MISMATCH):
            self.tokens["verified"] += equal
            self.tokens["mismatched"] += max(0, offered - equal)

    def pulled(self, tokens: int) -> None:
        """Note a pull that brought this many tokens."""
        self.tokens["pulled"] += tokens
        self.tokens["pulled_bytes"] += -(-tokens // self._block_size) * self.bytes_per_block


class _Retention(Protocol):
    budget: int

    def __len__(self) -> int: ...
    @property
    def held_blocks(self) -> int:
        """Distinct blocks held."""

    @property
    def kept_blocks(self) -> int:
        """Distinct blocks that are to stay."""


class _Keeper(Protocol):
    counts: Counter[str]

    @property
    def retention(self) -> Any:
        """A _Retention."""


class _Session(Protocol):
    @property
    def attached(self) -> bool:
        """Whether the control plane answers."""

    @property
    def last_contact(self) -> float | None:
        """When it last did."""

    @property
    def dropped(self) -> int:
        """Announcements dropped unsent."""

    @property
    def queues(self) -> Mapping[str, int]:
        """Sizes of what waits."""


# Counts of the keeper, by what is before the colon; what is after it is the label.
_OF_KEEPER = {
    "retained": "retained_turns",
    "freed": "freed_turns",
    "not_retained": "not_retained_turns",
    "announced": "announcements",
    "ordered": "early_frees",
    "dropped": "early_frees",
    "withdrawn": "early_frees",
}


def take_snapshot(
    meter: Meter,
    keeper: _Keeper,
    session: _Session,
    outcomes: Mapping[str, int],
    *,
    monotonic: Callable[[], float],
    others: Mapping[str, Counter[str]] | None = None,
    question_s: float = 0.0,
) -> Snapshot:
    """Return all values. From any thread; what is counted meanwhile may be in it or not. O(labels).

    Args:
        meter: of the scheduler.
        keeper: with its counts and its retention.
        session: with the control plane.
        outcomes: of prefills, as "outcome" or "outcome:detail".
        monotonic: clock of the session.
        others: more counts, by the name of their metric, which has one label.
        question_s: seconds that the control plane took to answer questions, all together.
    """
    values: dict[str, Counter[tuple[str, ...]]] = {metric.name: Counter() for metric in METRICS}
    for count, number in keeper.counts.copy().items():
        name, _, label = count.partition(":")
        metric = _BY_NAME[_OF_KEEPER.get(name, "events")]
        if metric.name == "events":
            labels: tuple[str, ...] = (count,)
        elif metric.name == "early_frees":
            labels = (label or name,)
        else:
            labels = (label,) if metric.labels else ()
        values[metric.name][labels] += number
    for outcome, number in dict(outcomes).items():
        what, _, detail = outcome.partition(":")
        values["prefills"][what, detail] += number
        if what == Outcome.PULLED:
            values["pulls"][()] += number
        elif what == Outcome.FAILED:
            values["read_failures"][()] += number
    tokens = meter.tokens.copy()
    single: dict[str, float] = {
        "retained_blocks": keeper.retention.kept_blocks,
        "held_blocks": keeper.retention.held_blocks,
        "budget_blocks": keeper.retention.budget,
        "retained_bytes": keeper.retention.kept_blocks * meter.bytes_per_block,
        "retained_conversations": len(keeper.retention),
        "question_seconds": question_s,
        "pulled_tokens": tokens["pulled"],
        "pulled_bytes": tokens["pulled_bytes"],
        "verified_tokens": tokens["verified"],
        "mismatched_tokens": tokens["mismatched"],
        "control_plane_attached": int(session.attached),
        "dropped_announcements": session.dropped,
    }
    if session.last_contact is not None:
        single["control_plane_silence_seconds"] = max(0.0, monotonic() - session.last_contact)
    snapshot: Snapshot = {name: [([], value)] for name, value in single.items()}
    for queue, size in session.queues.items():
        snapshot.setdefault("queue_entries", []).append(([queue], size))
    sources = {"faults": meter.faults, "cache_resets": meter.resets, **(others or {})}
    for name, source in sources.items():
        values[name].update({(label,): number for label, number in source.copy().items()})
    for name, counter in values.items():
        if counter:
            snapshot[name] = [(list(labels), number) for labels, number in counter.items()]
        elif name not in snapshot and not _BY_NAME[name].labels and _BY_NAME[name].kind is Kind.COUNTER:
            snapshot[name] = [([], 0)]
    return snapshot


def expand(snapshot: Mapping[str, Any]) -> Iterator[tuple[Metric, list[str], float]]:
    """Yield what a snapshot says of known metrics; another version's others are left out."""
    for name, samples in snapshot.items():
        metric = _BY_NAME.get(name)
        for labels, value in samples if metric is not None else ():
            if metric is not None and len(labels) == len(metric.labels):
                yield metric, list(labels), value


class Increments:
    """Turns totals into what was added, for readers that can only add and of which each sees a part."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], float] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with its counters replaced by what they grew since the last call."""
        grown: Snapshot = {}
        for metric, labels, value in expand(snapshot):
            if metric.kind is Kind.COUNTER:
                key = (metric.name, *labels)
                value, self._last[key] = value - self._last.get(key, 0.0), value
            grown.setdefault(metric.name, []).append((labels, value))
        return grown


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Snapshot:
    """Return two snapshots of increments as one: counters add up, of gauges the later counts."""
    both: dict[tuple[str, ...], float] = {}
    for metric, labels, value in (*expand(earlier), *expand(later)):
        key = (metric.name, *labels)
        both[key] = value + (both.get(key, 0.0) if metric.kind is Kind.COUNTER else 0.0)
    snapshot: Snapshot = {}
    for (name, *labels), value in both.items():
        snapshot.setdefault(name, []).append((labels, value))
    return snapshot
