"""`kvplane bench fleet`: a fleet in simulated time."""

from __future__ import annotations

import dataclasses
import json as encoding
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvplane.bench.fleet import plot as picture
from kvplane.bench.fleet import scenario
from kvplane.bench.fleet.decode import Keeping
from kvplane.bench.fleet.engines import Speeds
from kvplane.bench.fleet.fleet import Plan
from kvplane.bench.fleet.outcome import Line, Outcome
from kvplane.bench.fleet.run import run
from kvplane.bench.fleet.workload import Workload, templates
from kvplane.bench.leases.replay import MS_PER_TOKEN
from kvplane.bench.leases.trace import BLOCK_TOKENS, TraceError, link, read
from kvplane.bench.rig import BenchError
from kvplane.cli.bench_output import check_writable
from kvplane.cli.errors import ConfigError, StartError
from kvplane.cli.logs import configure_logs
from kvplane.cli.tenant_limits import LimitsFile
from kvplane.controlplane.model import Settings

_PIPED_WIDTH = 120
_SPEEDS = Speeds()


def bench_fleet(
    prefill: Annotated[int, typer.Option(help="Prefill engines.", min=1, max=10_000)] = 2,
    decode: Annotated[int, typer.Option(help="Decode engines.", min=1, max=10_000)] = 4,
    conversations: Annotated[int, typer.Option(help="Conversations in all.", min=1, max=10_000_000)] = 1000,
    hours: Annotated[
        float,
        typer.Option(help="Hours within which they begin; all are played to the end.", min=0.001, max=48),
    ] = 0.5,
    turns: Annotated[float, typer.Option(help="Turns of a conversation, on average.", min=1, max=100)] = 4,
    agents: Annotated[
        float, typer.Option(help="Share of conversations that are agents, which call tools.", min=0, max=1)
    ] = 0.5,
    pause: Annotated[float, typer.Option(help="Factor of people's pauses.", min=0.01, max=100)] = 1,
    bursty: Annotated[
        bool, typer.Option("--bursty", help="They come in bursts: for a minute in five, three times as many.")
    ] = False,
    tenants: Annotated[int, typer.Option(help="Tenants; the first have most.", min=1, max=1000)] = 8,
    trace: Annotated[
        Path | None,
        typer.Option(help="Draw conversations from a trace in Mooncake's format, instead of making them up."),
    ] = None,
    routers: Annotated[int, typer.Option(help="Router processes.", min=1, max=1000)] = 2,
    replicas: Annotated[
        int,
        typer.Option(
            help="Control planes; more than one share a store, as over etcd, and take longer.", min=1, max=16
        ),
    ] = 1,
    blocks: Annotated[int, typer.Option(help="KV blocks of each engine.", min=64, max=1_000_000)] = 8192,
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.", min=16, max=1024)] = 64,
    retain: Annotated[
        float, typer.Option(help="Share of decode engines' blocks for retention.", min=0, max=1)
    ] = 0.5,
    ttl: Annotated[
        float | None,
        typer.Option(help="Seconds that a turn is kept; default: learned, as engines do.", min=1, max=480),
    ] = None,
    tenant_limits: Annotated[
        Path | None, typer.Option(help="Limits of tenants, named tenant-0 and so on; as for kvplane serve.")
    ] = None,
    prefill_rate: Annotated[
        float, typer.Option(help="Prompt tokens a second that a prefill engine computes.", min=1)
    ] = _SPEEDS.prefill,
    decode_prefill_rate: Annotated[
        float, typer.Option(help="The same of a decode engine, on the direct path.", min=1)
    ] = _SPEEDS.decode_prefill,
    decode_rate: Annotated[
        float, typer.Option(help="Tokens a second of a stream that is alone on its engine.", min=0.1)
    ] = _SPEEDS.decode,
    transfer_rate: Annotated[
        float, typer.Option(help="Tokens a second whose KV an engine reads from another.", min=1)
    ] = _SPEEDS.transfer,
    events: Annotated[
        Path | None,
        typer.Option(help="What happens to the fleet: a TOML file of [[event]]s; see deploy/SIZING.md."),
    ] = None,
    cold_only: Annotated[
        bool,
        typer.Option("--cold-only/--no-cold-only", help="Also play it without reuse, to compare with."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of all that is left to chance.", min=0)] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help=f"Also draw the run over time: {' or '.join(picture.SUFFIXES)}."),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Run nothing: draw --plot from files of --json, against --by. May be repeated."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="Option by which runs are compared, as --json names it.")
    ] = "decode",
) -> None:
    """Simulate a fleet: modelled engines around the real control plane, routers' choices and leases.

    Nothing sleeps: time is simulated, an hour of a large fleet takes minutes of one core. Engines are
    modelled: queues, prefix caches, KV blocks, rates. What decides is the software itself: the control plane
    over a store in memory, the routers' planner with all that it learns, the connectors' retention, leases
    and fingerprints. HTTP and gRPC are left out, so their CPU is not in the figures.

    An oracle looks into the engines' blocks at the beginning and end of each read: claims given out twice,
    reads of what is something else by then, and blocks freed under a reader are counted, and are to be 0;
    else the command fails.
    """
    check_writable("--json", json)
    check_writable("--plot", plot)
    if plot is not None and plot.suffix not in picture.SUFFIXES:
        raise ConfigError(f"--plot {plot}: must end in {' or '.join(picture.SUFFIXES)}")
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in locals().items()
        if name not in ("json", "plot", "compare", "by")
    }
    try:
        if plot is not None:
            picture.check()
        if compare:
            _compare(plot, compare, by)
            return
        plan = Plan(
            prefill=prefill,
            decode=decode,
            routers=routers,
            replicas=replicas,
            prefill_blocks=blocks,
            decode_blocks=blocks,
            block_tokens=block_tokens,
            workload=Workload(
                conversations=conversations,
                hours=hours,
                turns=turns,
                agents=agents,
                tenants=tenants,
                bursty=bursty,
                pause=pause,
                seed=seed,
            ),
            speeds=Speeds(prefill_rate, decode_prefill_rate, decode_rate, transfer=transfer_rate),
            keeping=Keeping(retain_fraction=retain, ttl_s=ttl),
            settings=Settings(max_conversations=max(Settings().max_conversations, 2 * conversations)),
            limits=LimitsFile(str(tenant_limits)).current if tenant_limits is not None else None,
            events=tuple(scenario.read(events)) if events is not None else (),
        )
        if trace is not None:
            drawn = templates(link(read(trace, BLOCK_TOKENS), BLOCK_TOKENS), MS_PER_TOKEN)
            plan = dataclasses.replace(plan, steps=tuple(drawn))
        # Hundreds of engines log what one would.
        configure_logs("critical")
        with _bar(conversations) as (begun, told):
            shown = run(plan, compared=cold_only, begun=begun, told=told)
    except (BenchError, TraceError) as error:
        raise StartError(str(error)) from None
    _show(shown, plan)
    for flag, path in (("--json", json), ("--plot", plot)):
        if path is None:
            continue
        try:
            if flag == "--json":
                document = {"options": options, "result": shown.document()}
                path.write_text(encoding.dumps(document, indent=1) + "\n")
            else:
                marks = [(2.0 + event.at, event.do) for event in plan.events]
                picture.draw(path, shown, _title(plan), marks)
        except OSError as error:
            raise StartError(f"{flag} {path}: {(error.strerror or 'cannot be written').lower()}") from None
    if any(shown.wrong.values()):
        raise StartError(f"what must not happen did: {'; '.join(shown.examples)}")


def _compare(plot: Path | None, files: list[Path], by: str) -> None:
    if plot is None:
        raise ConfigError("--compare: add --plot FILE, where the picture is to go")
    try:
        picture.compare(plot, files, by)
    except OSError as error:
        raise StartError(f"--plot {plot}: {(error.strerror or 'cannot be written').lower()}") from None


@contextmanager
def _bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting", total=total)
        yield (
            lambda name: progress.reset(task, total=total, description=name),
            lambda count: progress.advance(task, count),
        )


def _title(plan: Plan) -> str:
    load = plan.workload
    return (
        f"{plan.prefill}P + {plan.decode}D, {load.conversations:,} conversations in {load.hours:g} h,"
        f" {plan.replicas} control plane{'s' if plan.replicas > 1 else ''}"
    )


def _show(shown: Outcome, plan: Plan) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    console.print(f"{_title(plan)}: {shown.simulated_s / 3600:.2f} h simulated in {shown.cpu_s:.0f} s of CPU")
    table = Table(box=None, pad_edge=False)
    table.add_column("turns", no_wrap=True)
    for title in ("count", "hits", "prompt tokens", "reused", "own cache", "TTFT p50", "p90", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for line in shown.lines:
        _row(table, line.name, line)
    for line in shown.cold_only or ():
        if line.name in ("first", "follow-ups"):
            _row(table, f"{line.name}, cold only", line)
    console.print(table)
    _say(console, "ended", {**shown.turns, **shown.requests})
    _say(console, "claims", shown.claims)
    _say(console, "must be 0", {name.replace("_", " "): count for name, count in shown.wrong.items()})
    mean, most = shown.retained_share
    console.print(
        f"retained: {mean:.1%} of decode engines' blocks on average, {most:.1%} at most;"
        f" {shown.retained_conversations:,} conversations at most;"
        f" prefill engines {shown.prefill_busy:.0%} busy; {shown.running:,.0f} streams"
    )
    if shown.load is not None:
        _show_load(console, shown)
    console.print(f"memory of this simulation: {shown.peak_rss_bytes / 2**30:.2f} GiB at most")


def _show_load(console: Console, shown: Outcome) -> None:
    load = shown.load
    assert load is not None
    table = Table(box=None, pad_edge=False)
    table.add_column("control plane", no_wrap=True)
    for title in ("count", "per second", "CPU us"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, (count, rate, cpu_us) in load.operations.items():
        table.add_row(
            name.replace("_", " "), f"{count:,}", f"{rate:,.1f}", f"{cpu_us:,.0f}" if cpu_us else ""
        )
    console.print(table)
    console.print(
        f"busiest tenth of the time: {load.peak_operations_per_s:,.0f} operations/s ({load.cores:.2f} cores"
        f" without gRPC), {load.peak_transactions_per_s:,.0f} store transactions/s,"
        f" {load.peak_written_bytes_per_s / 1e6:.2f} MB/s written"
    )
    _say(console, "store writes", load.writes)
    console.print(
        f"records: {load.most_records:,} at most, {load.most_record_bytes / 1e6:,.1f} MB in memory;"
        f" {load.attempts:,} transactions made anew"
    )


def _say(console: Console, what: str, counts: dict[str, int]) -> None:
    said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    console.print(f"{what}: {said}")


def _row(table: Table, name: str, line: Line) -> None:
    def share(part: int) -> str:
        return f"{part / line.prompt_tokens:.1%}" if line.prompt_tokens and part else ""

    hits = f"{line.hits / line.turns:.1%}" if line.turns and line.name != "first" and line.hits else ""
    times: list[Any] = [f"{seconds:,.3f} s" if line.turns else "" for seconds in line.ttft_s]
    table.add_row(
        name,
        f"{line.turns:,}",
        hits,
        f"{line.prompt_tokens:,}",
        share(line.reused_tokens),
        share(line.local_tokens),
        *times,
    )
