from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from kvplane.client.logs import get_logger, trace


def test_without_structlog_the_standard_library_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "structlog", None)
    logger = get_logger("kvplane.test")
    with caplog.at_level(logging.INFO):
        logger.info("engine_registered", engine_id="d0", epoch=1)
        logger.warning("control_plane_lost")
        logger.error("engine_fenced", engine_id="100%s")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "engine_registered engine_id=d0 epoch=1"),
        ("WARNING", "control_plane_lost"),
        ("ERROR", "engine_fenced engine_id=100%s"),
    ]


def test_a_trace_says_where_and_nothing_of_what() -> None:
    def broken(secret: Any) -> None:
        raise ValueError(secret)

    with pytest.raises(ValueError, match="conversation") as raised:
        broken("conversation 7")
    text = trace(raised.value)
    assert text.count("test_logs.py:") == 2
    assert "conversation" not in text
