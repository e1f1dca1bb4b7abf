"""The connector's scheduler half on real vLLM classes, in vLLM's own environment.

KVPLANE_VLLM_VENV says which; the versions that count are in `kvplane.connector.compat.RUN_WITH`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "checks",
    [
        "scheduler_checks",
        "params_checks",
        "asking_checks",
        "life_checks",
        "process_checks",
        "group_checks",
        "settings_checks",
        "unit_checks",
    ],
)
def test_checks(checks: str) -> None:
    venv = Path(os.environ.get("KVPLANE_VLLM_VENV") or ROOT / ".venv-vllm")
    assert (venv / "bin" / "python").exists(), f"no vLLM environment at {venv}: run 'make test'"
    paths = [str(ROOT / part) for part in ("", "protos", "store", "controlplane", "connector")]
    done = subprocess.run(
        [venv / "bin" / "python", "-m", f"tests.vllm.{checks}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed with vLLM" in done.stdout
    print(done.stdout.splitlines()[-1])
