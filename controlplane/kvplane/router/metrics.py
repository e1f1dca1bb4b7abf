"""What the router counts. Labels are bounded; no ids of conversations, no paths of URLs.

Engines are labelled by host and port, tenants by name; beyond a number of either, all further are "other".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from kvplane.router.engine import Engine
    from kvplane.router.learned import RateBook
    from kvplane.router.turn import Turn

OTHER = "other"
"""The label of what has none of its own."""
ENGINES, TENANTS = 256, 50
"""How many of each have one, as long as the process runs: the first that come."""
_VERSION = version("kvplane")

_QUICK_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """The router's metrics, on the registry that is passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "kvplane_router_requests",
            "Requests answered, by path taken, why, and HTTP status class.",
            ["path", "reason", "status"],
            registry=registry,
        )
        self.ttft = Histogram(
            "kvplane_router_ttft_seconds",
            "From a request's arrival to the first byte of a streamed reply, by path.",
            ["path"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.prefill = Histogram(
            "kvplane_router_prefill_seconds",
            "Duration of prefill legs that succeeded, by path.",
            ["path"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.reused_tokens = Counter(
            "kvplane_router_reused_tokens",
            "Tokens whose KV was reused instead of recomputed, where known, by path.",
            ["path"],
            registry=registry,
        )
        self.retries = Counter(
            "kvplane_router_retries",
            "Legs that failed and were tried again, by leg.",
            ["leg"],
            registry=registry,
        )
        self.no_prefill_params = Counter(
            "kvplane_router_prefill_without_params",
            "Prefill legs that succeeded without leaving KV to read; the decode engine computed the prompt.",
            registry=registry,
        )
        self.disconnects = Counter(
            "kvplane_router_client_disconnects", "Clients that went away before the end.", registry=registry
        )
        self.claims = Counter(
            "kvplane_router_claims", "Claims asked for, by outcome.", ["outcome"], registry=registry
        )
        self.plane_calls = Counter(
            "kvplane_router_plane_calls",
            "Calls to the control plane, by call and outcome.",
            ["call", "outcome"],
            registry=registry,
        )
        self.plane_up = Gauge(
            "kvplane_router_plane_up",
            "1 while the control plane answers, else 0.",
            multiprocess_mode="livemin",
            registry=registry,
        )
        self.engines_up = Gauge(
            "kvplane_router_engines_up",
            "Engines in rotation, by role.",
            ["role"],
            multiprocess_mode="livemin",
            registry=registry,
        )
        self.overloaded = Counter(
            "kvplane_router_overloaded",
            "Requests that were not taken on, by status: 429 too many, 503 no engine became free in time.",
            ["status"],
            registry=registry,
        )
        self.refused = Counter(
            "kvplane_router_refused",
            "Requests that were not let in where there are tenants, by status: 401 not authenticated, 403 not"
            " theirs to ask, 429 beyond the tenant's quota, 503 tokens cannot be verified.",
            ["status"],
            registry=registry,
        )
        self.queued = Gauge(
            "kvplane_router_queued",
            "Requests that wait for a place on an engine.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.engines_ejected = Gauge(
            "kvplane_router_engines_ejected",
            "Engines that are up but out of rotation because of their answers, by role.",
            ["role"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.lookups = Counter(
            "kvplane_router_lookups",
            "What the control plane knew of requests' conversations: hit, why not, or unavailable.",
            ["outcome"],
            registry=registry,
        )
        self.plane_took = Histogram(
            "kvplane_router_plane_call_duration_seconds",
            "How long answered calls to the control plane took, waits for turns in flight included.",
            ["call"],
            buckets=_QUICK_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvplane_router_prompt_tokens",
            "Tokens of prompts, estimated where no engine told, by path.",
            ["path"],
            registry=registry,
        )
        self.tenant_requests = Counter(
            "kvplane_router_tenant_requests",
            "Requests answered that belong to a conversation, by tenant and path.",
            ["tenant_id", "path"],
            registry=registry,
        )
        self.tenant_reused_tokens = Counter(
            "kvplane_router_tenant_reused_tokens",
            "Tokens whose KV was reused instead of recomputed, by tenant.",
            ["tenant_id"],
            registry=registry,
        )
        self.engine_legs = Counter(
            "kvplane_router_engine_legs",
            "Legs that ended well, by engine and leg.",
            ["engine", "leg"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "kvplane_router_requests_in_flight",
            "Requests under way, those that wait included.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.build_info = Gauge(
            "kvplane_router_build_info",
            "Always 1; its labels tell what runs.",
            ["version"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.build_info.labels(_VERSION).set(1)
        self.engine_gauges: dict[str, Gauge] = {
            name: Gauge(
                f"kvplane_router_engine_{name}",
                text,
                ["engine"],
                multiprocess_mode=mode,  # type: ignore[arg-type]  # one of its literals, each of them below
                registry=registry,
            )
            for name, text, mode in _OF_ENGINES
        }
        self._engine_labels: dict[str, str] = {}
        self._tenant_labels: dict[str, str] = {}
        self._shown: set[str] = set()
        self._children: dict[tuple[Any, ...], Any] = {}

    def _child(self, metric: Counter | Histogram, *labels: str) -> Any:
        """Return a metric's child; looked up once, since the library takes a lock each time."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def ended(self, turn: Turn, status: str) -> None:
        """Count a request that has been answered."""
        path = turn.path.value
        self.requests.labels(path, turn.reason or "none", f"{status[0]}xx").inc()
        if turn.prompt_tokens:
            self._child(self.prompt_tokens, path).inc(turn.prompt_tokens)
        if turn.key is not None:
            tenant = _label(self._tenant_labels, turn.key.tenant_id, turn.key.tenant_id, TENANTS)
            self._child(self.tenant_requests, tenant, path).inc()
            if turn.reused_tokens:
                self._child(self.tenant_reused_tokens, tenant).inc(turn.reused_tokens)
        if status[0] == "2" and turn.decoder is not None:
            self._child(self.engine_legs, self._engine(turn.decoder.url), "decode").inc()
            if turn.prefilled is not None:
                self._child(self.engine_legs, self._engine(turn.prefilled.engine.url), "prefill").inc()

    def plane_answered(self, call: str, seconds: float) -> None:
        """Count a call that the control plane has answered."""
        self._child(self.plane_calls, call, "ok").inc()
        self._child(self.plane_took, call).observe(seconds)

    def looked_up(self, known: str) -> None:
        """Count what the control plane knew of a request's conversation: "hit", or why nothing."""
        outcome = "unavailable" if known == "plane_unavailable" else known
        self._child(self.lookups, outcome).inc()

    def _engine(self, url: str) -> str:
        return _label(self._engine_labels, url, urlsplit(url).netloc.rpartition("@")[2], ENGINES)

    def show_engines(
        self, engines: Iterable[Engine], ejected: Callable[[Engine], bool], rates: RateBook
    ) -> None:
        """Set what is known of each engine now; of those that have gone, nothing is."""
        shown = set[str]()
        for engine in engines:
            label = self._engine(engine.url)
            if label == OTHER:
                continue
            shown.add(label)
            values = (
                float(engine.up and not ejected(engine)),
                engine.outstanding,
                engine.ahead_tokens,
                rates.compute(engine.url),
            )
            for gauge, value in zip(self.engine_gauges.values(), values, strict=True):
                gauge.labels(label).set(math.nan if value is None else value)
        for label in self._shown - shown:
            for gauge in self.engine_gauges.values():
                gauge.labels(label).set(math.nan)
        self._shown |= shown


_OF_ENGINES = (
    ("available", "1 while an engine is up and in rotation, else 0; NaN for one that has gone.", "livemin"),
    ("outstanding_requests", "Requests of this router's that an engine works on.", "livesum"),
    (
        "ahead_tokens",
        "Prompt tokens of this router's that an engine has yet to compute, estimated.",
        "livesum",
    ),
    (
        "computed_tokens_per_second",
        "Prompt tokens an engine computes in a second, as learned from its answers; NaN while unknown.",
        "livemax",
    ),
)


def _label(known: dict[str, str], name: str, label: str, most: int) -> str:
    """Return the label of a name: its own for the first so many, one for all others."""
    found = known.get(name)
    if found is None:
        if len(known) >= most:
            return OTHER
        found = known[name] = label
    return found
