"""How commands print what they found: tables for people, JSON for programs; all else on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPED_WIDTH = 400
"""Of a table that goes into a file or a pipe: nothing is cut there."""


class Output(StrEnum):
    """How a result is printed."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: float, total: float | None = None, text: str = "") -> None:
        """Say how much is done, of how much, and what is being done."""


def print_json(value: object) -> None:
    """Print a result for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """Print what is no result, for people."""
    typer.echo(text, err=True)


def shown(text: str) -> str:
    """Return a text from elsewhere as a terminal may have it: what is not printable is escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def span(seconds: float | None) -> str:
    """Return a duration for people: "4s", "7m12s", "3h05m", "2d04h"; "-" if there is none."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def count(number: int | None) -> str:
    """Return a number for people, "-" if there is none."""
    return "-" if number is None else f"{number:,}"


def plural(number: int, name: str) -> str:
    """Return a number of things, by the name of one."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def terminal() -> Console:
    """Return where tables go; into a file or a pipe they are as wide as they need."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, emoji=False, width=_PIPED_WIDTH)
    return console


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table without lines; columns whose titles begin with ">" hold numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False)
    for title in columns:
        table.add_column(
            title.removeprefix(">").upper(),
            justify="right" if title.startswith(">") else "left",
            no_wrap=title.startswith(">"),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; see make_table. Into a file or a pipe it is as wide as it needs."""
    console = terminal()
    if console.is_terminal:
        console.print(make_table(columns, rows))
        return
    for line in _lines(columns, rows):
        typer.echo(line)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Give the lines of a table. Rich takes a minute for 100,000 rows."""
    cells = [[title.removeprefix(">").upper() for title in columns], *([*map(shown, row)] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    right = [title.startswith(">") for title in columns]
    for row in cells:
        padded = []
        for cell, width, is_right in zip(row, widths, right, strict=True):
            space = " " * (width - _width(cell))
            padded.append(space + cell if is_right else cell + space)
        yield "  ".join(padded).rstrip()


def _width(text: str) -> int:
    """Return how many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


@contextmanager
def progress(what: str) -> Iterator[Advance]:
    """Show a bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: float, total: float | None = None, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=text or what)

        yield advance
