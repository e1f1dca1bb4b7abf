"""The tracer of a program, as --otel-endpoint says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from kvplane.cli.config import Config, ConfigError
from kvplane.tracing.context import Tracer

OPTION = "--otel-endpoint"


def tracer_of(config: Config, service: str) -> Tracer:
    """Return the tracer of a program. Raises ConfigError, also where OpenTelemetry is not installed."""
    if config.otel_endpoint is None:
        return Tracer()
    endpoint = _checked(config.otel_endpoint)
    try:
        from kvplane.tracing import otel
    except ImportError as error:
        raise ConfigError(f"{OPTION}: {error.name} is not installed; pip install 'kvplane[otel]'") from None
    return otel.exporting(service, endpoint)


def _checked(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        good = False
    if not good or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{OPTION} {endpoint}: not a URL such as http://127.0.0.1:4317, of OTLP over gRPC")
    return endpoint


@asynccontextmanager
async def tracing(config: Config, service: str) -> AsyncIterator[Tracer]:
    """Have a tracer for as long as this is open; at the end what it has recorded is sent."""
    tracer = await asyncio.to_thread(tracer_of, config, service)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)
