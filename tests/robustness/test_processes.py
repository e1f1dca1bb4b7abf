"""The suite's own tools: a replica whose clock steps, and processes that stop and go on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from deploy.rig.process import RigError
from kvplane.store.clock import SystemClock
from tests.robustness.processes import Pausable
from tests.robustness.stepped_serve import SteppedClock, step

TICKS = "import time\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.01)"


def test_a_stepped_clock_follows_its_file_and_leaves_monotonic_time_alone(tmp_path: Path) -> None:
    path = tmp_path / "clock"
    step(path, 60.0)
    clock, right = SteppedClock(path), SystemClock()
    assert clock.now_ms() - right.now_ms() == pytest.approx(60_000, abs=500)
    step(path, -60.0)
    assert clock.now_ms() - right.now_ms() == pytest.approx(-60_000, abs=500)
    assert clock.monotonic() - right.monotonic() == pytest.approx(0.0, abs=0.5)


class Ticking(Pausable):
    def is_ready(self) -> bool:
        return self.size() > 0

    def size(self) -> int:
        return self.log_file.stat().st_size if self.log_file.exists() else 0


def test_a_paused_process_does_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TICKS]
    process = Ticking("ticks", command, environment={}, log_file=tmp_path / "log", ready_url="")
    with pytest.raises(RigError):
        process.pause()
    with process:
        process.wait_ready(10.0)
        process.pause()
        time.sleep(0.1)
        size = process.size()
        time.sleep(0.2)
        assert process.size() == size
        process.resume()
        ends = time.monotonic() + 5.0
        while process.size() == size:
            assert time.monotonic() < ends
            time.sleep(0.01)
        process.pause()
    assert not process.running, "a paused process can be stopped"
