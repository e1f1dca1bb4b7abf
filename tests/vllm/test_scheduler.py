"""The connector's scheduler half on real vLLM classes, in vLLM's own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
def test_scheduler_checks() -> None:
    venv = Path(os.environ.get("KVPLANE_VLLM_VENV") or ROOT / ".venv-vllm")
    assert (venv / "bin" / "python").exists(), f"no vLLM environment at {venv}: run 'make test'"
    paths = [str(ROOT / part) for part in ("protos", "store", "controlplane", "connector")]
    done = subprocess.run(
        [venv / "bin" / "python", Path(__file__).with_name("scheduler_checks.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
