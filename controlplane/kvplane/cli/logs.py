"""Logging of the programs. The only place that configures structlog."""

from __future__ import annotations

import logging
import sys

import structlog

from kvplane.tracing.context import CURRENT


def with_trace(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Add of which trace the work at hand is."""
    if (span := CURRENT.get()) is not None:
        event["trace_id"] = span.trace_id
    return event


class _OfLibraries(logging.Handler):
    """Logs what libraries say by Python's logging as we log, so that no line is of another form."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it; a traceback goes along."""
        problem = " ".join(record.getMessage().split())
        structlog.get_logger(record.name).log(
            record.levelno, "library_said", library=record.name, problem=problem, exc_info=record.exc_info
        )


def configure_logs(level: str = "info", form: str = "auto") -> None:
    """Log to standard error: for people on a terminal, else JSON lines. `form`: auto, console or json."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor
    if console:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            with_trace,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # One write per line: workers share the stream.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _OfLibraries) for handler in root.handlers):
        root.addHandler(_OfLibraries(logging.WARNING))
