"""`kvplane explain`: how the router served a request, and why so."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvplane.cli.errors import StartError
from kvplane.cli.output import Output
from kvplane.router.reloading import FileProblemError, read_file
from kvplane.router.settings import SettingsError, engine_url

_TRIES = 16
"""Of several workers behind one port each knows its own requests, and a new connection may reach another."""


def explain(
    request_id: Annotated[
        str, typer.Argument(help="The request's id, which its answer has as x-request-id.")
    ],
    router: Annotated[
        str, typer.Option("--router", envvar="KVPLANE_ROUTER", help="Base URL of the router.")
    ] = "http://127.0.0.1:8000",
    output: Annotated[Output, typer.Option("--output", help="text or json.")] = Output.TEXT,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            "--api-key-file", help="File with an API key of the request's tenant, or an operator's."
        ),
    ] = None,
) -> None:
    """Say how the router served a request: its path, why, what it expected and what came of it."""
    try:
        base = engine_url(router, "--router")
    except SettingsError as error:
        raise StartError(str(error)) from None
    headers = {} if api_key_file is None else {"Authorization": f"Bearer {_key_in(api_key_file)}"}
    asked = urllib.request.Request(f"{base}/debug/turns/{quote(request_id, safe='')}", headers=headers)
    told = _ask(asked, base)
    typer.echo(json.dumps(told, indent=2) if output is Output.JSON else as_text(told))


def _key_in(file: str) -> str:
    try:
        key = read_file(file, "--api-key-file").decode().strip()
    except FileProblemError as error:
        raise StartError(str(error)) from None
    except ValueError:
        key = ""
    if not key.isascii() or not key.isprintable() or not key:
        raise StartError(f"--api-key-file {file}: has to hold one key, printable ASCII in one line")
    return key


def _ask(asked: urllib.request.Request, base: str) -> dict[str, Any]:
    problem = ""
    for _ in range(_TRIES):
        try:
            with urllib.request.urlopen(asked, timeout=5.0) as response:
                told = json.load(response)
        except urllib.error.HTTPError as error:
            problem = _said(error)
            if error.code != 404:
                break
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise StartError(f"--router {base}: no router of kvplane's answers there: {reason}") from None
        else:
            if isinstance(told, dict) and "request_id" in told:
                return told
            problem = "what answers there is no router of kvplane's"
            break
    raise StartError(f"--router {base}: {problem}")


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"it answered {error.code}"


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
    return "\n".join(lines)


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
