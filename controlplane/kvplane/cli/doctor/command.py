"""The command: look, check, say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvplane.cli.connection import Target, asks_plane, run
from kvplane.cli.doctor.findings import Finding, Severity
from kvplane.cli.errors import ConfigError, StartError
from kvplane.cli.output import Output, OutputOption, plural, print_json, progress, shown

_STEPS = 5


@asks_plane
def doctor(
    target: Target,
    router: Annotated[
        list[str] | None,
        typer.Option("--router", envvar="KVPLANE_ROUTER", help="Base URL of a router. May be repeated."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help="Base URL of an engine that the control plane does not know the address of. May"
            " be repeated.",
        ),
    ] = None,
    tenant_limits: Annotated[
        Path | None,
        typer.Option("--tenant-limits", help="File that control planes are given by that option."),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Look for what keeps KV from being reused, and say how to mend it.

    Looks from this machine at the control plane (each address of --plane), at what engines said when they
    registered, at engines and NIXL side channels themselves where their addresses are known, and at routers.
    Changes nothing. Exits with 0 if nothing is wrong, 1 if something was found, 2 if it cannot look.
    """
    from kvplane.router.settings import SettingsError, engine_url

    try:
        routers = [engine_url(url, "--router") for url in router or ()]
        engines = [engine_url(url, "--engine") for url in engine or ()]
    except SettingsError as error:
        raise StartError(str(error)) from None
    done = 0
    with progress("looking") as advance:

        def step(text: str) -> None:
            nonlocal done
            advance(done, _STEPS, text)
            done += 1

        found, looked_at = run(
            target, lambda: diagnose(target, routers, engines, tenant_limits=tenant_limits, step=step)
        )
    if output is Output.JSON:
        findings = [finding.as_json() for finding in found]
        print_json({"healthy": not found, "looked_at": looked_at, "findings": findings})
    else:
        typer.echo(as_text(found, looked_at))
    if found:
        raise typer.Exit(1)


async def diagnose(
    target: Target,
    routers: list[str],
    engines: list[str],
    *,
    tenant_limits: Path | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Finding], dict[str, int]]:
    """Look and check; returns what was found, problems first, and how much was looked at."""
    from dataclasses import replace

    from kvplane.cli.doctor.checks import check
    from kvplane.cli.doctor.gather import Gatherer
    from kvplane.store.clock import SystemClock

    facts = await Gatherer(target, routers, engines, SystemClock(), step).gather()
    if tenant_limits is not None and (trouble := await asyncio.to_thread(_limits_trouble, tenant_limits)):
        facts = replace(facts, file_troubles=(("--tenant-limits", trouble),))
    looked_at = {
        "control_plane": len(facts.planes),
        "engine": len(facts.engines or ()),
        "engine_server": len(facts.engine_https),
        "side_channel": len(facts.side_channels),
        "router": len(facts.routers),
    }
    return check(facts), looked_at


def _limits_trouble(file: Path) -> str:
    from kvplane.cli.tenant_limits import LimitsFile

    try:
        LimitsFile(str(file))
    except ConfigError as error:
        return str(error)
    return ""


def as_text(found: list[Finding], looked_at: dict[str, int]) -> str:
    """Return findings for people."""
    seen = ", ".join(plural(count, name.replace("_", " ")) for name, count in looked_at.items())
    lines = [f"looked at {seen}"]
    for finding in found:
        lines += [
            "",
            f"{finding.severity.upper()}  {finding.code}: {shown(finding.what)}",
            f"  seen: {shown(finding.evidence)}",
            f"  fix:  {shown(finding.fix)}",
        ]
    problems = sum(finding.severity is Severity.PROBLEM for finding in found)
    counted = f"{plural(problems, 'problem')}, {plural(len(found) - problems, 'warning')}"
    lines += ["", counted if found else "nothing is wrong"]
    return "\n".join(lines)
