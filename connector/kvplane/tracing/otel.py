"""Spans recorded with OpenTelemetry. The only module that needs the extra `kvplane[otel]`."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from kvplane.tracing.context import Span, Tracer, checked


class _Recorded(Span):
    """A span that is recorded, or that the sampler has left out."""

    __slots__ = ("_otel", "_span")

    def __init__(self, otel: trace.Tracer, span: trace.Span) -> None:
        at = span.get_span_context()
        super().__init__(f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}")
        self._otel = otel
        self._span = span

    def child(self, name: str, **attributes: object) -> Span:
        """See Span."""
        context = set_span_in_context(self._span)
        started = self._otel.start_span(name, context, SpanKind.CLIENT, _known(attributes))
        return _Recorded(self._otel, started)

    def tell(self, **attributes: object) -> None:
        """See Span."""
        self._span.set_attributes(_known(attributes))

    def end(self, problem: str = "") -> None:
        """See Span."""
        if problem:
            self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end()


class RecordingTracer(Tracer):
    """Records spans and has them exported in the background, as OpenTelemetry's SDK does.

    What it samples is as the SDK's environment variables say (`OTEL_TRACES_SAMPLER`): all, unless whoever
    began the trace has decided.

    Args:
        service: name of the program.
        exporter: what takes the spans.
        at_once: hand each span over when it ends; for tests.
    """

    records = True

    def __init__(self, service: str, exporter: SpanExporter, *, at_once: bool = False) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        processor = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._otel = self._provider.get_tracer("kvplane")

    def begin(self, name: str, given: str = "", **attributes: object) -> Span:
        """See Tracer."""
        given = checked(given)
        parent = NonRecordingSpan(_remote(given)) if given else None
        context = set_span_in_context(parent) if parent is not None else Context()
        started = self._otel.start_span(name, context, SpanKind.SERVER, _known(attributes))
        return _Recorded(self._otel, started)

    def join(self, name: str, given: str, **attributes: object) -> Span | None:
        """See Tracer."""
        return self.begin(name, given, **attributes) if checked(given) else None

    def close(self) -> None:
        """See Tracer."""
        self._provider.shutdown()


def exporting(service: str, endpoint: str) -> RecordingTracer:
    """Return a tracer that exports by OTLP over gRPC to an endpoint such as http://127.0.0.1:4317."""
    return RecordingTracer(
        service, OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    )


def _remote(traceparent: str) -> SpanContext:
    _, trace_id, span_id, flags = traceparent.split("-")
    sampled = TraceFlags(int(flags, 16))
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled)


def _known(attributes: dict[str, object]) -> dict[str, Any]:
    """Return the attributes that are known, named as ours."""
    return {f"kvplane.{name}": value for name, value in attributes.items() if value is not None}
