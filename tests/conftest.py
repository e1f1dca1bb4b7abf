"""For all tests: a blocking call inside an event loop is an error; a slow machine is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from deploy.rig.etcd import EtcdServer


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx():
        yield


@pytest.fixture(autouse=True)
def _logs_are_set_up_for_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program run in this process sets up its logs, for good: its loggers remember where they write to."""
    before, configure = structlog.get_config(), structlog.configure

    def forgetful(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", forgetful)
    yield
    configure(**before)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd, one for all tests; each keeps to a prefix of its own. Fails, never skips, without one."""
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "data") as server:
        server.wait_ready()
        yield server


grpc.aio.init_grpc_aio()
"""Keeps gRPC's polling thread for the session: else it ends when the last channel is collected, with a
blocking join, in whatever test's event loop that happens to be.
"""

structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()])

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
