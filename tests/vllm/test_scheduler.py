"""The connector's scheduler half on real vLLM classes, in vLLM's own environment.

KVPLANE_VLLM_VENV says which; the versions that count are in `kvplane.connector.compat.RUN_WITH`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Ended = subprocess.CompletedProcess[str]
CHECKS = [
    "scheduler_checks",
    "params_checks",
    "asking_checks",
    "life_checks",
    "process_checks",
    "group_checks",
    "settings_checks",
    "unit_checks",
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Ended]]]:
    """Those that are asked for, two at any time: most of each is the import of vLLM."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = [str(item.callspec.params["checks"]) for item in here if item.module is request.module]
    with ThreadPoolExecutor(2) as pool:
        yield {checks: pool.submit(run, checks) for checks in wanted}


def run(checks: str) -> Ended:
    venv = Path(os.environ.get("KVPLANE_VLLM_VENV") or ROOT / ".venv-vllm")
    assert (venv / "bin" / "python").exists(), f"no vLLM environment at {venv}: run 'make test'"
    paths = [str(ROOT / part) for part in ("", "protos", "store", "controlplane", "connector")]
    return subprocess.run(
        [venv / "bin" / "python", "-m", f"tests.vllm.{checks}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", CHECKS)
def test_checks(runs: dict[str, Future[Ended]], checks: str) -> None:
    done = runs[checks].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed with vLLM" in done.stdout
    print(done.stdout.splitlines()[-1])
