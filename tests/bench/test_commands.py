"""`kvplane bench` as it is called."""

from __future__ import annotations

import json
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.main import main; sys.exit(main())", "bench")
SHORT = ("--seconds", "0.03", "--rounds", "2", "--blocks", "8")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=100, check=False)


def test_rpc_prints_a_table_and_writes_json_and_a_profile(tmp_path: Path) -> None:
    figures, profile = tmp_path / "figures.json", tmp_path / "profile"
    files = ("--json", str(figures), "--profile", str(profile))
    done = bench("rpc", "--only", "attach", *SHORT, *files)
    assert done.returncode == 0, done.stderr
    assert "attach: announcements" in done.stdout
    assert "attach: round 2 of 2" in done.stderr
    assert "Traceback" not in done.stderr
    document = json.loads(figures.read_text())
    (result,) = document["results"]
    assert result["unit"] == "/s"
    assert len(result["rounds"]) == len(result["against"]) == 2
    assert result["target"] == ">= 50000"
    assert document["options"]["profiled"] is True
    assert set(document["versions"]) >= {"grpcio", "kvplane"}
    seen = pstats.Stats(str(profile)).get_stats_profile().func_profiles
    assert "announcement" in seen  # the validation of each


def test_store_prints_a_table() -> None:
    done = bench("store", "memory://", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "store: compare and put: 64 in flight" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("rpc", "--only", "urnary"),
            "known are unary, turns, attach, sight, scale, stall",
        ),
        (("rpc", "--profile", "x"), "add --only with one of unary, turns, attach, stall"),
        (("rpc", "--profile", "x", "--only", "scale"), "--profile: one dump holds one bench"),
        (("store", "redis://h"), "unknown store scheme redis://"),
        (("store", "memory://", "--only", "claims"), "--only claims: unknown; known are contract"),
        (("store", "etcd://127.0.0.1:1?timeout=0.2", *SHORT), "the store does not answer"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("retention", "--max-ttl", "inf"),
        ("retention", "--max-ttl", "1e9"),
        ("retention", "--ms-per-token", "inf"),
        ("retention", "--block-tokens", "99999999999999999999"),
        ("router", "--seconds", "inf"),
        ("router", "--streams", "1000000000"),
    ],
)
def test_a_number_that_nothing_can_be_measured_with_is_refused(command: str, flag: str, value: str) -> None:
    done = bench(command, *([__file__] if command == "retention" else ()), flag, value)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvplane: {flag} {value}: input should be less than or equal to ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--json", "--profile"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "no" / "file"
    done = bench("rpc", "--only", "attach", *SHORT, flag, str(path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"kvplane: {flag} {path}: cannot be written"]
