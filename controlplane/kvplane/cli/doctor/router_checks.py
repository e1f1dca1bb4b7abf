"""Checks of routers, and of files."""

from __future__ import annotations

from collections.abc import Iterator

from kvplane.cli.doctor.facts import Facts
from kvplane.cli.doctor.findings import TRUST, Finding, problem, warning


def check_routers(facts: Facts) -> Iterator[Finding]:
    """Do routers answer, reach their engines, and use a control plane?"""
    placed = {engine.spec.endpoint for engine in facts.engines or () if engine.spec.endpoint}
    for router in facts.routers:
        if router.trouble:
            yield problem(
                "router_unreachable",
                f"no router answers at {router.url}",
                router.trouble,
                TRUST
                if router.untrusted
                else "start it (kvplane route, or kvplane up), or name where it is with --router URL",
            )
            continue
        plane = router.ready.get("control_plane")
        if plane == "none":
            yield problem(
                "router_without_plane",
                f"the router at {router.url} has no control plane: every turn is computed anew",
                "control_plane: none at /ready",
                "start it with --plane HOST:PORT",
            )
        elif plane == "unavailable":
            yield problem(
                "router_lost_plane",
                f"the router at {router.url} gets no answer from its control plane: nothing is reused",
                "control_plane: unavailable at /ready",
                "correct its --plane, and see that the control plane listens there (--grpc-host) and serves",
            )
        down = [
            url
            for role in ("prefill", "decode")
            for url, state in router.engines(role).items()
            if state != "up"
        ]
        for url in dict.fromkeys(down):
            yield problem(
                "router_cannot_reach_engine",
                f"the router at {router.url} gets no answer from {url}",
                f"{url} is down at /ready",
                "start that engine, correct --prefill or --decode, or let the router's machine"
                " reach that port",
            )
        known = (*down, "control plane")
        others = [
            str(said) for said in _listed(router.ready, "problems") + _listed(router.health, "problems")
        ]
        for said in dict.fromkeys(others):
            if any(part in said for part in known) and "no announcements" not in said:
                continue
            if "registered as a" in said:
                if said.partition(" ")[0] not in placed:  # else the engine's own check has it
                    yield problem(
                        "roles_swapped",
                        f"the router at {router.url} uses an engine in a role that is not its own",
                        said,
                        "swap --prefill and --decode on the router, or the engines' kv_role",
                    )
                continue
            title = f"the router at {router.url} is not as it should be: {_first(said)}"
            yield problem("router_degraded", title, said, _fix(said))


def _first(said: str) -> str:
    """Return what a problem begins with, by which it differs from others."""
    return said.partition(": ")[0][:80]


def _fix(said: str) -> str:
    """Return what to do about what a router says of itself, which mostly names it."""
    if "no decode engine" in said or "no prefill engine" in said:
        return "name engines with --prefill and --decode, or set kvplane_endpoint on them, and start them"
    return "do as it says; kvplane explain REQUEST-ID shows how single requests fared"


def _listed(said: dict[str, object], name: str) -> list[object]:
    found = said.get(name)
    return found if isinstance(found, list) else []


def check_files(facts: Facts) -> Iterator[Finding]:
    """Do files that were named make sense?"""
    for option, trouble in facts.file_troubles:
        yield problem(
            "tenants_file",
            f"the file of {option} makes no sense: a control plane or router does not start with"
            " it, and one that"
            " runs goes on with what it had",
            trouble,
            "mend what is named; running ones read it again by themselves",
        )


def check_nothing_seen(facts: Facts) -> Iterator[Finding]:
    """Was there anything to look at?"""
    if facts.engines is None and any(p.status is not None for p in facts.planes):
        yield warning(
            "engines_not_listed",
            "the control plane answers, but did not list its engines",
            "ListEngines failed",
            "try again when it serves",
        )
