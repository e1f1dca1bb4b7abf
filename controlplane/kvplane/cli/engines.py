"""`kvplane engines`: what is registered, how it does, and what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplane.cli.connection import Target, asks_plane, run
from kvplane.cli.output import Output, OutputOption, count, print_json, print_table, say, span

if TYPE_CHECKING:
    from kvplane.client import model as m
    from kvplane.client.client import ControlPlaneClient

_COLUMNS = (
    "engine",
    "role",
    "model",
    "state",
    ">conversations",
    ">tokens",
    ">blocks",
    ">claimed",
    ">seen",
    "address",
    ">epoch",
)


@asks_plane
def engines(
    target: Target,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also engines that are gone since a week at most.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List engines: what they are, how they do, and what they hold.

    attached: its stream is open. registered: it renews its lease, without a stream. draining: nothing new is
    kept on it or read from it. silent: its stream broke, its lease lasts a few seconds yet. expired: gone.
    SEEN is when a replica that was asked last heard of it.
    """
    found = run(target, lambda: listed(target, include_gone=everything))
    if output is Output.JSON:
        print_json({"engines": [as_json(engine) for engine in found]})
        return
    print_table(_COLUMNS, [_row(engine) for engine in found])
    if not found:
        say("no engine is registered")


async def listed(
    target: Target, *, include_gone: bool = False, clients: Sequence[ControlPlaneClient] = ()
) -> list[m.Engine]:
    """Return the engines, with what each replica that was named knows of them. Raises ControlPlaneError.

    The first answer counts for all that is on record; when an engine was heard of only one replica knows.
    Open `clients` of them may be given.
    """
    from kvplane.client.errors import ControlPlaneError

    async def one(client: ControlPlaneClient) -> list[m.Engine] | ControlPlaneError:
        try:
            return await client.list_engines(include_gone=include_gone, with_holdings=True)
        except ControlPlaneError as error:
            return error

    async with AsyncExitStack() as stack:
        asked = clients or [
            await stack.enter_async_context(target.client(address)) for address in await target.replicas()
        ]
        answers = await asyncio.gather(*(one(client) for client in asked))
    lists = [answer for answer in answers if isinstance(answer, list)]
    if not lists:
        raise next(answer for answer in answers if isinstance(answer, ControlPlaneError))
    merged = {(e.spec.engine_id, e.engine_epoch): e for e in lists[0]}
    for others in lists[1:]:
        for other in others:
            known = merged.get((other.spec.engine_id, other.engine_epoch))
            if known is not None:
                seen = [s for s in (known.last_seen_s, other.last_seen_s) if s is not None]
                merged[other.spec.engine_id, other.engine_epoch] = replace(
                    known,
                    last_seen_s=min(seen, default=None),
                    announcements=known.announcements + other.announcements,
                )
    return list(merged.values())


def state(engine: m.Engine) -> str:
    """Return in a word how an engine is; "registered" also where an older control plane does not say."""
    if engine.contact == "gone":
        return "expired"
    if engine.draining:
        return "draining"
    if engine.contact == "silent":
        return "silent"
    return "attached" if engine.attached else "registered"


def as_json(engine: m.Engine) -> dict[str, Any]:
    """Return an engine for programs; the fields are in deploy/CLI.md."""
    spec, gone = engine.spec, engine.contact == "gone"
    return {
        "id": spec.engine_id,
        "state": state(engine),
        "role": None if gone else spec.role,
        "epoch": engine.engine_epoch,
        "models": list(spec.served_models),
        "address": spec.endpoint or None,
        "data_parallel_rank": spec.data_parallel_rank,
        "total_blocks": spec.total_blocks or None,
        "registered_s": None if gone else round(engine.registered_s, 3),
        "last_seen_s": None if engine.last_seen_s is None else round(engine.last_seen_s, 3),
        "announcements": engine.announcements,
        "retained": None if engine.holdings is None or gone else asdict(engine.holdings),
        "load": None if engine.load is None else asdict(engine.load),
        "profile": None if gone else asdict(spec.profile),
        "settings": None if spec.settings is None else asdict(spec.settings),
    }


def _row(engine: m.Engine) -> tuple[str, ...]:
    spec, held, gone = engine.spec, engine.holdings, engine.contact == "gone"
    counts = ("-", "-", "-", "-")
    if held is not None and not gone:
        counts = (count(held.conversations), count(held.tokens), count(held.blocks), count(held.claimed))
    return (
        spec.engine_id,
        "-" if gone else spec.role,
        ", ".join(spec.served_models) or spec.profile.model or "-",
        state(engine),
        *counts,
        span(engine.last_seen_s),
        spec.endpoint or "-",
        str(engine.engine_epoch),
    )
