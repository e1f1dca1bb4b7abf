"""`kvplane bench`: figures on standard output, progress on standard error."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvplane.bench import report, rpc, stored
from kvplane.bench.figures import Cpu, Row
from kvplane.bench.process import ServerDiedError
from kvplane.bench.rig import BenchError, Options
from kvplane.cli.config import ConfigError
from kvplane.cli.run import StartError
from kvplane.store.url import StoreUrlError

bench_app = typer.Typer(
    help="Measure what the control plane and its stores cost on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_PIPED_WIDTH = 170

Seconds = Annotated[float, typer.Option(help="Length of each measured stretch.", min=0.01)]
Rounds = Annotated[
    int,
    typer.Option(help="Times each is measured, in turn with the others; medians are shown.", min=1),
]
Blocks = Annotated[int, typer.Option(help="KV blocks (of 16 tokens) that each conversation retains.", min=1)]
Json = Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")]


@bench_app.command("rpc")
def bench_rpc(
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this bench: {', '.join(rpc.BENCHES)}. May be repeated."),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help=f"Also run {' and '.join(rpc.LARGE)}: several minutes, and some 10 GB of memory.",
        ),
    ] = False,
    seconds: Seconds = 1.0,
    rounds: Rounds = 5,
    blocks: Blocks = 64,
    json: Json = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Write a cProfile dump of the control plane in the measured stretches to this file;"
            " needs one --only, not scale. It slows the control plane down, so the figures then say nothing."
        ),
    ] = None,
) -> None:
    """Measure the API over loopback, store in memory, next to bare gRPC in the same run.

    The control plane runs in a process pinned to the first core, the load generator in another, pinned to
    the second; with one core, or where processes cannot be pinned, they share. Both sides' CPU is shown
    (server/client): a rate says something about the control plane only while the server's is near 100 % and
    the client's is not. "per core" is what a rate would be if nothing else had used the server's core. The
    bare server is a grpc.aio server on the same event loop that answers as many bytes and does nothing
    else, not even protobuf. Ratios hold on other machines, absolute figures do not.

    unary: lookup, begin-turn and claim as single calls. turns: begin-turn and claim over the Turns stream;
    each conversation is announced before and claimed once, and all answers are checked. attach:
    announcements over an engine's stream. scale: the control plane's CPU time per operation, over the
    streams, at 1,000, 100,000 and 1,000,000 live conversations, and its memory per conversation; also at
    100,000 of 500 blocks each. stall: lookups every 5 ms while 100,000 locations expire at one instant.
    """
    names = _chosen(only, list(rpc.BENCHES)) if only else [*rpc.QUICK, *(rpc.LARGE if scale else ())]
    if profile is not None and (len(names) != 1 or names[0] not in rpc.PROFILABLE):
        known = ", ".join(name for name in rpc.BENCHES if name in rpc.PROFILABLE)
        raise ConfigError(f"--profile: one dump holds one bench; add --only with one of {known}")
    _check_writable("--json", json)
    _check_writable("--profile", profile)
    with _progress() as tell:
        options = Options(seconds, rounds, blocks, profile=profile, progress=tell)
        rows = _measured(lambda: rpc.run(names, options))
    _finish(rows, options, "memory://", json)


@bench_app.command("store")
def bench_store(
    url: Annotated[str, typer.Argument(help="The store: memory:// or etcd://host:port[,host:port...].")],
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this bench: {stored.CONTRACT}, {stored.CLAIMS}. May be repeated."),
    ] = None,
    seconds: Seconds = 1.0,
    rounds: Rounds = 5,
    blocks: Blocks = 64,
    json: Json = None,
) -> None:
    """Measure a store, next to bare etcd transactions in the same run.

    contract: the store's transactions, reads and lease grants, called in this process, with 1 and 64 in
    flight. claims (etcd only): transactions with the compares, writes and sizes of a claim, by the store,
    which commits those that come together as one, and whole claims through a control plane in a process of
    its own. One in flight is against the same transaction sent to etcd bare; 64 in flight are against the
    same store and control plane without group commit.

    An etcd given here is loaded as hard as it can be: do not give one that others depend on. All keys lie
    below a prefix of their own, /kvplane-bench-..., and are removed. etcd commits to its disk, so the figures
    are the disk's as much as etcd's; its own CPU is not shown.
    """
    try:
        known = stored.names(url)
        names = _chosen(only, known) if only else known
        _check_writable("--json", json)
        with _progress() as tell:
            options = Options(seconds, rounds, blocks, progress=tell)
            rows = _measured(lambda: stored.run(url, names, options))
        _finish(rows, options, stored.shown(url), json)
    except StoreUrlError as error:
        raise StartError(str(error)) from None


def _chosen(only: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: unknown; known are {', '.join(known)}")
    return [name for name in known if name in only]


def _check_writable(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes are spent on what goes into it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path}: cannot be written")


def _measured(measure: Callable[[], list[Row]]) -> list[Row]:
    try:
        return measure()
    except (BenchError, ServerDiedError) as error:
        raise StartError(str(error)) from None


def _finish(rows: Sequence[Row], options: Options, store: str, path: Path | None) -> None:
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
def _progress() -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done. Nothing is drawn while something is measured."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def tell(text: str) -> None:
            progress.update(task, description=text)
            progress.refresh()

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
