"""Engines inside a program, started in every way vLLM has: without a control plane they serve, and end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.rig.engines import ROOT, EngineSettings, Role
from tests.e2e.running import Running

pytestmark = pytest.mark.vllm

Ended = subprocess.CompletedProcess[str]
Way = tuple[str, str]
WAYS: list[Way] = [("0", "uni"), ("1", "mp"), ("1", "uni")]
"""VLLM_ENABLE_V1_MULTIPROCESSING, and the executor. On a CPU vLLM spawns processes, whatever it is told."""


@pytest.fixture(scope="module")
def runs(
    running: Running, vllm_environment: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Way, Future[Ended]]]:
    """All of them, two at any time, and nothing else."""
    running.stop()
    with ThreadPoolExecutor(2) as pool:
        yield {
            way: pool.submit(
                run, vllm_environment, model_dir, tmp_path_factory.mktemp("offline"), number, way
            )
            for number, way in enumerate(WAYS)
        }


def run(venv: Path, model: Path, logs: Path, number: int, way: Way) -> Ended:
    multiprocessing, executor = way
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
        env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_an_engine_serves_and_ends(runs: dict[Way, Future[Ended]], way: Way) -> None:
    done = runs[way].result()
    assert "generated 4 tokens" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    assert "connector_started" in done.stdout + done.stderr
    assert "connector_fault" not in done.stdout + done.stderr
