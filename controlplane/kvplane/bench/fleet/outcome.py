"""What a run showed, as plain figures: for tables, files and pictures."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvplane.bench.fleet.fleet import Fleet
from kvplane.bench.fleet.recorder import FIRST, PATHS, Sample, quantile

QUANTILES = (0.5, 0.9, 0.99)
FOLLOW_UPS = "follow-ups"
"""All turns but the first of each conversation."""


@dataclass(frozen=True, slots=True)
class Line:
    """Turns of one kind: how many, what was reused, how long their first tokens took in seconds.

    `hits` are those that reused what a decode engine held; `local` counts the tokens that the engine which
    computed the prompt had in its own prefix cache.
    """

    name: str
    turns: int
    hits: int
    prompt_tokens: int
    reused_tokens: int
    local_tokens: int
    ttft_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What control planes and store had to do, in the busiest tenth of the time where that is said.

    Attributes:
        operations: by name: how many, how many a second over the run, CPU microseconds of each.
        peak_operations_per_s: all together, in the busiest tenth.
        peak_transactions_per_s: of the store, those that write.
        peak_written_bytes_per_s: keys and values.
        cores: of the control planes, in the busiest tenth, without what the network costs.
        writes: puts and deletes, by kind of record.
        attempts: transactions made anew since others had changed what they rested on.
        most_records: at once.
        most_record_bytes: that they took up in memory in one replica.
    """

    operations: dict[str, tuple[int, float, float]]
    peak_operations_per_s: float
    peak_transactions_per_s: float
    peak_written_bytes_per_s: float
    cores: float
    writes: dict[str, int]
    attempts: int
    most_records: int
    most_record_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run.

    Attributes:
        lines: turns by kind; `cold_only` are the same turns with nothing retained, None if that was not run.
        turns: that began, were answered, and were given up by their clients.
        requests: that ended well, broke off, were refused; `retries` are legs tried again unseen.
        claims: granted, and lost by reason.
        wrong: what must not happen, by name; all 0.
        retained_share: of all decode engines' blocks, on average and at most, while conversations began.
        prefill_busy: share of the time in which prefill engines computed, while conversations began.
        simulated_s: how long it took.
        cpu_s: that the simulation took.
        peak_rss_bytes: of this process.
    """

    lines: tuple[Line, ...]
    cold_only: tuple[Line, ...] | None
    turns: dict[str, int]
    requests: dict[str, int]
    reasons: dict[str, int]
    claims: dict[str, int]
    wrong: dict[str, int]
    examples: tuple[str, ...]
    load: Load | None
    retained_share: tuple[float, float]
    retained_conversations: int
    prefill_busy: float
    running: float
    simulated_s: float
    cpu_s: float
    peak_rss_bytes: int
    samples: tuple[Sample, ...] = field(repr=False, default=())

    def line(self, name: str) -> Line:
        """Return the turns of a kind. Raises KeyError."""
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(name)

    @property
    def hit_rate(self) -> float:
        """Share of the follow-up turns that reused what was retained."""
        all_of_them = self.line(FOLLOW_UPS)
        return all_of_them.hits / all_of_them.turns if all_of_them.turns else 0.0

    def document(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        document = asdict(self)
        document["hit_rate"] = self.hit_rate
        return document


def outcome(fleet: Fleet, cpu_s: float, cold_only: Sequence[Line] | None = None) -> Outcome:
    """Return what a fleet that has run shows."""
    recorder, counts, span_s = fleet.recorder, fleet.oracle.counts, fleet.plan.workload.hours * 3600
    during = [sample for sample in recorder.samples if sample.at_s <= 2.0 + span_s] or recorder.samples
    # The first conversations begin in an empty fleet.
    settled = [sample for sample in during if sample.at_s >= span_s / 3] or during
    return Outcome(
        lines=lines(fleet),
        cold_only=None if cold_only is None else tuple(cold_only),
        turns={"begun": recorder.begun, "answered": recorder.answered, "given up": recorder.given_up},
        requests={
            "answered": recorder.requests - recorder.broken - recorder.refused,
            "broken": recorder.broken,
            "refused": recorder.refused,
            "legs tried again": recorder.retries,
        },
        reasons=dict(recorder.reasons.most_common()),
        claims={
            "granted": counts["claims"],
            "reads that failed": counts["failed_reads"],
            **{
                f"lost: {name.partition(':')[2]}": count
                for name, count in sorted(counts.items())
                if name.startswith("claims_lost:")
            },
        },
        wrong={name: counts[name] for name in ("double_claims", "stale_reads", "freed_under_reader")},
        examples=tuple(fleet.oracle.examples),
        load=_load(fleet, settled),
        retained_share=(
            _mean([sample.retained_share for sample in settled]),
            max(sample.retained_share for sample in recorder.samples),
        ),
        retained_conversations=max(sample.retained_conversations for sample in recorder.samples),
        prefill_busy=_mean([sample.prefill_busy for sample in settled]),
        running=_mean([float(sample.running) for sample in settled]),
        simulated_s=fleet.simulation.now,
        cpu_s=cpu_s,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        samples=tuple(recorder.samples),
    )


def lines(fleet: Fleet) -> tuple[Line, ...]:
    """Return a fleet's turns by kind, and all follow-ups together."""
    groups = fleet.recorder.groups
    made = [
        Line(
            name,
            len(groups[name].ttft),
            groups[name].hits,
            groups[name].prompt_tokens,
            groups[name].reused_tokens,
            groups[name].local_tokens,
            _quantiles(sorted(groups[name].ttft)),
        )
        for name in (FIRST, *PATHS)
    ]
    of = [groups[path] for path in PATHS]
    together = sorted(seconds for group in of for seconds in group.ttft)
    made.append(
        Line(
            FOLLOW_UPS,
            len(together),
            sum(group.hits for group in of),
            sum(group.prompt_tokens for group in of),
            sum(group.reused_tokens for group in of),
            sum(group.local_tokens for group in of),
            _quantiles(together),
        )
    )
    return tuple(made)


def _load(fleet: Fleet, during: Sequence[Sample]) -> Load | None:
    planes = fleet.planes
    if planes is None:
        return None
    seconds = max(fleet.simulation.now, 1e-9)
    each = {
        name: (
            count,
            count / seconds,
            planes.cpu_s[name] / planes.timed[name] * 1e6 if planes.timed[name] else 0.0,
        )
        for name, count in planes.operations.most_common()
    }
    total = sum(planes.operations.values()) or 1
    mean_us = sum(count * cpu_us for count, _, cpu_us in each.values()) / total
    peak = _busiest([sample.operations_per_s for sample in during])
    stores = planes.stores()
    writes = dict[str, int]()
    for store in stores:
        for kind, count in store.writes.most_common():
            writes[kind] = writes.get(kind, 0) + count
    return Load(
        operations=each,
        peak_operations_per_s=peak,
        peak_transactions_per_s=_busiest([sample.transactions_per_s for sample in during]),
        peak_written_bytes_per_s=_busiest([sample.written_bytes_per_s for sample in during]),
        cores=peak * mean_us / 1e6,
        writes=writes,
        attempts=sum(store.failed for store in stores),
        most_records=max(sample.records for sample in fleet.recorder.samples),
        most_record_bytes=max(sample.record_bytes for sample in fleet.recorder.samples),
    )


def _quantiles(ordered: list[float]) -> tuple[float, ...]:
    return tuple(quantile(ordered, share) for share in QUANTILES)


def _busiest(values: Sequence[float]) -> float:
    """Return the average of the highest tenth."""
    ordered = sorted(values, reverse=True)
    return _mean(ordered[: max(1, len(ordered) // 10)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
