"""A tracer whose spans stay at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvplane.tracing.otel import RecordingTracer


@dataclass(frozen=True)
class Recorded:
    tracer: RecordingTracer
    spans: InMemorySpanExporter


@contextmanager
def recording(service: str) -> Iterator[Recorded]:
    """Record spans; not to be entered in an event loop, where OpenTelemetry's own start would block."""
    spans = InMemorySpanExporter()
    tracer = RecordingTracer(service, spans, at_once=True)
    try:
        yield Recorded(tracer, spans)
    finally:
        tracer.close()
