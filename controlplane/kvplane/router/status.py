"""The router at a glance, for `/ui/data`: fleet, paths with their first tokens, recent decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric

from kvplane.client.model import Engine as RegisteredEngine
from kvplane.router.policy import Path

if TYPE_CHECKING:
    from kvplane.router.engine import Engine
    from kvplane.router.explain import Trail
    from kvplane.router.pool import EnginePool

REUSED = frozenset({"pulled", "local_hit", "below_threshold"})
"""Reasons of pulls in which KV was used again; on the direct path it always is."""
_MOST_ENGINES = 500
_MOST_REASONS = 64


def engines(pool: EnginePool) -> list[dict[str, Any]]:
    """Return what is known of each engine: the router's view, and the load it last reported."""
    registered = {str(entry.spec.engine_id): entry for entry in pool.registered}
    ordered = sorted(pool.engines, key=lambda engine: (not engine.prefill, engine.url))
    return [
        _engine(engine, pool, [registered[i] for i in engine.engine_ids if i in registered])
        for engine in ordered[:_MOST_ENGINES]
    ]


def _engine(engine: Engine, pool: EnginePool, entries: list[RegisteredEngine]) -> dict[str, Any]:
    state = "draining" if engine.draining else "up"
    if engine.up and pool.ejected(engine):
        state = "ejected"
    loads = [entry.load for entry in entries if entry.load is not None]
    return {
        "url": engine.url,
        "roles": [role for role in ("prefill", "decode") if getattr(engine, role)],
        "state": state if engine.up else "down",
        "engine_ids": list(engine.engine_ids),
        "models": sorted(engine.models)[:16],
        "outstanding": engine.outstanding,
        "waiting": engine.waiting,
        "ahead_tokens": engine.ahead_tokens,
        # Unknown is another thing than nothing: an engine without our connector reports no load.
        "retained_conversations": sum(load.retained_conversations for load in loads) if loads else None,
        "retained_blocks": sum(load.retained_blocks for load in loads) if loads else None,
        "total_blocks": sum(entry.spec.total_blocks for entry in entries) if entries else None,
    }


def paths(families: Iterable[Metric]) -> dict[str, Any]:
    """Return, from the router's metrics, what each path served: counts since the start, never falling.

    `reused` counts requests in which KV was used again, `ttft.buckets` first tokens by upper bound in s.
    """
    by_path = {str(path): _nothing() for path in Path}
    for family in families:
        for sample in family.samples:
            own = by_path.get(sample.labels.get("path", ""))
            if own is None:
                continue
            if sample.name == "kvplane_router_requests_total":
                _count(own, sample.labels, int(sample.value))
            elif sample.name == "kvplane_router_reused_tokens_total":
                own["reused_tokens"] += int(sample.value)
            elif sample.name == "kvplane_router_ttft_seconds_sum":
                own["ttft"]["sum_s"] += sample.value
            elif sample.name == "kvplane_router_ttft_seconds_bucket":
                bound = sample.labels["le"]
                counts = own["ttft"]["buckets"]
                counts[bound] = counts.get(bound, 0) + int(sample.value)
    for path, own in by_path.items():
        reasons: dict[str, int] = own["reasons"]
        kept = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:_MOST_REASONS]
        own["reasons"] = dict(kept)
        own["reused"] = (
            own["answered"] if path == Path.DIRECT else sum(reasons.get(name, 0) for name in REUSED)
        )
        if path == Path.COLD:
            own["reused"] = 0
    return by_path


def _nothing() -> dict[str, Any]:
    return {
        "answered": 0,
        "failed": 0,
        "reused_tokens": 0,
        "reasons": {},
        "ttft": {"sum_s": 0.0, "buckets": {}},
    }


def _count(own: dict[str, Any], labels: dict[str, str], requests: int) -> None:
    if labels["status"] != "2xx":
        own["failed"] += requests
        return
    own["answered"] += requests
    own["reasons"][labels["reason"]] = own["reasons"].get(labels["reason"], 0) + requests


def recent(trails: Iterable[Trail], most: int) -> list[dict[str, Any]]:
    """Return the last requests, the newest first, each in a line's worth of fields."""
    lines = list[dict[str, Any]]()
    for trail in trails:
        if len(lines) == most:
            break
        told = trail.told()
        legs = {attempt["leg"]: attempt["engine"] for attempt in told["attempts"]}
        lines.append(
            {
                **{name: told[name] for name in ("request_id", "state", "age_s", "path", "reason", "status")},
                "model": told["model"],
                "turn": told["turn"],
                "identity": told["identity"],
                "conversation": told["conversation"],
                "tokens": told["tokens"],
                "prefill": legs.get("prefill"),
                "decode": legs.get("decode"),
                "decided_ms": told["timings_ms"]["decided"],
                "total_ms": told["timings_ms"]["total"],
            }
        )
    return lines
