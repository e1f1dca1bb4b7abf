"""Read from an engine's own /metrics what one request cost it.

The counters only grow, so the cost of a request on an engine that serves nothing else is the difference
between two readings. What is read, all of it vLLM's own measurement:

- `vllm:request_prefill_time_seconds`: from the first scheduled step of a request to its first token. A
  request that waits for KV from another engine is not scheduled before it is there: this is computing only.
- `vllm:request_queue_time_seconds`: from arrival to the first scheduled step. On an otherwise idle engine
  that is the time a request is parked while its KV is read from the other engine, including the handshake,
  the engine's polling and the copy itself.
- `vllm:nixl_xfer_time_seconds`: NIXL's own time of those copies alone.
- `vllm:prompt_tokens_by_source`: prompt tokens computed here, found in the prefix cache, or transferred.
"""

import re
import urllib.request
from dataclasses import dataclass, fields
from typing import Self

_SAMPLE = re.compile(r"^(?P<name>[a-z_:A-Z0-9]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_SOURCE = "vllm:prompt_tokens_by_source_total"
_NAMES = {
    "vllm:request_prefill_time_seconds_sum": "prefill_seconds",
    "vllm:request_prefill_time_seconds_count": "requests",
    "vllm:request_queue_time_seconds_sum": "wait_seconds",
    "vllm:nixl_xfer_time_seconds_sum": "copy_seconds",
    "vllm:nixl_bytes_transferred_sum": "copy_bytes",
}
_SOURCES = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "cached_tokens",
    "external_kv_transfer": "transferred_tokens",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading, or the difference of two. Seconds, bytes, tokens, and finished requests."""

    requests: float = 0.0
    prefill_seconds: float = 0.0
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0
    copy_bytes: float = 0.0
    computed_tokens: float = 0.0
    cached_tokens: float = 0.0
    transferred_tokens: float = 0.0

    def __sub__(self, earlier: Self) -> "Counters":
        return Counters(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(Counters))
        )


def parse(text: str) -> Counters:
    """Read the Prometheus text format; what is absent counts as zero; engines of one server add up."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        member = _NAMES.get(sample["name"])
        if sample["name"] == _SOURCE:
            source = re.search(r'source="([^"]*)"', sample["labels"] or "")
            member = _SOURCES.get(source[1]) if source else None
        if member is not None:
            values[member] = values.get(member, 0.0) + float(sample["value"])
    return Counters(**values)


def read(engine_url: str, timeout: float = 10.0) -> Counters:
    """GET the counters of the engine at this base URL; raises OSError when it does not answer."""
    with urllib.request.urlopen(f"{engine_url}/metrics", timeout=timeout) as answer:
        return parse(answer.read().decode())
