"""What the bench commands share: flags checked beforehand, progress, a table, a file."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvplane.bench import report
from kvplane.bench.figures import Cpu, Row
from kvplane.bench.rig import Options
from kvplane.cli.errors import ConfigError, StartError

_PIPED_WIDTH = 170


def chosen(only: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the known names that were asked for, in their own order. Raises ConfigError."""
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: unknown; known are {', '.join(known)}")
    return [name for name in known if name in only]


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes are spent on what goes into it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path}: cannot be written")


def finish(rows: Sequence[Row], options: Options, store: str, path: Path | None) -> None:
    """Print the table, and write the file if there is to be one. Raises StartError."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    console.print(_table(rows))
    if path is not None:
        try:
            report.write(path, rows, options, store)
        except OSError as error:
            raise StartError(f"--json {path}: {(error.strerror or 'cannot be written').lower()}") from None


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done. Nothing is drawn while something is measured."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def tell(text: str) -> None:
            bar.update(task, description=text)
            bar.refresh()

        yield tell


def _table(rows: Sequence[Row]) -> Table:
    titles = (
        "what",
        "figure",
        "spread",
        "per core",
        "against",
        "ratio",
        "target",
        "",
        "cpu server/client",
        "note",
    )
    lines = [_line(row) for row in rows]
    used = [index for index in range(len(titles)) if any(line[index] for line in lines)]
    table = Table(box=None, pad_edge=False)
    for index in used:
        text = titles[index] in ("what", "note")
        table.add_column(titles[index], justify="left" if text else "right", no_wrap=not text)
    for line in lines:
        table.add_row(*(line[index] for index in used))
    return table


def _line(row: Row) -> tuple[str, ...]:
    return (
        f"{row.bench}: {row.case}",
        _number(row.value, row.unit),
        f"±{row.spread:.0%}" if len(row.rounds) > 1 else "",
        _number(row.per_core, row.unit) if row.per_core is not None else "",
        _number(statistics.median(row.against), row.unit) if row.against else "",
        f"{row.ratio:.2f}x" if row.ratio is not None else "",
        str(row.target) if row.target else "",
        {True: "met", False: "missed", None: ""}[row.met],
        _shares(row.cpu),
        row.note,
    )


def _number(value: float, unit: str) -> str:
    if unit == "ms" and abs(value) < 0.1:
        value, unit = value * 1000, "us"
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{shown}{unit}" if unit.startswith("/") else f"{shown} {unit}".rstrip()


def _shares(cpu: Cpu | None) -> str:
    return f"{cpu.server:.0%}/{cpu.client:.0%}" if cpu is not None else ""
