"""Engines inside a program, started in every way vLLM has: without a control plane they serve, and end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.rig.engines import ROOT, EngineSettings, Role

pytestmark = pytest.mark.vllm

Ended = subprocess.CompletedProcess[str]
WAYS = [("0", "spawn", "uni"), ("1", "fork", "mp"), ("1", "spawn", "mp"), ("1", "fork", "uni")]
"""VLLM_ENABLE_V1_MULTIPROCESSING, how processes are started, and the executor."""


@pytest.fixture(scope="module")
def runs(
    vllm_environment: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str, str], Future[Ended]]]:
    """All of them, two at any time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            way: pool.submit(
                run, vllm_environment, model_dir, tmp_path_factory.mktemp("offline"), number, way
            )
            for number, way in enumerate(WAYS)
        }


def run(venv: Path, model: Path, logs: Path, number: int, way: tuple[str, str, str]) -> Ended:
    multiprocessing, method, executor = way
    settings = EngineSettings(
        role=Role.DECODE,
        venv=venv,
        model=model,
        log_file=logs / "engine.log",
        core=number,
        kvplane_address="127.0.0.1:1",
        kv_cache_gib=1,
    )
    environment = settings.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    return subprocess.run(
        [venv / "bin" / "python", "-m", "tests.e2e.offline", model, executor],
        env=environment
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, "VLLM_WORKER_MULTIPROCESSING_METHOD": method},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_an_engine_serves_and_ends(
    runs: dict[tuple[str, str, str], Future[Ended]], way: tuple[str, str, str]
) -> None:
    done = runs[way].result()
    assert "generated 4 tokens" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    assert "connector_started" in done.stdout + done.stderr
    assert "connector_fault" not in done.stdout + done.stderr
