"""The comparison as a picture: what each router adds to the first token, and what a request costs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvplane.bench.figures import Row
from kvplane.bench.rig import BenchError

_PANELS = (
    ("first-token", "p50, 1 at a time", "Added to the first token, p50 (ms)", True),
    ("rate", "CPU per 1,000 requests", "CPU per 1,000 requests, no gaps (s)", False),
    ("gaps", "CPU per 1,000 requests", "CPU per 1,000 requests, 5 ms gaps (s)", False),
)
_COLOR, _OTHERS = "#1e8449", "#95a5a6"


def check() -> None:
    """Raise BenchError if there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'kvplane[demo]'") from None


def draw(path: Path, rows: Sequence[Row], ours: str) -> None:
    """Draw what of the panels there are rows for. Raises OSError, ValueError for an unknown file ending."""
    import matplotlib as mpl

    mpl.use("Agg")  # files only, no display
    import matplotlib.pyplot as plt

    chosen = [
        (title, bars)
        for bench, case, title, added in _PANELS
        if (bars := _bars([row for row in rows if row.bench == bench and f": {case}" in row.case], added))
    ]
    figure, axes = plt.subplots(
        1, max(1, len(chosen)), figsize=(4.2 * max(1, len(chosen)), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (title, bars) in zip(axes[0], chosen, strict=False):
        names = list(bars)
        drawn = axis.barh(
            names, list(bars.values()), color=[_COLOR if name == ours else _OTHERS for name in names]
        )
        axis.bar_label(drawn, fmt="%.2f", padding=3)
        axis.margins(x=0.15)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(rows: Sequence[Row], added: bool) -> dict[str, float]:
    figures = {row.case.split(":", 1)[0]: row.difference if added else row.value for row in rows}
    return {name: figure for name, figure in figures.items() if figure is not None}
