"""Turn rows into a table, `results.json` and two pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only, no display

import matplotlib.pyplot as plt  # the back end has to be chosen first
from matplotlib.ticker import LogLocator, NullLocator
from rich.table import Table

from deploy.demo.measure import DIRECT, OFF, PATHS, PULL, Row

TTFT_PICTURE = "ttft.png"
SPLIT_PICTURE = "prefill-split.png"
RESULTS = "results.json"
NAMES = {OFF: "off", PULL: "pull", DIRECT: "direct"}
LINE_COLORS = {OFF: "#c0392b", PULL: "#2471a3", DIRECT: "#1e8449"}
PARTS = (
    ("compute_ms", "compute", "#34495e"),
    ("transfer_ms", "transfer", "#e67e22"),
    ("other_ms", "other", "#d5d8dc"),
)


def as_json(row: Row) -> dict[str, Any]:
    """One member of results.json. Medians; pulled and recomputed tokens are those of the pull path.

    Every path has texts of its own, so the prompts differ by a few tokens: `prompt_tokens` is the median of
    all, `prompt_tokens_by_path` that of each.
    """
    prompt = [sample.prompt_tokens for path in PATHS for sample in row.samples[path]]
    return {
        "prompt_tokens": sorted(prompt)[len(prompt) // 2],
        "off_ms": round(row.median(OFF, "ttft_ms"), 1),
        "pull_ms": round(row.median(PULL, "ttft_ms"), 1),
        "direct_ms": round(row.median(DIRECT, "ttft_ms"), 1),
        "pulled_tokens": round(row.median(PULL, "reused_tokens")),
        "recomputed_tokens": round(row.median(PULL, "computed_tokens")),
        "direct_reused_tokens": round(row.median(DIRECT, "reused_tokens")),
        "direct_recomputed_tokens": round(row.median(DIRECT, "computed_tokens")),
        "reuse_turns": row.reuse_turns,
        "hits": row.hits,
        "split": {
            NAMES[path]: {
                member: round(row.median(path, member), 1)
                for member in ("compute_ms", "transfer_ms", "other_ms", "copy_ms")
            }
            for path in PATHS
        },
        "prompt_tokens_by_path": {NAMES[path]: round(row.median(path, "prompt_tokens")) for path in PATHS},
        "samples_ms": {
            NAMES[path]: [round(sample.ttft_ms, 1) for sample in row.samples[path]] for path in PATHS
        },
    }


SETTING = (
    "tiny model on CPU; prefix cache of P off, as where P evicted the conversation or another P gets the turn"
)
"""What the figures hold for; said wherever they are shown."""


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The table that ends the demo."""
    out = Table(title="Time to first token of a follow-up turn (median)", caption=SETTING)
    for heading in (
        "prompt\ntokens",
        "off\nms",
        "pull\nms",
        "direct\nms",
        "off /\npull",
        "off /\ndirect",
        "tokens\npulled",
        "tokens\nrecomputed",
    ):
        out.add_column(heading, justify="right")
    for row in results:
        out.add_row(
            f"{row['prompt_tokens']:,}",
            f"{row['off_ms']:,.0f}",
            f"{row['pull_ms']:,.0f}",
            f"{row['direct_ms']:,.0f}",
            f"{row['off_ms'] / row['pull_ms']:.1f}x",
            f"{row['off_ms'] / row['direct_ms']:.1f}x",
            f"{row['pulled_tokens']:,}",
            f"{row['recomputed_tokens']:,}",
        )
    return out


def write(results: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Write results.json and both pictures into the folder `out`; returns their paths."""
    results_file = out / RESULTS
    results_file.write_text(json.dumps(list(results), indent=1) + "\n")
    _ttft_picture(results, out / TTFT_PICTURE)
    _split_picture(results, out / SPLIT_PICTURE)
    return [results_file, out / TTFT_PICTURE, out / SPLIT_PICTURE]


def _ttft_picture(results: Sequence[dict[str, Any]], file: Path) -> None:
    """TTFT against prompt length, a line for each path."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    lengths = [row["prompt_tokens"] for row in results]
    for path in PATHS:
        values = [row[f"{NAMES[path]}_ms"] for row in results]
        axes.plot(lengths, values, marker="o", color=LINE_COLORS[path], label=NAMES[path])
        axes.annotate(
            f"  {values[-1]:,.0f} ms",
            (lengths[-1], values[-1]),
            color=LINE_COLORS[path],
            va="center",
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.set_xlim(0, max(lengths) * 1.18)
    axes.set_xlabel("prompt tokens of the follow-up turn")
    axes.set_ylabel("time to first token (ms, logarithmic)")
    figure.suptitle("Follow-up turn: reuse off, pull from D, direct on D", fontsize=12)
    axes.set_title(SETTING, fontsize=8)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _split_picture(results: Sequence[dict[str, Any]], file: Path) -> None:
    """For each path, where the time to the first token went; every panel has a scale of its own."""
    figure, panels = plt.subplots(1, len(PATHS), figsize=(13, 4.5), dpi=150)
    labels = [f"{row['prompt_tokens']:,}" for row in results]
    for path, axes in zip(PATHS, panels, strict=True):
        bottom = [0.0] * len(results)
        for member, name, color in PARTS:
            values = [row["split"][NAMES[path]][member] for row in results]
            axes.bar(labels, values, bottom=bottom, color=color, label=name, width=0.7)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set_title(NAMES[path])
        axes.set_xlabel("prompt tokens")
        axes.tick_params(axis="x", labelrotation=45)
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0].set_ylabel("ms (each panel has its own scale)")
    panels[0].legend(frameon=False)
    figure.suptitle(f"Prefill time of a follow-up turn: compute and transfer\n{SETTING}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
