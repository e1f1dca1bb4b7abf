from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog

from tests.cli.fleet import Fleet, fleet


@pytest.fixture(autouse=True)
def _commands_leave_the_logs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command run in this process sets up its logs, for good: loggers remember where they write to."""
    before, configure = structlog.get_config(), structlog.configure

    def forgetful(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", forgetful)
    yield
    configure(**before)


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    async with fleet() as made:
        yield made
