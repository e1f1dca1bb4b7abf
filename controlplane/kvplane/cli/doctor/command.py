"""The command: look, check, say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from kvplane.cli.connection import Target, asks_plane, run
from kvplane.cli.doctor.findings import Finding, Severity
from kvplane.cli.errors import StartError
from kvplane.cli.fetch import ApiKeyFile, Reach, RouterCa, reach
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
        typer.Option("--tenant-limits", help="Control planes' file of that option, to check it."),
    ] = None,
    access: Annotated[
        Path | None, typer.Option("--access", help="Control planes' file of that option, to check it.")
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option("--tenants", help="Routers' file of that option, to check it.")
    ] = None,
    http_ca: RouterCa = "",
    api_key_file: ApiKeyFile = "",
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
    how = reach(http_ca, api_key_file)
    named = {"--tenant-limits": tenant_limits, "--access": access, "--tenants": tenants}
    files = {option: file for option, file in named.items() if file is not None}
    done = 0
    with progress("looking") as advance:

        def step(text: str) -> None:
            nonlocal done
            advance(done, _STEPS, text)
            done += 1

        found, looked_at = run(
            target, lambda: diagnose(target, routers, engines, files=files, step=step, how=how)
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
    files: Mapping[str, Path] = MappingProxyType({}),
    how: Reach | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Finding], dict[str, int]]:
    """Look and check; returns what was found, problems first, and how much was looked at."""
    from dataclasses import replace

    from kvplane.cli.doctor.checks import check
    from kvplane.cli.doctor.gather import Gatherer
    from kvplane.store.clock import SystemClock

    facts = await Gatherer(target, routers, engines, SystemClock(), step, how or Reach()).gather()
    troubles = await asyncio.to_thread(_file_troubles, files)
    facts = replace(facts, file_troubles=tuple(troubles))
    looked_at = {
        "control_plane": len(facts.planes),
        "engine": len(facts.engines or ()),
        "engine_server": len(facts.engine_https),
        "side_channel": len(facts.side_channels),
        "router": len(facts.routers),
    }
    return check(facts), looked_at


def _file_troubles(files: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Read files as those do that are given them; returns (option, what is wrong). Blocks."""
    from kvplane.cli.tenant_limits import LimitsFile
    from kvplane.controlplane.access import load_access
    from kvplane.router.tenancy.reading import read_tenants

    readers: dict[str, Callable[[str], object]] = {
        "--tenant-limits": LimitsFile,
        "--access": load_access,
        "--tenants": read_tenants,
    }
    troubles = list[tuple[str, str]]()
    for option, file in files.items():
        try:
            readers[option](str(file))
        except (ValueError, OSError) as error:
            troubles.append((option, str(error)))
    return troubles


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
