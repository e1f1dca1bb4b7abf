"""For all tests: a blocking call inside an event loop is an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    with blockbuster_ctx():
        yield


structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()])
