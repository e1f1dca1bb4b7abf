"""Who may call what: the one table. What it does not name is refused to everyone."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What a caller is. Each has exactly one."""

    ENGINE = "engine"
    """Speaks for itself, and asks and claims for the prompts it computes."""
    ROUTER = "router"
    """Begins turns, claims and ends conversations, for any engine."""
    VIEWER = "viewer"
    """Looks at what is on record; what KV could be read with is not shown to it."""
    ADMIN = "admin"
    """Looks, and takes things off the record. It cannot speak as an engine, nor claim."""


ENGINE_SERVICE = "kvplane.v1.EngineService"
LOCATION_SERVICE = "kvplane.v1.LocationService"
STATUS_SERVICE = "kvplane.v1.StatusService"
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_E, _R, _V, _A = Role.ENGINE, Role.ROUTER, Role.VIEWER, Role.ADMIN

RELEASES: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "end_conversation": frozenset({_R, _A}),
        "finish_claim": frozenset({_E, _R}),
        "withdraw": frozenset({_E}),
    }
)
"""Who may ask ReleaseLocation for which target."""

TABLE: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        f"/{ENGINE_SERVICE}/RegisterEngine": frozenset({_E}),
        f"/{ENGINE_SERVICE}/RenewEngine": frozenset({_E}),
        f"/{ENGINE_SERVICE}/AttachEngine": frozenset({_E}),
        f"/{ENGINE_SERVICE}/DrainEngine": frozenset({_E, _A}),
        f"/{ENGINE_SERVICE}/DeregisterEngine": frozenset({_E, _A}),
        f"/{ENGINE_SERVICE}/ListEngines": frozenset({_R, _V, _A}),
        f"/{LOCATION_SERVICE}/AnnounceLocation": frozenset({_E}),
        f"/{LOCATION_SERVICE}/RenewLocations": frozenset({_E}),
        f"/{LOCATION_SERVICE}/LookupLocation": frozenset({_E, _R, _A}),
        f"/{LOCATION_SERVICE}/BeginTurn": frozenset({_E, _R}),
        f"/{LOCATION_SERVICE}/ClaimLocation": frozenset({_E, _R}),
        f"/{LOCATION_SERVICE}/TouchConversation": frozenset({_R, _A}),
        f"/{LOCATION_SERVICE}/ReleaseLocation": frozenset().union(*RELEASES.values()),
        f"/{LOCATION_SERVICE}/Turns": frozenset({_E, _R}),
        f"/{LOCATION_SERVICE}/ListLocations": frozenset({_V, _A}),
        f"/{LOCATION_SERVICE}/WatchLocations": frozenset({_V, _A}),
        f"/{STATUS_SERVICE}/GetStatus": frozenset({_R, _V, _A}),
        **{f"/{service}/ServerReflectionInfo": frozenset({_V, _A}) for service in REFLECTION_SERVICES},
    }
)
"""Full method name to the roles that may call it. Which engines and tenants, a caller's identity says."""

OPEN: frozenset[str] = frozenset(f"/{HEALTH_SERVICE}/{name}" for name in ("Check", "List", "Watch"))
"""Answered to everyone who can connect: probes have no identity, and learn nothing but whether it serves."""

TURNS: Mapping[str, str] = MappingProxyType(
    {
        "lookup": f"/{LOCATION_SERVICE}/LookupLocation",
        "begin_turn": f"/{LOCATION_SERVICE}/BeginTurn",
        "claim": f"/{LOCATION_SERVICE}/ClaimLocation",
        "release": f"/{LOCATION_SERVICE}/ReleaseLocation",
        "touch": f"/{LOCATION_SERVICE}/TouchConversation",
    }
)
"""Each operation of a Turns stream is allowed to whom the call of its own is."""


def may_call(role: Role, method: str) -> bool:
    """Whether a role may call a method, by its full name "/package.Service/Method"."""
    return role in TABLE.get(method, ())


def table_rows() -> list[str]:
    """Return the table as rows of Markdown, for people."""
    mark = {True: "yes", False: ""}
    rows = ["| RPC | " + " | ".join(Role) + " | nobody known |", "|---|" + "---|" * (len(Role) + 1)]

    def row(name: str, allowed: frozenset[Role], *, everyone: bool = False) -> str:
        cells = [mark[everyone or role in allowed] for role in Role]
        return f"| {name} | " + " | ".join([*cells, mark[everyone]]) + " |"

    for method, allowed in TABLE.items():
        service, name = method.lstrip("/").split("/")
        if service == REFLECTION_SERVICES[1]:
            continue
        if name == "ReleaseLocation":
            rows += [row(f"`{name}` {target}", roles) for target, roles in RELEASES.items()]
        else:
            rows.append(row(f"`{name}`" + (" (each operation as its own RPC)" * (name == "Turns")), allowed))
    return [*rows, row("`grpc.health.v1.Health`", frozenset(), everyone=True)]
