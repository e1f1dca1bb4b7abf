"""`kvplane explain`: how the router served a request, and why so."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvplane.cli.errors import StartError
from kvplane.cli.fetch import ApiKeyFile, Reach, RouterCa, fetch_json, reach
from kvplane.cli.output import Output, OutputOption, print_json, shown
from kvplane.router.settings import SettingsError, engine_url

_TRIES = 16
"""Of several workers behind one port each knows its own requests, and a new connection may reach another."""
_FIX = "name where it is with --router URL or KVPLANE_ROUTER (its HTTP port), or start it with kvplane route"
_SAID = 300
"""Characters of what a router says is wrong."""


def explain(
    request_id: Annotated[
        str, typer.Argument(help="The request's id, which its answer has as x-request-id.")
    ],
    router: Annotated[
        str, typer.Option("--router", envvar="KVPLANE_ROUTER", help="Base URL of the router.")
    ] = "http://127.0.0.1:8000",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1, max=600.0)] = 5.0,
    http_ca: RouterCa = "",
    api_key_file: ApiKeyFile = "",
    output: OutputOption = Output.TEXT,
) -> None:
    """Say how the router served a request: its path, why, what it expected and what came of it.

    Where the router has tenants, the key of --api-key-file may also be that of the request's own.
    """
    try:
        base = engine_url(router, "--router")
    except SettingsError as error:
        raise StartError(str(error)) from None
    if not request_id:
        raise StartError("REQUEST_ID: must not be empty; it is the x-request-id of an answer")
    told = asyncio.run(_ask(base, request_id, reach(http_ca, api_key_file), timeout))
    if output is Output.JSON:
        print_json(told)
        return
    try:
        text = as_text(told)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise StartError(f"--router {base}: what it says cannot be read: it is of another version") from None
    typer.echo(text)


async def _ask(base: str, request_id: str, how: Reach, timeout_s: float) -> dict[str, Any]:
    """Return what a router says of a request. Raises StartError."""
    from yarl import URL

    url = URL(f"{base}/debug/turns/{quote(request_id, safe='')}", encoded=True)
    problem = ""
    for _ in range(_TRIES):
        async with how.session(timeout_s) as session:
            answer = await fetch_json(session, url, how.headers)
        told = answer.body
        if answer.trouble:
            fix = "" if answer.untrusted else f"; {_FIX}"
            raise StartError(
                f"--router {base}: no router of kvplane's answers there: {shown(answer.trouble)}{fix}"
            )
        if answer.status == 200:
            if isinstance(told, dict) and "request_id" in told:
                return told
            raise StartError(f"--router {base}: what answers there is no router of kvplane's; {_FIX}")
        error = told.get("error") if isinstance(told, dict) else None
        said = error.get("message") if isinstance(error, dict) else None
        problem = said[:_SAID] if isinstance(said, str) and said else f"it answered {answer.status}"
        if answer.status != 404:
            break
    raise StartError(f"--router {base}: {shown(problem)}")


def as_text(told: dict[str, Any]) -> str:
    """Return an explanation for people."""
    tokens, decision = told["tokens"], told["decision"]
    status = told["status"] or "running"
    lines = [
        f"request {told['request_id']}  {told['api']}  model {told['model'] or '-'}",
        f"conversation {told['conversation'] or '-'} (from {told['identity'] or '-'})"
        f"  turn {told['turn'] or '-'}  status {status}",
        "",
        f"path {told['path'] or '-'}: {told['reason'] or '-'}",
    ]
    if decision is not None and (decision["path"], decision["reason"]) != (told["path"], told["reason"]):
        lines.append(f"decided at first: {decision['path']}: {decision['reason']}")
    lines += [
        f"tokens: prompt about {_shown(tokens['prompt_estimated'])}, held {_shown(tokens['held'])}, "
        f"new about {_shown(tokens['new_expected'])}; reuse expected {_shown(tokens['reuse_expected'])}, "
        f"reused {_shown(tokens['reused'])}",
    ]
    if decision is not None:
        costs = decision["costs_s"]
        lines.append(
            "expected seconds: " + ", ".join(f"{path} {cost:g}" for path, cost in costs.items())
            if costs
            else "expected seconds: not enough measured yet, thresholds decided"
        )
    rows: list[tuple[str, ...]] = [
        (
            engine["role"] + (" (holder)" if engine["holder"] else ""),
            engine["engine"],
            engine["state"],
            f"{engine['outstanding']} under way, {engine['waiting']} waiting,"
            f" {engine['ahead_tokens']} tokens ahead",
        )
        for engine in told["candidates"]
    ]
    lines += ["", "engines there were:", *_table(rows)]
    rows = [
        (
            attempt["leg"],
            attempt["engine"],
            attempt["outcome"],
            f"began at {_shown(attempt['began_ms'])} ms,"
            f" first byte after {_shown(attempt['first_byte_ms'])} ms, took {_shown(attempt['took_ms'])} ms"
            + (f": {attempt['problem']}" if attempt["problem"] else ""),
        )
        for attempt in told["attempts"]
    ]
    lines += ["", "legs:", *_table(rows)]
    timings = told["timings_ms"]
    lines += ["", f"decided after {_shown(timings['decided'])} ms, ended after {_shown(timings['total'])} ms"]
    # Names in it are clients', who may want the terminal to do something.
    return "\n".join(map(shown, lines))


def _shown(value: object) -> str:
    return "-" if value is None else f"{value}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
