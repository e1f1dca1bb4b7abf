"""`kvplane bench retention`: leases replayed on a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvplane.bench.leases import curve
from kvplane.bench.leases import plot as picture
from kvplane.bench.leases.replay import MS_PER_TOKEN, Setting
from kvplane.bench.leases.trace import BLOCK_TOKENS, TraceError, link, read
from kvplane.bench.rig import BenchError
from kvplane.cli.bench_output import check_writable
from kvplane.cli.errors import ConfigError, StartError

_PIPED_WIDTH = 120
_SAVED_TARGET = 0.95


def bench_retention(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake's format, JSON lines; may be gzip's.")],
    max_ttl: Annotated[
        float, typer.Option(help="Longest lease in seconds, which all is compared with.", min=1, max=1e7)
    ] = 480,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Blocks that may be retained at once; beyond, turns are given up. Default: no bound.", min=1
        ),
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens per block of the trace.", min=1, max=10**9)
    ] = BLOCK_TOKENS,
    ms_per_token: Annotated[
        float,
        typer.Option(
            help="Time a reply takes for each token; a turn is retained from its end on.", min=0, max=1e6
        ),
    ] = MS_PER_TOKEN,
    seed: Annotated[int, typer.Option(help="Of what adaptive leases leave to chance.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help=f"Also draw the curve to this file: {' or '.join(picture.SUFFIXES)}.")
    ] = None,
) -> None:
    """Replay a trace: prefill tokens saved against KV retained, for fixed and for adaptive leases.

    Adaptive leases are those of the engines' own code, which knows nothing at the beginning of the trace and
    learns as it goes; fixed ones are the same for all turns. With --budget, fixed leases give up the oldest
    turn first, adaptive ones that with the fewest tokens to be saved per block-second.

    The trace has one JSON object a line, in order of arrival: timestamp (ms), input_length, output_length,
    hash_ids (one for each block of the prompt). Which request continues which is inferred from the ids. A
    turn ends --ms-per-token for each token of its reply after its arrival; its blocks are retained from then
    until the conversation comes back, the lease ends, or the trace does.
    """
    check_writable("--json", json)
    check_writable("--plot", plot)
    if plot is not None and plot.suffix not in picture.SUFFIXES:
        raise ConfigError(f"--plot {plot}: must end in {' or '.join(picture.SUFFIXES)}")
    plan = curve.Plan(max_ttl, Setting(block_tokens, ms_per_token, budget), seed=seed)
    try:
        if plot is not None:
            picture.check()
        with _bar() as bar:
            task = bar.add_task("reading", total=trace.stat().st_size if trace.exists() else None)
            requests = read(trace, block_tokens, lambda size: bar.advance(task, size))
            turns = link(requests, block_tokens)
            bar.reset(task, total=plan.replays * len(turns))
            points = curve.run(
                turns,
                plan,
                begun=lambda name: bar.update(task, description=name),
                told=lambda count: bar.advance(task, count),
            )
        _show(points, trace.name)
    except (TraceError, BenchError) as error:
        raise StartError(str(error)) from None
    for flag, path in (("--json", json), ("--plot", plot)):
        if path is None:
            continue
        try:
            if flag == "--json":
                curve.write(path, points, plan, trace.name)
            else:
                picture.draw(path, points, trace.name)
        except OSError as error:
            raise StartError(f"{flag} {path}: {(error.strerror or 'cannot be written').lower()}") from None


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield progress


def _show(points: Sequence[curve.Point], trace: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    first = points[0].outcome
    console.print(
        f"{trace}: {first.turns:,} turns, {first.follow_ups:,} of them follow-ups,"
        f" {first.prompt_tokens:,} prompt tokens"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("leases", no_wrap=True)
    for title in (
        "hits",
        "tokens saved",
        "of longest",
        "block-seconds",
        "of longest",
        "most blocks",
        "given up",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for point in points:
        outcome = point.outcome
        table.add_row(
            point.name,
            f"{outcome.hit_rate:.1%}",
            f"{outcome.tokens_saved:,}",
            f"{point.saved_share:.1%}",
            f"{outcome.block_seconds:,.0f}",
            f"{point.held_share:.1%}",
            f"{outcome.most_blocks:,}",
            f"{outcome.given_up:,}" if outcome.given_up else "",
        )
    console.print(table)
    at = {kind: curve.held_share_at(points, kind, _SAVED_TARGET) for kind in (curve.ADAPTIVE, curve.FIXED)}
    shown = [f"{kind} {held:.1%}" for kind, held in at.items() if held is not None]
    if shown:
        console.print(f"{_SAVED_TARGET:.0%} of the tokens saved at, of the block-seconds: {', '.join(shown)}")
