"""How `kvplane top` shows what it has seen: for people, and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from kvplane.cli import engines as engine_list
from kvplane.cli.output import count, make_table, shown, span
from kvplane.cli.sampling import RouterSample, Sample

_PATHS = ("direct", "pull", "cold")


def as_json(sample: Sample, before: Sample | None) -> dict[str, Any]:
    """Return a look for programs; the fields are in deploy/CLI.md. Rates are None in the first."""
    counts = sample.counts
    router = sample.router
    return {
        "trouble": sample.trouble or None,
        "replicas": [
            {
                "replica_id": status.replica_id,
                "version": status.version,
                "serving": status.serving,
                "uptime_s": round(status.uptime_s, 3),
                "store_latency_s": status.store.latency_s,
                "staleness_s": status.store.staleness_s,
            }
            for status in sample.statuses
        ],
        "turns": counts.turns,
        "hits": counts.hits,
        "hit_rate": _share(counts.hits, counts.turns),
        "misses": dict(counts.misses),
        "claims": counts.claims,
        "claims_missed": counts.claims_missed,
        "announcements": counts.announcements,
        "turns_per_s": _rate(sample, before, "turns"),
        "hit_rate_now": _hit_rate_now(sample, before),
        "retained": _retained(sample),
        "engines": [engine_list.as_json(engine) for engine in sample.engines],
        "router": None if router is None else _router_json(router, sample, before),
    }


def _router_json(router: RouterSample, sample: Sample, before: Sample | None) -> dict[str, Any]:
    return {
        "url": router.url,
        "trouble": router.trouble or None,
        "paths": {
            path: {
                "requests": router.requests.get(path, 0.0),
                "share": _share(router.requests.get(path, 0.0), sum(router.requests.values())),
                "reused_tokens": router.reused_tokens.get(path, 0.0),
                "ttft_p50_s": quantile(router.buckets.get(path, ()), 0.5),
                "ttft_p95_s": quantile(router.buckets.get(path, ()), 0.95),
            }
            for path in paths(router)
        },
        "requests_per_s": _router_rate(sample, before),
    }


def render(sample: Sample, before: Sample | None) -> Group:
    """Return a look for people."""
    parts: list[Any] = [_plane_lines(sample, before)]
    if sample.router is not None:
        parts += [Text(), *_router_part(sample.router, sample, before)]
    parts += [Text(), _engine_table(sample)]
    return Group(*parts)


def _plane_lines(sample: Sample, before: Sample | None) -> Text:
    text = Text()
    if sample.trouble:
        text.append(f"{shown(sample.trouble)}\n", style="bold red")
    for status in sample.statuses:
        store = status.store
        latency = "-" if store.latency_s is None else f"{store.latency_s * 1000:.1f} ms"
        text.append(
            f"replica {status.replica_id}  {'serving' if status.serving else 'NOT SERVING'}"
            f"  up {span(status.uptime_s)}  version {shown(status.version)}"
            f"  store {latency}, {store.staleness_s:.1f} s behind at most\n",
            style="" if status.serving else "bold red",
        )
    counts, held = sample.counts, _retained(sample)
    rate = _rate(sample, before, "turns")
    now = _hit_rate_now(sample, before)
    text.append(
        f"turns {count(counts.turns)}{_per_s(rate)}  hit rate {_percent(_share(counts.hits, counts.turns))}"
        + ("" if now is None else f" (now {_percent(now)})")
        + f"  claims {count(counts.claims)}, in vain {count(counts.claims_missed)}"
        f"  announced {count(counts.announcements)}\n"
    )
    if counts.misses:
        most = sorted(counts.misses.items(), key=lambda item: -item[1])
        text.append(f"misses: {', '.join(f'{shown(reason)} {count(n)}' for reason, n in most[:6])}\n")
    text.append(
        f"retained {count(held['conversations'])} conversations, {count(held['tokens'])} tokens,"
        f" {count(held['blocks'])} blocks; {count(held['claimed'])} claimed"
    )
    return text


def _router_part(router: RouterSample, sample: Sample, before: Sample | None) -> list[Any]:
    title = Text(f"router {router.url}{_per_s(_router_rate(sample, before))}")
    if router.trouble:
        title.append(f": {shown(router.trouble)}", style="bold red")
        return [title]
    requests = sum(router.requests.values())
    rows = [
        (
            path,
            count(int(router.requests.get(path, 0))),
            _percent(_share(router.requests.get(path, 0.0), requests)),
            _milliseconds(quantile(router.buckets.get(path, ()), 0.5)),
            _milliseconds(quantile(router.buckets.get(path, ()), 0.95)),
            count(int(router.reused_tokens.get(path, 0))),
        )
        for path in paths(router)
    ]
    columns = ("path", ">requests", ">share", ">ttft p50", ">ttft p95", ">reused tokens")
    return [title, make_table(columns, rows)]


def paths(router: RouterSample) -> list[str]:
    """Return the paths a router has counted, the usual ones first."""
    return [*_PATHS, *sorted(set(router.requests) - set(_PATHS))]


def _engine_table(sample: Sample) -> Any:
    rows = []
    for engine in sample.engines:
        load, held, spec = engine.load, engine.holdings, engine.spec
        free = "-" if load is None else count(load.free_blocks)
        rows.append(
            (
                spec.engine_id,
                str(spec.role),
                ", ".join(spec.served_models) or spec.profile.model or "-",
                engine_list.state(engine),
                "-" if load is None else count(load.running_requests),
                "-" if load is None else count(load.waiting_requests),
                "-" if held is None else count(held.conversations),
                "-" if held is None else count(held.tokens),
                f"{free} of {count(spec.total_blocks)}" if spec.total_blocks else free,
            )
        )
    columns = (
        "engine",
        "role",
        "model",
        "state",
        ">running",
        ">waiting",
        ">conversations",
        ">tokens",
        ">free blocks",
    )
    return make_table(columns, rows)


def quantile(buckets: tuple[tuple[float, float], ...], share: float) -> float | None:
    """Return a histogram's quantile, between its bounds in proportion; None if it is empty.

    `buckets` are (upper bound, cumulated count), ascending. Beyond the last bound that bound is returned.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted, below, low = buckets[-1][1] * share, 0.0, 0.0
    for bound, cumulated in buckets:
        if cumulated >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - below) / max(1e-9, cumulated - below)
        below, low = cumulated, bound
    return low


def _retained(sample: Sample) -> dict[str, int]:
    held = [engine.holdings for engine in sample.engines if engine.holdings is not None]
    return {
        "conversations": sum(one.conversations for one in held),
        "tokens": sum(one.tokens for one in held),
        "blocks": sum(one.blocks for one in held),
        "claimed": sum(one.claimed for one in held),
    }


def _rate(sample: Sample, before: Sample | None, name: str) -> float | None:
    if before is None:
        return None
    passed_s = sample.at_s - before.at_s
    more = getattr(sample.counts, name) - getattr(before.counts, name)
    return None if passed_s <= 0 or more < 0 else more / passed_s


def _hit_rate_now(sample: Sample, before: Sample | None) -> float | None:
    if before is None:
        return None
    turns = sample.counts.turns - before.counts.turns
    return _share(sample.counts.hits - before.counts.hits, turns) if turns > 0 else None


def _router_rate(sample: Sample, before: Sample | None) -> float | None:
    if before is None or before.router is None or sample.router is None:
        return None
    passed_s = sample.at_s - before.at_s
    more = _sum(sample.router.requests) - _sum(before.router.requests)
    return None if passed_s <= 0 or more < 0 else more / passed_s


def _sum(values: Mapping[str, float]) -> float:
    return sum(values.values())


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _per_s(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:,.1f}/s)"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms"
