"""--otel-endpoint: what it may say, what it needs, and that a collector that is away holds nothing up."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

import kvplane.tracing
from kvplane.cli.config import Config, ConfigError, load_config
from kvplane.cli.tracing import tracer_of
from kvplane.tracing.context import Tracer
from tests.cli.test_commands import event, refused, start


def config(endpoint: str | None) -> Config:
    return load_config({"otel_endpoint": endpoint}, environment={})


def test_without_the_option_nothing_is_recorded() -> None:
    assert type(tracer_of(config(None), "s")) is Tracer


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4317",
        "http://collector",
        "http://:4317",
        "http://c:4317/v1/traces",
        "http://c:99999",
        "ftp://c:1",
    ],
)
def test_what_is_no_endpoint_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="not a URL such as") as raised:
        tracer_of(config(endpoint), "s")
    assert str(raised.value).startswith(f"--otel-endpoint {endpoint}: ")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "kvplane.tracing.otel", raising=False)
    monkeypatch.delattr(kvplane.tracing, "otel", raising=False)
    with pytest.raises(ConfigError, match=r"--otel-endpoint: .* pip install 'kvplane\[otel\]'"):
        tracer_of(config("http://127.0.0.1:4317"), "s")


async def test_a_command_says_so_in_one_line() -> None:
    said = await refused("serve", "--grpc-port", "0", "--otel-endpoint", "collector")
    assert said.startswith("kvplane: --otel-endpoint collector: not a URL")


async def test_a_collector_that_is_away_is_no_obstacle() -> None:
    process = await start("serve", "--grpc-port", "0", "--otel-endpoint", "http://127.0.0.1:9")
    await event(process, "control_plane_started")
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
