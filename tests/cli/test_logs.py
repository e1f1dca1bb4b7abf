"""The log has one form, whoever speaks."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
from kvplane.cli.logs import configure_logs
configure_logs("{level}", "json")
configure_logs("{level}", "json")
logging.getLogger("opentelemetry.exporter").warning("no %s,\\nretrying", "collector")
logging.getLogger("opentelemetry.exporter").info("fine")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("asyncio").exception("a task failed")
"""


def logged(level: str) -> list[dict[str, str]]:
    program = PROGRAM.format(level=level)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_what_libraries_say_is_logged_as_all_else() -> None:
    warned, failed = logged("info")
    assert warned["event"] == failed["event"] == "library_said"
    assert (warned["library"], warned["level"]) == ("opentelemetry.exporter", "warning")
    assert warned["problem"] == "no collector, retrying"
    assert (failed["library"], failed["level"]) == ("asyncio", "error")
    assert "ZeroDivisionError" in failed["exception"]
    (only,) = logged("error")
    assert only["library"] == "asyncio"
