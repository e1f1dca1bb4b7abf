"""All checks, in the order in which mending makes sense."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvplane.cli.doctor import engine_checks, plane_checks, router_checks
from kvplane.cli.doctor.facts import Facts
from kvplane.cli.doctor.findings import Finding, Severity

Check = Callable[[Facts], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    plane_checks.check_reach,
    plane_checks.check_store,
    engine_checks.check_presence,
    engine_checks.check_roles,
    engine_checks.check_likeness,
    engine_checks.check_addresses,
    router_checks.check_routers,
    engine_checks.check_announcing,
    engine_checks.check_caching,
    plane_checks.check_settings,
    plane_checks.check_replicas,
    plane_checks.check_clocks,
    router_checks.check_files,
    router_checks.check_nothing_seen,
)


def check(facts: Facts) -> list[Finding]:
    """Return what is wrong: problems first, in the order of the checks."""
    found = [finding for made in CHECKS for finding in made(facts)]
    return sorted(found, key=lambda finding: finding.severity is not Severity.PROBLEM)
