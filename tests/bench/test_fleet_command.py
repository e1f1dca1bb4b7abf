"""`kvplane bench fleet` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvplane.bench.fleet import plot
from kvplane.bench.fleet.scenario import Happening, read
from kvplane.bench.rig import BenchError
from kvplane.cli.bench import bench_app
from kvplane.cli.errors import ConfigError, StartError
from tests.bench.test_commands import bench

SHORT = ("--conversations", "25", "--hours", "0.02", "--prefill", "2")


def test_it_prints_tables_and_writes_figures_and_pictures(tmp_path: Path) -> None:
    events = tmp_path / "events.toml"
    events.write_text('[[event]]\nat = "20s"\ndo = "kill"\ndown = 5\n')
    file, picture = tmp_path / "run.json", tmp_path / "run.svg"
    done = bench(
        *("fleet", *SHORT, "--decode", "3", "--events", str(events)),
        *("--json", str(file), "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "follow-ups, cold only" in done.stdout
    assert "must be 0: double claims 0, stale reads 0, freed under reader 0" in done.stdout
    assert "store transactions/s" in done.stdout
    assert ">kill<" in picture.read_text()
    document = json.loads(file.read_text())
    assert document["options"]["decode"] == 3
    assert document["result"]["turns"]["answered"] > 25
    other, compared = tmp_path / "other.json", tmp_path / "compared.svg"
    document["options"]["decode"] = 300
    other.write_text(json.dumps(document))
    plot.compare(compared, [other, file], "decode")
    assert compared.read_text().startswith("<?xml")
    with pytest.raises(BenchError, match=r"other\.json: has no engines"):
        plot.compare(compared, [other], "engines")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plot", "x.pdf"), "must end in .svg or .png"),
        (("--events", "none.toml"), "none.toml: no such file"),
        (("--trace", "none.jsonl"), "none.jsonl"),
        (("--compare", "none.json"), "add --plot FILE"),
        (("--compare", "none.json", "--plot", "x.svg"), "none.json: no such file"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(bench_app, ["fleet", *SHORT, *arguments]).exception
    assert isinstance(refused, ConfigError | StartError)
    assert said in str(refused)
    assert "\n" not in str(refused)


def test_events_are_read_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "events.toml"
    file.write_text(
        '[[event]]\nat = "10m"\ndo = "scale-down"\nrole = "prefill"\ncount = 3\ndrain = "1.5m"\n'
        "[[event]]\nat = 90\ndo = 'stop-plane'\nreplica = 2\ndown = '2h'\n"
    )
    assert read(file) == [
        Happening(90.0, "stop-plane", replica=2, down=7200.0),
        Happening(600.0, "scale-down", "prefill", 3, drain=90.0),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[event]\n", "Expected"),
        ("[[events]]\nat = 1\n", "events: unknown; write each event as [[event]]"),
        ("event = 3\n", "event: write each as [[event]]"),
        ("[[event]]\nat = 1\ndo = 'explode'\n", "event 1: do: 'explode' is none of kill, rolling-restart"),
        ("[[event]]\ndo = 'kill'\n", "event 1: at: missing"),
        ("[[event]]\nat = 'soon'\ndo = 'kill'\n", "event 1: at: 'soon' is no time"),
        ("[[event]]\nat = -1\ndo = 'kill'\n", "event 1: at: -1 is no time"),
        ("[[event]]\nat = 1\ndo = 'kill'\nroll = 'decode'\n", "event 1: roll: unknown; did you mean role?"),
        ("[[event]]\nat = 1\ndo = 'scale-up'\ndrain = 3\n", "event 1: drain: unknown; scale-up knows at, do"),
        ("[[event]]\nat = 1\ndo = 'kill'\nrole = 'both'\n", "role: 'both' is none of prefill, decode"),
        ("[[event]]\nat = 1\ndo = 'kill'\ncount = 1.5\n", "count: 1.5 is no number from 0 to 100,000"),
    ],
)
def test_events_that_make_no_sense_are_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "events.toml"
    file.write_text(text)
    with pytest.raises(BenchError) as raised:
        read(file)
    assert said in str(raised.value)
    assert str(raised.value).startswith(str(file))
