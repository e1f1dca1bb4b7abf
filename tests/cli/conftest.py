from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog


@pytest.fixture(autouse=True)
def _commands_leave_the_logs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command run in this process sets up its logs, for good: loggers remember where they write to."""
    before, configure = structlog.get_config(), structlog.configure

    def forgetful(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", forgetful)
    yield
    configure(**before)
