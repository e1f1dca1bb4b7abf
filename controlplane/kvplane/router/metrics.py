"""What the router counts. Labels are bounded; no ids, no URLs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
