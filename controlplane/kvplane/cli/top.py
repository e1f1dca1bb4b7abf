"""`kvplane top`: a live view of the fleet."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.cli.connection import Target, asks_plane, run
from kvplane.cli.errors import StartError
from kvplane.cli.fetch import ApiKeyFile, RouterCa, reach
from kvplane.cli.output import Output, OutputOption, print_json, terminal

if TYPE_CHECKING:
    from kvplane.cli.sampling import Sampler


@asks_plane
def top(
    target: Target,
    router: Annotated[
        str,
        typer.Option("--router", envvar="KVPLANE_ROUTER", help="Base URL of a router, for paths and times."),
    ] = "",
    interval: Annotated[
        float, typer.Option("--interval", "-n", help="Seconds between two looks.", min=0.2, max=3600.0)
    ] = 2.0,
    http_ca: RouterCa = "",
    api_key_file: ApiKeyFile = "",
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end: for scripts.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show live how engines, retention and paths do.

    Hit rate: of the turns that began, for how many something was held that could be used. Rates are those of
    the last interval, all else is since the servers started. Ends with Ctrl-C. With --output json each look
    is one line.
    """
    from kvplane.cli.sampling import Sampler
    from kvplane.router.settings import SettingsError, engine_url
    from kvplane.store.clock import SystemClock

    try:
        url = engine_url(router, "--router") if router else ""
    except SettingsError as error:
        raise StartError(str(error)) from None

    how = reach(http_ca, api_key_file)

    async def work() -> None:
        async with Sampler(target, url, SystemClock(), how) as sampler:
            if once:
                await _once(sampler, output)
            else:
                await _follow(sampler, interval, output)

    run(target, work)


async def _once(sampler: Sampler, output: Output) -> None:
    from kvplane.cli.top_view import as_json, render

    sample = await sampler.look()
    if output is Output.JSON:
        print_json(as_json(sample, None))
        return
    _print(render(sample, None))


def _print(renderable: object) -> None:
    console = terminal()
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


async def _follow(sampler: Sampler, interval_s: float, output: Output) -> None:
    """Look again and again until a signal. What does not answer for a while is shown as such."""
    from rich.live import Live

    from kvplane.cli.top_view import as_json, render

    before, sample = None, await sampler.look()
    loop, following = asyncio.get_running_loop(), asyncio.current_task()
    assert following is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, following.cancel)
    console = terminal()
    try:
        if output is Output.JSON or not console.is_terminal:
            while True:
                if output is Output.JSON:
                    typer.echo(json.dumps(as_json(sample, before), ensure_ascii=False))
                else:
                    _print(render(sample, before))
                    typer.echo()
                await asyncio.sleep(interval_s)
                before, sample = sample, await sampler.look_again(sample)
        with Live(render(sample, before), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                before, sample = sample, await sampler.look_again(sample)
                live.update(render(sample, before), refresh=True)
    except asyncio.CancelledError:
        return
