"""What the doctor has seen. Checks look at nothing else."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvplane.client import model as m


@dataclass(frozen=True, slots=True)
class Offset:
    """By how many seconds a clock is ahead of this machine's, and how wrong that may be."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class PlaneFacts:
    """A replica of the control plane. `status` is None if it did not say; `trouble` is then why."""

    address: str
    status: m.PlaneStatus | None = None
    trouble: str = ""
    too_old: bool = False
    """It answers, but does not know the question."""
    refused: bool = False
    """It answers, but not to whom this is."""
    fleet: Offset | None = None
    clock: Offset | None = None


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """A router, as it answers; what it did not say is empty."""

    url: str
    trouble: str = ""
    health: dict[str, Any] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    requests: float = 0.0
    """Turns it has served."""
    clock: Offset | None = None
    untrusted: bool = False
    """Something answers, whose certificate is not to be trusted."""

    def engines(self, role: str) -> dict[str, str]:
        """Return the engines that it uses in a role, "prefill" or "decode", and their states."""
        found = self.ready.get(role)
        return {str(url): str(state) for url, state in found.items()} if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class EngineHttpFacts:
    """An engine's HTTP server, as it answers."""

    url: str
    asked_for: bool
    """Named by --engine, not found through the control plane."""
    trouble: str = ""
    version: str = ""
    cache: dict[str, str] = field(default_factory=dict)
    """Labels of vLLM's cache_config_info."""
    has_metrics: bool = False
    has_connector: bool = False
    clock: Offset | None = None
    untrusted: bool = False
    """As of a router."""


@dataclass(frozen=True, slots=True)
class SideChannel:
    """Where an engine lets others find its KV, and why nobody can connect there from here, "" if one can."""

    host: str
    port: int
    trouble: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it. `engines` is None if no control plane told."""

    planes: tuple[PlaneFacts, ...] = ()
    engines: tuple[m.Engine, ...] | None = None
    routers: tuple[RouterFacts, ...] = ()
    engine_https: tuple[EngineHttpFacts, ...] = ()
    side_channels: tuple[SideChannel, ...] = ()
    file_troubles: tuple[tuple[str, str], ...] = ()
    """(option, what is wrong with its file)."""

    @property
    def statuses(self) -> list[m.PlaneStatus]:
        """What replicas said of themselves."""
        return [plane.status for plane in self.planes if plane.status is not None]

    def prefill(self) -> list[m.Engine]:
        """Live engines that compute prompts."""
        return [e for e in self.engines or () if e.spec.role is not m.EngineRole.DECODE]

    def decode(self) -> list[m.Engine]:
        """Live engines that generate replies."""
        return [e for e in self.engines or () if e.spec.role is not m.EngineRole.PREFILL]

    def several_machines(self) -> bool:
        """Tell whether the fleet is known to be on more than one machine, or elsewhere than here."""
        hosts = {host_of(engine.spec.endpoint) for engine in self.engines or () if engine.spec.endpoint}
        hosts |= {said.side_channel_host for e in self.engines or () if (said := e.spec.settings) is not None}
        hosts |= {host_of(router.url) for router in self.routers}
        hosts |= {host_of(http.url) for http in self.engine_https}
        hosts |= {plane.address.rpartition(":")[0].rpartition("/")[2] for plane in self.planes}
        return any(host and not is_loopback(host) for host in hosts)


def host_of(url: str) -> str:
    """Return the host in a URL, "" if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Tell whether a host names the machine that looks it up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
