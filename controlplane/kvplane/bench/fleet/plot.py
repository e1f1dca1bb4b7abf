"""Pictures of `kvplane bench fleet`: a run over time, and how figures grow with the fleet."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvplane.bench.fleet.outcome import Outcome
from kvplane.bench.fleet.recorder import Sample
from kvplane.bench.rig import BenchError

SUFFIXES = (".svg", ".png")
"""What a picture's file may end in."""
_BLUE, _RED, _GREEN, _GREY = "#2471a3", "#c0392b", "#1e8449", "#7f8c8d"

Curve = tuple[str, str, Callable[[Sample], float]]


def check() -> None:
    """See that pictures can be drawn at all. Raises BenchError, which says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'kvplane[demo]'") from None


def draw(path: Path, shown: Outcome, title: str, marks: Sequence[tuple[float, str]] = ()) -> None:
    """Draw a run over time; `marks` are moments (in seconds) with a word each. Raises OSError."""
    plt = _pyplot()
    samples = _while_busy(shown.samples)
    panels: tuple[tuple[str, bool, tuple[Curve, ...]], ...] = (
        (
            "follow-up turns that hit; requests that failed",
            True,
            (
                ("hits", _GREEN, lambda s: s.hits / s.follow_ups if s.follow_ups else 0.0),
                ("failed", _RED, lambda s: s.broken / (s.turns + s.broken) if s.turns + s.broken else 0.0),
            ),
        ),
        (
            "time to first token, seconds",
            False,
            (
                ("p50", _BLUE, lambda s: s.ttft_p50_s),
                ("p99", _RED, lambda s: s.ttft_p99_s),
            ),
        ),
        (
            "share of decode engines' blocks; of prefill engines' time",
            True,
            (
                ("retained", _GREEN, lambda s: s.retained_share),
                ("in use", _BLUE, lambda s: s.used_share),
                ("prefill busy", _RED, lambda s: s.prefill_busy),
            ),
        ),
        (
            "control plane, per second",
            False,
            (
                ("operations", _BLUE, lambda s: s.operations_per_s),
                ("store transactions", _RED, lambda s: s.transactions_per_s),
            ),
        ),
    )
    figure, grid = plt.subplots(2, 2, figsize=(11, 6.6))
    minutes = [sample.at_s / 60 for sample in samples]
    for axes, (heading, is_share, curves) in zip(grid.flat, panels, strict=True):
        for name, color, height in curves:
            axes.plot(minutes, [height(sample) for sample in samples], color=color, linewidth=1.2, label=name)
        _dress(axes, heading, is_share=is_share)
        if heading.endswith("seconds"):
            axes.set_yscale("log")
        for at_s, word in marks:
            axes.axvline(at_s / 60, color=_GREY, linewidth=0.7, linestyle="--")
            axes.annotate(
                word,
                (at_s / 60, 1.0),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=6,
                color=_GREY,
                va="top",
                ha="right",
            )
        axes.set_xlabel("minutes")
    _save(plt, figure, path, title)


def compare(path: Path, files: Sequence[Path], x: str) -> None:
    """Draw figures of several runs (their JSON files) against one of their options.

    `x` names the option, as the files have it. Raises BenchError for files that are none, OSError.
    """
    plt = _pyplot()
    runs = sorted((_run(file, x) for file in files), key=lambda run: run[0])
    panels: tuple[tuple[str, bool, tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...]], ...] = (
        (
            "follow-up turns that hit; share of blocks retained",
            True,
            (
                ("hits", _GREEN, lambda r: r["hit_rate"]),
                ("retained, mean", _BLUE, lambda r: r["retained_share"][0]),
                ("prefill busy", _RED, lambda r: r["prefill_busy"]),
            ),
        ),
        (
            "time to first token of follow-ups, seconds",
            False,
            (
                ("p50", _BLUE, lambda r: _follow_ups(r["lines"])[0]),
                ("p99", _RED, lambda r: _follow_ups(r["lines"])[2]),
                ("p50, cold only", _GREY, lambda r: _follow_ups(r["cold_only"])[0]),
            ),
        ),
        (
            "control plane, per second, busiest tenth",
            False,
            (
                ("operations", _BLUE, lambda r: r["load"]["peak_operations_per_s"]),
                ("store transactions", _RED, lambda r: r["load"]["peak_transactions_per_s"]),
            ),
        ),
        (
            "records of the store, MB in memory",
            False,
            (("one replica", _BLUE, lambda r: r["load"]["most_record_bytes"] / 1e6),),
        ),
    )
    figure, grid = plt.subplots(2, 2, figsize=(11, 6.6))
    for axes, (heading, is_share, curves) in zip(grid.flat, panels, strict=True):
        for name, color, height in curves:
            points = [(at, height(run)) for at, run in runs]
            points = [(at, value) for at, value in points if value == value]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=name)
        _dress(axes, heading, is_share=is_share)
        if heading.endswith("seconds"):
            axes.set_yscale("log")
        if runs[-1][0] > 20 * max(runs[0][0], 1e-9):
            axes.set_xscale("log")
        axes.set_xlabel(x)
    _save(plt, figure, path, f"by {x}")


def _run(file: Path, x: str) -> tuple[float, dict[str, Any]]:
    try:
        document = json.loads(file.read_text())
        value = float(document["options"][x])
        return value, document["result"]
    except OSError as error:
        raise BenchError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from None
    except (ValueError, TypeError):
        raise BenchError(f"{file}: is no file of kvplane bench fleet --json, or {x} is no number") from None
    except KeyError as error:
        raise BenchError(f"{file}: has no {error.args[0]}; is it of kvplane bench fleet --json?") from None


def _follow_ups(lines: Sequence[dict[str, Any]] | None) -> list[float]:
    for line in lines or ():
        if line["name"] == "follow-ups":
            return list(line["ttft_s"])
    return [float("nan")] * 3


def _while_busy(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples up to where hardly any turns are left: a few slow conversations go on for long."""
    usual = statistics.median([sample.turns for sample in samples if sample.turns] or [0])
    last = max((place for place, sample in enumerate(samples) if sample.turns >= usual / 2), default=0)
    return [sample for sample in samples[: last + 1] if sample.turns] or list(samples)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")  # files only, no display
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "kvplane"  # the same figures make the same file
    import matplotlib.pyplot as plt

    return plt


def _dress(axes: Any, heading: str, *, is_share: bool) -> None:
    axes.set_title(heading, fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    if not heading.endswith("seconds"):
        axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    if is_share:
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:.0%}")
    axes.legend(frameon=False, fontsize=7)
    axes.tick_params(labelsize=7)


def _save(plt: Any, figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
