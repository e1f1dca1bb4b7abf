"""`kvplane store`: look after a store from outside. Results on standard output, all else on stderr."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvplane.cli import options as o
from kvplane.cli.config import Config, load_config
from kvplane.cli.errors import StartError
from kvplane.cli.logs import configure_logs
from kvplane.cli.output import Output
from kvplane.controlplane.model import Settings
from kvplane.controlplane.schema import SchemaError
from kvplane.controlplane.upkeep.dump import DumpError, lines_of, read_dump, write_dump
from kvplane.controlplane.upkeep.findings import MEANING, Inventory
from kvplane.controlplane.upkeep.inventory import take_inventory
from kvplane.controlplane.upkeep.patient import PatientStore
from kvplane.controlplane.upkeep.purge import Purged, Selection, Survey, purge, survey
from kvplane.controlplane.upkeep.restore import RESTORED, NotEmptyError, Restored, restore_dump
from kvplane.controlplane.validate import MAX_ID_BYTES
from kvplane.store.base import Store
from kvplane.store.clock import SystemClock
from kvplane.store.errors import StoreError, StoreFullError
from kvplane.store.url import StoreUrlError, open_store

T = TypeVar("T")
Advance = Callable[[int], None]

store_app = typer.Typer(
    help="Check, copy, bring back and empty the store of a control plane.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_REACHABLE_WITHIN_S = 10.0


@asynccontextmanager
async def opened(config: Config, clock: SystemClock) -> AsyncIterator[Store]:
    """Open the configured store, and find out whether it answers. Raises StartError, StoreError."""
    if config.store.startswith("memory:"):
        raise StartError(
            "memory:// lives in the process of the server that uses it, so there is nothing to look at from"
            " here; name the store of the control plane with --store etcd://HOST:2379"
        )
    async with open_store(config.store, clock) as store:
        try:
            async with asyncio.timeout(_REACHABLE_WITHIN_S):
                await store.scan(b"", limit=1)
        except TimeoutError:
            raise StartError(f"the store does not answer within {_REACHABLE_WITHIN_S:g} s") from None
        yield PatientStore(store, clock)


def _run(
    flags: tuple[str | None, Path | None], work: Callable[[Store, SystemClock, Config], Awaitable[T]]
) -> T:
    """Do something with the configured store. What can go wrong is one line: StartError, ConfigError."""
    url, file = flags
    config = load_config({"store": url}, file)
    configure_logs("error", config.log_format)
    clock = SystemClock()

    async def with_store() -> T:
        async with opened(config, clock) as store:
            return await work(store, clock, config)

    try:
        return uvloop.run(with_store())
    except StoreFullError:
        raise StartError("the store is full and refuses writes; see deploy/STORE.md, NOSPACE") from None
    except StoreError as error:
        raise StartError(f"the store cannot be used: {str(error) or type(error).__name__}") from None
    except StoreUrlError as error:
        raise StartError(f"--store: {error}") from None
    except (SchemaError, NotEmptyError) as error:
        raise StartError(str(error)) from None


@contextmanager
def _progress(what: str) -> Iterator[Advance]:
    """Show on a terminal how many records have been dealt with."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed:,} records"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda count: progress.advance(task, count)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "nothing"


@store_app.command()
def check(
    store: o.Store = None,
    config: o.ConfigFile = None,
    output: Annotated[Output, typer.Option(help="text or json.")] = Output.TEXT,
) -> None:
    """Count what the store holds and check that it fits together.

    Exits with 0 if nothing is wrong and with 1 if something was found. Changes nothing; replicas may be
    running. An engine that has just died leaves findings for the seconds until a replica has swept up.
    """

    async def work(store: Store, clock: SystemClock, config: Config) -> Inventory:
        with _progress("read") as advance:
            return await take_inventory(store, advance)

    inventory = _run((store, config), work)
    typer.echo(json.dumps(_as_json(inventory)) if output is Output.JSON else _as_text(inventory))
    if inventory.findings:
        raise typer.Exit(1)


def _as_json(inventory: Inventory) -> dict[str, object]:
    schema = inventory.schema
    return {
        "clean": not inventory.findings,
        "schema": schema and {"schema": schema.schema, "least_reader": schema.least_reader},
        "revision": inventory.revision,
        "until_revision": inventory.until_revision,
        "kinds": {
            name: {"records": tally.records, "bytes": tally.bytes}
            for name, tally in sorted(inventory.tallies.items())
        },
        "findings": {
            problem.value: {"count": finding.count, "examples": finding.examples}
            for problem, finding in sorted(inventory.findings.items())
        },
    }


def _as_text(inventory: Inventory) -> str:
    schema = inventory.schema
    known = f"{schema.schema}, readable from {schema.least_reader} on" if schema else "none"
    lines = [f"schema    {known}", f"revision  {inventory.revision}"]
    if inventory.until_revision != inventory.revision:
        lines[-1] += f" to {inventory.until_revision}: written to while it was read"
    lines += ["", f"{'kind':<12}{'records':>14}{'bytes':>18}"]
    for name, tally in sorted(inventory.tallies.items()):
        lines.append(f"{name:<12}{tally.records:>14,}{tally.bytes:>18,}")
    lines.append("")
    for problem, finding in sorted(inventory.findings.items()):
        lines.append(f"{problem.value}: {finding.count:,} ({MEANING[problem]})")
        lines += [f"  {example}" for example in finding.examples]
        if finding.count > len(finding.examples):
            lines.append(f"  and {finding.count - len(finding.examples):,} more")
    if not inventory.findings:
        is_unused = schema is None and not inventory.tallies
        lines.append("nothing is here: no kvplane uses this prefix" if is_unused else "nothing is wrong")
    return "\n".join(lines)


@store_app.command()
def dump(
    file: Annotated[str, typer.Argument(help="Where to write it; - is standard output.")],
    store: o.Store = None,
    config: o.ConfigFile = None,
) -> None:
    """Write everything the store holds as JSON lines.

    The store is read page by page, so it is a picture of one moment only if nothing was written meanwhile;
    the last line's revision and a message tell. FILE replaces an older one only when it is complete; it is
    readable by its owner only, since it names tenants and conversations.
    """

    async def work(store: Store, clock: SystemClock, config: Config) -> tuple[int, int, int]:
        first, last, count = 0, 0, 0
        async for part in write_dump(store, clock):
            await asyncio.to_thread(stream.write, part.text.encode())
            first, last, count = first or part.revision, part.revision, count + part.records
            advance(part.records)
        return first, last, count

    with _written(file) as stream, _progress("dumped") as advance:
        first, last, count = _run((store, config), work)
    moved = f"; written to meanwhile (revisions {first} to {last})" if last != first else ""
    _say(f"dumped {count:,} records at revision {first}{moved}")


@contextmanager
def _written(file: str) -> Iterator[BinaryIO]:
    """Give where to write; a file takes its name when all is written. Raises StartError."""
    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as stream:
                yield stream
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise StartError(f"{file}: {(error.strerror or 'cannot be written').lower()}") from None


@store_app.command()
def restore(
    file: Annotated[str, typer.Argument(help="A dump; - is standard input.")],
    store: o.Store = None,
    config: o.ConfigFile = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Add to a store that is not empty: of each record the newer one stays."),
    ] = False,
) -> None:
    """Bring back what is still true of a dump: engines' epochs and conversations' turn numbers.

    Locations, claims and all else about blocks are NOT restored: since the dump they may have been claimed or
    freed, and handing them out again could hand out another conversation's KV. Engines need no restore: they
    register by themselves and announce again what they retain.

    The whole dump is checked before anything is written. Turns that would have been forgotten since are
    skipped. The store has to be empty but for its schema and running replicas' pulses.
    """
    try:
        with _read(file) as stream, _progress("checked") as advance:
            dumped = read_dump(lines_of(stream), RESTORED, advance)
    except (DumpError, SchemaError) as error:
        raise StartError(f"{'standard input' if file == '-' else file}: {error}") from None

    async def work(store: Store, clock: SystemClock, config: Config) -> Restored:
        kept_ms = Settings(max_location_ttl_s=config.location_ttl).turns_kept_ms
        with _progress("restored") as advance:
            return await restore_dump(
                store, clock, dumped, turns_kept_ms=kept_ms, force=force, progress=advance
            )

    result = _run((store, config), work)
    typer.echo(f"restored: {_counts(result.written)}")
    if result.kept:
        typer.echo(f"left as they are, since the store's are as new: {_counts(result.kept)}")
    if result.expired:
        typer.echo(f"skipped, since they would have been forgotten by now: {_counts(result.expired)}")
    if result.left_out:
        typer.echo(f"not restored, since engines announce anew what they retain: {_counts(result.left_out)}")


@contextmanager
def _read(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        with open(file, "rb") as stream:
            yield stream
    except OSError as error:
        raise StartError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from None


def _check_id(name: str, value: str | None) -> None:
    """Refuse what nothing can be named. Raises StartError."""
    try:
        size = len((value or "").encode())
    except UnicodeEncodeError:
        raise StartError(f"--{name}: is not UTF-8") from None
    if size > MAX_ID_BYTES:
        raise StartError(f"--{name}: must be at most {MAX_ID_BYTES} bytes")


def _can_ask() -> bool:
    return sys.stdin.isatty()


@store_app.command("purge")
def purge_command(
    store: o.Store = None,
    config: o.ConfigFile = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's conversations.")] = None,
    model: Annotated[str | None, typer.Option(help="Only conversations with this served model.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Only conversations with this LoRA adapter.")] = None,
    conversation: Annotated[str | None, typer.Option(help="Only conversations of this id.")] = None,
    engine: Annotated[str | None, typer.Option(help="Only what this engine holds.")] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also epochs, the schema, pulses, and open claims of live engines."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Although live engines hold what is to be purged.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove records from the store: all, or those that match all of the given options.

    This frees no blocks on engines: a live engine keeps them until their ttl ends, or registers and announces
    them again; hence the refusal without --force. Open claims of live engines are left to their readers and
    end by themselves. Epochs stay, so that engines' later ones are larger. To release a conversation's blocks
    at once, call LocationService/ReleaseLocation of the control plane instead.
    """
    given = {
        "tenant": tenant,
        "model": model,
        "adapter": adapter,
        "conversation": conversation,
        "engine": engine,
    }
    for name, value in given.items():
        _check_id(name, value)
    selection = Selection(tenant, model, adapter, conversation, engine)

    async def look(store: Store, clock: SystemClock, config: Config) -> Survey:
        return await survey(store, selection, everything=everything)

    found = _run((store, config), look)
    if not found.counts:
        typer.echo("purged: nothing")
        return
    if found.live_engines and not force:
        names = ", ".join(found.live_engines[:5]) + (", ..." if len(found.live_engines) > 5 else "")
        raise StartError(
            f"live engines are concerned ({names}): they would keep the blocks until their ttl ends, or"
            " announce them again; stop them first, or add --force"
        )
    if not yes:
        if not _can_ask():
            raise StartError(f"would purge {_counts(found.counts)}; add --yes, since there is nobody to ask")
        typer.confirm(f"Purge {_counts(found.counts)}?", abort=True, err=True)

    async def work(store: Store, clock: SystemClock, config: Config) -> Purged:
        with _progress("purged") as advance:
            return await purge(store, selection, everything=everything, progress=advance)

    result = _run((store, config), work)
    typer.echo(f"purged: {_counts(result.counts)}")
    if result.changed:
        typer.echo(f"left, since they changed meanwhile: {result.changed:,}; run it again to purge them")
