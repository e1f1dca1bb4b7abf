"""`kvplane conversations`: what is retained, where, and for how long."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplane.cli.connection import Target, ask, asks_plane
from kvplane.cli.output import Output, OutputOption, count, print_json, print_table, say, shown, span

if TYPE_CHECKING:
    from kvplane.client import model as m
    from kvplane.client.client import ControlPlaneClient

_COLUMNS = (
    "conversation",
    "tenant",
    "model",
    "state",
    ">tokens",
    ">blocks",
    ">remaining",
    "engine",
    "address",
)
_PAGE = 1000
_AGAIN_S = 1.0
"""Between attempts to go on with a watch whose control plane went away."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which conversations are wanted; empty members do not matter."""

    tenant_id: str
    engine_id: str
    model: str
    conversation_prefix: str

    def fits(self, location: m.Location) -> bool:
        """Tell whether a location is wanted."""
        key = location.key
        return (
            self.tenant_id in ("", key.tenant_id)
            and self.engine_id in ("", location.engine_id)
            and self.model in ("", key.model)
            and key.conversation_id.startswith(self.conversation_prefix)
        )

    def members(self) -> dict[str, str]:
        """Return it as the client takes it."""
        return {
            "tenant_id": self.tenant_id,
            "engine_id": self.engine_id,
            "model": self.model,
            "conversation_prefix": self.conversation_prefix,
        }


@asks_plane
def conversations(
    target: Target,
    engine: Annotated[str, typer.Option(help="Only what this engine holds.")] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    model: Annotated[str, typer.Option(help="Only of this served model.")] = "",
    prefix: Annotated[str, typer.Option(help="Only those whose ids begin so.")] = "",
    limit: Annotated[int, typer.Option(help="How many at most.", min=1)] = 100,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All of them, however many.")] = False,
    page_token: Annotated[str, typer.Option(help="Go on where an earlier answer ended.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Then go on showing what changes, until Ctrl-C.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List what is retained, and where.

    retained: its KV is held and may be claimed or used. claimed: it was given to one reader. REMAINING is the
    life left of what is retained.
    """
    wanted = Filter(tenant, engine, model, prefix)
    with suppress(KeyboardInterrupt):
        ask(
            target,
            lambda client: _show(
                client,
                wanted,
                limit=None if everything else limit,
                token=page_token,
                watch=watch,
                output=output,
            ),
        )


async def _show(
    client: ControlPlaneClient,
    wanted: Filter,
    *,
    limit: int | None,
    token: str,
    watch: bool,
    output: Output,
) -> None:
    found, revision = list[Any](), 0
    while limit is None or len(found) < limit:
        size = _PAGE if limit is None else min(_PAGE, limit - len(found))
        page = await client.list_locations_page(page_size=size, page_token=token, **wanted.members())
        found += page.locations
        revision, token = revision or page.revision, page.next_page_token
        if not token:
            break
    found.sort(key=_by_name)
    if watch:
        await _watch(client, wanted, found, revision, output)
        return
    if output is Output.JSON:
        listed = [as_json(location) for location in found]
        print_json({"conversations": listed, "next_page_token": token, "revision": revision})
        return
    print_table(_COLUMNS, [_row(location) for location in found])
    if not found:
        say("nothing of that kind is retained")
    if token:
        say(f"there are more: --all, or --page-token {token}")


def _by_name(location: m.Location) -> tuple[str, ...]:
    """Return what conversations are sorted by; the store has the short ids first."""
    key = location.key
    return key.conversation_id, key.tenant_id, key.model, key.adapter


async def _watch(
    client: ControlPlaneClient, wanted: Filter, found: list[m.Location], revision: int, output: Output
) -> None:
    """Print what there is and then each change, a line each, until a signal."""
    from kvplane.client.errors import ControlPlaneUnavailableError, RevisionGoneError

    for location in found:
        _print_event("retained" if not location.claimed else "claimed", location, output)
    following = asyncio.current_task()
    assert following is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, following.cancel)
    try:
        while True:
            try:
                events = client.watch_locations(from_revision=revision + 1, tenant_id=wanted.tenant_id)
                async for event in events:
                    revision = event.revision
                    if wanted.fits(event.location):
                        _print_event("gone" if event.gone else "retained", event.location, output)
            except RevisionGoneError:
                say("changes were missed: the store no longer has them; from here on it goes on")
                revision = (await client.list_locations_page(page_size=1)).revision
            except ControlPlaneUnavailableError:
                say("the control plane does not answer: it goes on when one does")
                revision = await _back(client, revision)
    except asyncio.CancelledError:
        return


async def _back(client: ControlPlaneClient, revision: int) -> int:
    """Wait until a control plane answers; returns the revision to go on after."""
    from kvplane.client.errors import ControlPlaneUnavailableError

    while True:
        await asyncio.sleep(_AGAIN_S)
        try:
            now = (await client.list_locations_page(page_size=1)).revision
        except ControlPlaneUnavailableError:
            continue
        if now < revision:
            say("its store has begun anew: what was retained is gone")
        return min(now, revision)


def _print_event(what: str, location: m.Location, output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps({"event": what, **as_json(location)}, ensure_ascii=False))
        return
    key = location.key
    parts = (
        f"{what:<8}",
        shown(key.conversation_id),
        shown(key.tenant_id),
        _model(location),
        f"{count(location.token_count)} tokens",
        span(location.remaining_s),
        f"on {shown(location.engine_id)}",
    )
    typer.echo("  ".join(parts))


def _model(location: m.Location) -> str:
    key = location.key
    return shown(key.model + (f" + {key.adapter}" if key.adapter else ""))


def as_json(location: m.Location) -> dict[str, Any]:
    """Return a conversation for programs; the fields are in deploy/CLI.md."""
    key = location.key
    return {
        "conversation_id": key.conversation_id,
        "tenant_id": key.tenant_id,
        "model": key.model,
        "adapter": key.adapter or None,
        "state": "claimed" if location.claimed else "retained",
        "tokens": location.token_count,
        "blocks": location.block_count,
        "remaining_s": round(location.remaining_s, 3),
        "turn": location.turn,
        "engine_id": location.engine_id,
        "engine_epoch": location.engine_epoch,
        "address": location.endpoint or None,
        "data_parallel_rank": location.data_parallel_rank,
    }


def _row(location: m.Location) -> tuple[str, ...]:
    return (
        location.key.conversation_id,
        location.key.tenant_id,
        _model(location),
        "claimed" if location.claimed else "retained",
        count(location.token_count),
        count(location.block_count),
        span(location.remaining_s),
        location.engine_id,
        location.endpoint or "-",
    )
