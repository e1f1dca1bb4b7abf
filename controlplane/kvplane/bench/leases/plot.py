"""The picture of `kvplane bench retention`: what is saved against what is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvplane.bench.leases.curve import ADAPTIVE, FIXED, Point
from kvplane.bench.rig import BenchError

SUFFIXES = (".svg", ".png")
"""What a picture's file may end in."""
_COLORS = {FIXED: "#c0392b", ADAPTIVE: "#1e8449"}


def check() -> None:
    """See that pictures can be drawn at all. Raises BenchError, which says what to install."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'kvplane[demo]'") from None


def draw(path: Path, points: Sequence[Point], trace: str) -> None:
    """Draw hit rate and tokens saved against block-seconds. Raises OSError."""
    import matplotlib as mpl

    mpl.use("Agg")  # files only, no display
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.8), dpi=150)
    heights: tuple[tuple[str, Callable[[Point], float]], ...] = (
        ("follow-up turns that hit", lambda point: point.outcome.hit_rate),
        ("prefill tokens saved, of the longest fixed lease's", lambda point: point.saved_share),
    )
    for axes, (title, height) in zip(panels, heights, strict=True):
        for kind, color in _COLORS.items():
            curve = sorted(
                (point.held_share, height(point))
                for point in points
                if point.kind == kind and point.value is not None
            )
            axes.plot(*zip(*curve, strict=True), marker="o", markersize=4, color=color, label=kind)
        for point in points:
            if point.value is None:
                axes.plot(
                    [point.held_share],
                    [height(point)],
                    marker="*",
                    markersize=13,
                    linestyle="none",
                    color=_COLORS[ADAPTIVE],
                    label="adaptive, as engines do it",
                )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("block-seconds retained, of the longest fixed lease's")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, position: f"{value:.0%}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
    figure.suptitle(f"Leases on {trace}", fontsize=12)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
