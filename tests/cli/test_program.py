"""The program in environments that lack what its commands need."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
for name in {lacking!r}:
    sys.modules[name] = None
sys.argv = ["kvplane", *{arguments!r}]
from kvplane.cli.program import main
sys.exit(main())
"""


def run(lacking: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(lacking=lacking, arguments=arguments)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_it_is_what_pip_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvplane": "kvplane.cli.program:main"}


@pytest.mark.parametrize(
    ("lacking", "arguments"),
    [("typer", ["--help"]), ("orjson", ["serve", "--grpc-port", "0"]), ("uvloop", ["up"])],
)
def test_what_is_not_installed_is_named_with_the_fix(lacking: str, arguments: list[str]) -> None:
    done = run([lacking], *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvplane: {lacking} is not installed: pip install '.[router]'")
    assert done.stderr.count("\n") == 1


def test_an_engine_s_environment_has_the_commands_that_ask_a_control_plane() -> None:
    done = run(["orjson", "uvloop", "grpc_health", "grpc_reflection"], "engines", "--plane", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no control plane answers there" in done.stderr


def test_a_module_of_our_own_that_is_missing_is_a_fault() -> None:
    done = run(["kvplane.cli.run"], "serve")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
