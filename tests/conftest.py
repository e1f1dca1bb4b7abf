"""For all tests: a blocking call inside an event loop is an error."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
import structlog
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx():
        yield


grpc.aio.init_grpc_aio()
"""Keeps gRPC's polling thread for the session: else it ends when the last channel is collected, with a
blocking join, in whatever test's event loop that happens to be.
"""

structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()])
