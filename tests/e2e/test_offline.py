"""Engines inside a program, started in every way vLLM has: without a control plane they serve, and end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.rig.engines import ROOT, EngineSettings, Role

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("multiprocessing", "method", "executor"),
    [("0", "spawn", "uni"), ("1", "fork", "mp"), ("1", "spawn", "mp"), ("1", "fork", "uni")],
)
def test_an_engine_serves_and_ends(
    vllm_environment: Path, model_dir: Path, tmp_path: Path, multiprocessing: str, method: str, executor: str
) -> None:
    settings = EngineSettings(
        role=Role.DECODE,
        venv=vllm_environment,
        model=model_dir,
        log_file=tmp_path / "engine.log",
        core=0,
        kvplane_address="127.0.0.1:1",
        kv_cache_gib=1,
    )
    environment = settings.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    done = subprocess.run(
        [vllm_environment / "bin" / "python", "-m", "tests.e2e.offline", model_dir, executor],
        env=environment
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, "VLLM_WORKER_MULTIPROCESSING_METHOD": method},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "generated 4 tokens" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    assert "connector_started" in done.stdout + done.stderr
    assert "connector_fault" not in done.stdout + done.stderr
