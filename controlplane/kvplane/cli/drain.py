"""`kvplane drain`: take an engine out of use, and wait until nobody needs it any more."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.cli.connection import Target, ask, asks_plane
from kvplane.cli.errors import StartError
from kvplane.cli.output import Advance, Output, OutputOption, plural, print_json, progress, say, shown, span

if TYPE_CHECKING:
    from kvplane.client.client import ControlPlaneClient

_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Left:
    """What an engine still has to do; None where it does not say."""

    claims: int
    requests: int | None
    conversations: int
    gone: bool = False
    placed: bool = True
    """Whether it registered where it serves, so that every router knows which of its engines it is."""

    @property
    def over(self) -> bool:
        """Whether nobody needs it any more. What it retains is not handed out, and does not count."""
        return self.gone or (not self.claims and not self.requests)

    def __str__(self) -> str:
        """Say it for people."""
        if self.gone:
            return "the engine is gone"
        running = "" if self.requests is None else f", {plural(self.requests, 'request')} on it"
        kept = plural(self.conversations, "conversation")
        return f"{plural(self.claims, 'open claim')}{running}, {kept} kept"


@asks_plane
def drain(
    target: Target,
    engine: Annotated[str, typer.Argument(help="Its id; kvplane engines lists them.")],
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until no claim and no request is left.")
    ] = True,
    within: Annotated[
        float, typer.Option(help="Longest wait in seconds.", min=0.0, max=7 * 86_400.0)
    ] = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Take an engine out of use: nothing new is kept on it or read from it.

    Routers send it nothing new; what runs on it and open claims may finish, a claim within the claim timeout
    and 10 s. What it retains for later turns is given up: those conversations go on elsewhere, cold. There is
    no way back but to restart the engine, which then registers anew. Exits with 1 if claims or requests are
    left when the wait is over.
    """
    from kvplane.client.errors import UnknownEngineError

    async def work(client: ControlPlaneClient) -> Left:
        try:
            first = await _left(client, engine)
        except UnknownEngineError:
            raise StartError(f"no engine {shown(engine)} is live; kvplane engines lists them") from None
        if not first.placed:
            say(
                "it has no kvplane_endpoint: a router that was given its URL, and has reused nothing with it"
                " yet, does not know that it drains; take the URL out of --prefill and --decode there"
            )
        if not wait or first.over:
            return first
        settings = (await client.get_status()).settings
        say(f"draining: {first}; claims end within {span(settings.claim_timeout_s + settings.claim_grace_s)}")
        with progress("draining") as advance:
            return await _until_over(client, engine, first, within, advance)

    left = ask(target, work)
    if output is Output.JSON:
        fields = asdict(left)
        del fields["placed"]
        print_json({"engine_id": engine, "drained": left.over, **fields})
    elif left.over:
        typer.echo(f"drained: {left}: it may be stopped")
    else:
        typer.echo(f"draining: {left}")
    if wait and not left.over:
        raise typer.Exit(1)


async def _left(client: ControlPlaneClient, engine_id: str) -> Left:
    """Have the engine drain, which changes nothing if it does, and look. Raises ControlPlaneError."""
    from kvplane.client.model import EngineId

    claims = await client.drain_engine(EngineId(engine_id))
    for engine in await client.list_engines(with_holdings=True):
        if engine.spec.engine_id == engine_id:
            load, held = engine.load, engine.holdings
            requests = None if load is None else load.running_requests + load.waiting_requests
            kept = 0 if held is None else held.conversations
            return Left(claims, requests, kept, placed=bool(engine.spec.endpoint))
    return Left(0, 0, 0, gone=True)


async def _until_over(
    client: ControlPlaneClient, engine_id: str, first: Left, within_s: float, advance: Advance
) -> Left:
    from kvplane.client.errors import UnknownEngineError

    loop, left = asyncio.get_running_loop(), first
    most = max(1, first.claims + (first.requests or 0))
    until = loop.time() + within_s
    while not left.over and loop.time() < until:
        advance(most - min(most, left.claims + (left.requests or 0)), most, str(left))
        await asyncio.sleep(min(_EVERY_S, max(0.0, until - loop.time())))
        try:
            left = await _left(client, engine_id)
        except UnknownEngineError:
            return Left(0, 0, 0, gone=True)
    return left
