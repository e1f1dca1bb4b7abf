"""What is noted while a fleet runs: how each turn was served, and samples of the whole now and then."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from kvplane.bench.fleet.routing import Answer, Ending

FIRST = "first"
"""Instead of a path: turns that begin a conversation have nothing to find."""
PATHS = ("direct", "pull", "cold")


@dataclass(slots=True)
class Sample:
    """The fleet at a moment, or since the last sample. Times are in seconds."""

    at_s: float
    turns: int = 0
    follow_ups: int = 0
    hits: int = 0
    broken: int = 0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    retained_share: float = 0.0
    """Of all KV blocks of decode engines."""
    retained_conversations: int = 0
    used_share: float = 0.0
    """Of all KV blocks: neither free nor only retained."""
    prefill_busy: float = 0.0
    """Share of the time in which prefill engines computed."""
    running: int = 0
    waiting: int = 0
    prefill_engines: int = 0
    decode_engines: int = 0
    operations_per_s: float = 0.0
    transactions_per_s: float = 0.0
    written_bytes_per_s: float = 0.0
    records: int = 0
    record_bytes: int = 0


@dataclass(slots=True)
class Group:
    """Turns of one kind."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    reused_tokens: int = 0
    local_tokens: int = 0
    hits: int = 0


class Recorder:
    """Notes every turn once."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {name: Group() for name in (FIRST, *PATHS)}
        self.reasons: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.begun = 0
        """Turns that began."""
        self.answered = 0
        self.given_up = 0
        """Turns whose client had no answer after all its attempts."""
        self.requests = 0
        """Attempts, those of a turn that was repeated included."""
        self.broken = 0
        """Requests that ended after their answer had begun."""
        self.refused = 0
        """Requests that were answered with an error."""
        self.retries = 0
        """Legs that a router tried again, unseen by the client."""
        self._recent: list[float] = []
        self._since = Counter[str]()

    def request(self, answer: Answer) -> None:
        """Note how a request ended."""
        self.requests += 1
        self.retries += answer.retries
        if answer.ending is Ending.BROKEN:
            self.broken += 1
            self._since["broken"] += 1
        elif answer.ending is Ending.REFUSED:
            self.refused += 1
            self._since["broken"] += 1

    def turn(self, answer: Answer, *, is_first: bool, prompt_tokens: int, ttft_s: float) -> None:
        """Note a turn that was answered; `ttft_s` counts from the client's first attempt."""
        self.answered += 1
        group = self.groups[FIRST if is_first else answer.path]
        group.ttft.append(ttft_s)
        group.prompt_tokens += prompt_tokens
        group.local_tokens += answer.local
        self._since["turns"] += 1
        self._recent.append(ttft_s)
        if is_first:
            return
        group.reused_tokens += answer.reused
        self._since["follow_ups"] += 1
        self.reasons[f"{answer.path}: {answer.reason}"] += 1
        if answer.reused > 0:
            group.hits += 1
            self._since["hits"] += 1

    def sample(self, sample: Sample) -> None:
        """Keep a sample, and add what was noted since the last."""
        recent, self._recent = sorted(self._recent), []
        since, self._since = self._since, Counter()
        sample.turns, sample.follow_ups = since["turns"], since["follow_ups"]
        sample.hits, sample.broken = since["hits"], since["broken"]
        sample.ttft_p50_s, sample.ttft_p99_s = quantile(recent, 0.5), quantile(recent, 0.99)
        self.samples.append(sample)


def quantile(ordered: list[float], share: float) -> float:
    """Return the value below which a share of ordered values lies; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
