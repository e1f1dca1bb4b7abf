"""For all tests: a blocking call inside an event loop is an error."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import structlog
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx():
        yield


@pytest.fixture(autouse=True)
def _collect_channels() -> Iterator[None]:
    """Collect what is left of gRPC while no event loop runs: its end joins a thread, and cut off there it
    leaves a socket open.
    """
    yield
    gc.collect()


structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()])
