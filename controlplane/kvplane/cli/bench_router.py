"""`kvplane bench router`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from kvplane.cli import bench_output as output
from kvplane.cli.errors import ConfigError, StartError

_BENCHES = "first-token, rate, gaps, memory, workers"


def bench_router(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Only this bench: {_BENCHES}. May be repeated.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Another router to measure beside ours, as NAME=COMMAND; the command has {port}, {prefill}"
            " and {decode} (or {prefill_port}, {decode_port}) where they go. May be repeated."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Length of each measured stretch.", min=0.05, max=3600)
    ] = 3.0,
    rounds: Annotated[
        int, typer.Option(help="Times each is measured, in turn with the others; medians are shown.", min=1)
    ] = 5,
    streams: Annotated[
        int, typer.Option(help="Streams held open for the memory's figure.", min=1, max=50_000)
    ] = 1000,
    json: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the comparison, as .svg or .png.")
    ] = None,
) -> None:
    """Measure the router between a load generator and mock engines, next to others in the same run.

    Each router runs in a process on the first core, with all that it has by default; mock engines, load
    generator and control plane share the second. With one core they all share. Every request is a chat of 12
    messages (about 3 KB) of a conversation of its own, with a prefill leg and a stream of 64 events.

    first-token: what a router adds to the time to the first token, one request at a time. rate: requests
    per second, 32 at once, events without gaps, and CPU per 1,000 requests, which is the figure to trust on
    a busy machine. gaps: CPU with 5 ms between events. memory: resident, with many streams open. workers:
    two worker processes against one, 128 at once on all cores, and what they carry by the CPU of the busier
    one, which is what counts where cores are not shared with the load.

    "kvplane" is `kvplane route` beside a control plane, "kvplane up" both in one process: its CPU and memory
    are those of both. The bare proxy is a prefill/decode proxy of 40 lines on the same HTTP library that does
    nothing else. Peers are what you have installed, for example

      --peer "rust=vllm-router --host 127.0.0.1 --port {port} --vllm-pd-disaggregation --kv-connector nixl
      --prefill {prefill} --decode {decode}"
    """
    if importlib.util.find_spec("psutil") is None:
        raise StartError("kvplane bench router needs psutil: pip install 'kvplane[bench]'")
    from kvplane.bench.figures import Row
    from kvplane.bench.process import ServerDiedError
    from kvplane.bench.rig import BenchError, Options
    from kvplane.bench.routing import plot as picture
    from kvplane.bench.routing import run as routing
    from kvplane.bench.routing import systems

    names = output.chosen(only, list(routing.BENCHES)) if only else list(routing.BENCHES)
    output.check_writable("--json", json)
    output.check_writable("--plot", plot)
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {plot}: must end in .svg or .png")
    rows: list[Row]
    try:
        peers = tuple(systems.peer(text) for text in peer or ())
        if plot is not None:
            picture.check()
        with output.progress() as tell:
            options = routing.RoutingOptions(seconds, rounds, streams, peers, tell)
            rows = uvloop.run(routing.run(names, options))
    except (BenchError, ServerDiedError) as error:
        raise StartError(str(error)) from None
    output.finish(rows, Options(seconds, rounds), "memory://", json)
    if plot is not None:
        try:
            picture.draw(plot, rows, systems.OURS)
        except OSError as error:
            raise StartError(f"--plot {plot}: {(error.strerror or 'cannot be written').lower()}") from None
