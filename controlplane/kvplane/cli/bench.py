"""`kvplane bench`: figures on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvplane.bench import rpc, stored
from kvplane.bench.figures import Row
from kvplane.bench.process import ServerDiedError
from kvplane.bench.rig import BenchError, Options
from kvplane.cli.bench_fleet import bench_fleet
from kvplane.cli.bench_output import check_writable, chosen, finish, progress
from kvplane.cli.bench_retention import bench_retention
from kvplane.cli.bench_router import bench_router
from kvplane.cli.errors import ConfigError, StartError
from kvplane.store.url import StoreUrlError

bench_app = typer.Typer(
    help="Measure what the control plane and its stores cost on this machine, and what leases save.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench_app.command("router")(bench_router)
bench_app.command("retention")(bench_retention)
bench_app.command("fleet")(bench_fleet)

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
            " needs one --only, not scale or sight. It slows the control plane down, so the figures then say"
            " nothing."
        ),
    ] = None,
) -> None:
    """Measure the API over loopback, store in memory, next to bare gRPC in the same run.

    The control plane runs in a process pinned to the first core, the load generator in another, pinned to
    the second; with one core, or where processes cannot be pinned, they share. Both sides' CPU is shown
    (server/client): a rate says something about the control plane only while the server's is near 100 % and
    the client's is not. "per core" is what a rate would be if nothing else had used the server's core. The
    bare server is a grpc.aio server on the same event loop that answers as many bytes and does nothing
    else, not even protobuf; single calls are also compared with an echo of messages, which reads each
    request and writes each answer as protobuf, as any server must. Ratios hold on other machines,
    absolute figures do not.

    unary: lookup, begin-turn and claim as single calls. turns: begin-turn and claim over the Turns stream;
    each conversation is announced before and claimed once, and all answers are checked. attach:
    announcements over an engine's stream. sight: CPU time per call with metrics and logs, against one
    without. scale: the control plane's CPU time per operation, over the
    streams, at 1,000, 100,000 and 1,000,000 live conversations, and its memory per conversation; also at
    100,000 of 500 blocks each. stall: lookups every 5 ms while 100,000 locations expire at one instant.
    """
    names = chosen(only, list(rpc.BENCHES)) if only else [*rpc.QUICK, *(rpc.LARGE if scale else ())]
    if profile is not None and (len(names) != 1 or names[0] not in rpc.PROFILABLE):
        known = ", ".join(name for name in rpc.BENCHES if name in rpc.PROFILABLE)
        raise ConfigError(f"--profile: one dump holds one bench; add --only with one of {known}")
    check_writable("--json", json)
    check_writable("--profile", profile)
    with progress() as tell:
        options = Options(seconds, rounds, blocks, profile=profile, progress=tell)
        rows = _measured(lambda: rpc.run(names, options))
    finish(rows, options, "memory://", json)


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
        names = chosen(only, known) if only else known
        check_writable("--json", json)
        with progress() as tell:
            options = Options(seconds, rounds, blocks, progress=tell)
            rows = _measured(lambda: stored.run(url, names, options))
        finish(rows, options, stored.shown(url), json)
    except StoreUrlError as error:
        raise StartError(str(error)) from None


def _measured(measure: Callable[[], list[Row]]) -> list[Row]:
    try:
        return measure()
    except (BenchError, ServerDiedError) as error:
        raise StartError(str(error)) from None
