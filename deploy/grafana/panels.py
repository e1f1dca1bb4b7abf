"""What the dashboard shows, row by row. `generate.py` makes Grafana's JSON of it."""

from __future__ import annotations

from dataclasses import dataclass

C, R, K = "kvplane_controlplane_", "kvplane_router_", "kvplane_connector_"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or with `single` a number. `queries` are (PromQL, legend); `unit` is one of Grafana's."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    text: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels; `open` ones are seen at once."""

    title: str
    panels: tuple[Panel, ...]
    open: bool = False


def _of(metric: str, *more: str) -> str:
    """Return a selector of a metric."""
    labels = ", ".join(('job=~"$job"', *more))
    return f"{metric}{{{labels}}}"


def _rate(metric: str, *more: str, by: str = "", interval: str = "$__rate_interval") -> str:
    """Return the sum of a counter's rate, per second."""
    return f"sum {_by(by)}(rate({_of(metric, *more)}[{interval}]))"


def _by(labels: str) -> str:
    return f"by ({labels}) " if labels else ""


def _fleet(metric: str, *more: str, by: str) -> str:
    """Return a gauge that every replica knows alike."""
    return f"max {_by(by)}({_of(metric, *more)})"


def _fleet_rate(metric: str, *more: str, by: str) -> str:
    return f"max {_by(by)}(rate({_of(metric, *more)}[$__rate_interval]))"


def _quantile(share: float, metric: str, *more: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({_of(metric + '_bucket', *more)}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})"


def _graph(title: str, *queries: tuple[str, str], unit: str = "short", text: str = "") -> Panel:
    return Panel(title, queries, unit, text)


def _number(title: str, query: str, unit: str = "short", text: str = "") -> Panel:
    return Panel(title, ((query, ""),), unit, text, single=True)


_ENGINE, _TENANT = 'engine_id=~"$engine"', 'tenant_id=~"$tenant"'
_HIT, _ANSWERED = 'outcome="hit"', 'outcome="answered"'
_SAVED = _rate(C + "saved_tokens_total")
_BLOCK_SECONDS = f"sum({_fleet_rate(C + 'retained_block_seconds_total', by='engine_id')})"


def _each_engine(metric: str, what: str = "") -> tuple[str, str]:
    return _fleet(metric, _ENGINE, by="engine_id"), "{{engine_id}}" + what


def _each_tenant(metric: str) -> tuple[str, str]:
    return _fleet(metric, _TENANT, by="tenant_id"), "{{tenant_id}}"


_TENANT_BLOCK_SECONDS = C + "tenant_retained_block_seconds_total"
_REUSED = _rate(R + "reused_tokens_total")

OVERVIEW = Row(
    "Overview",
    (
        _number(
            "Conversations found",
            f"{_rate(C + 'turns_total', _HIT)} / {_rate(C + 'turns_total')}",
            "percentunit",
            "Of turns begun, those whose conversation is retained somewhere.",
        ),
        _number(
            "Prompt tokens not computed again",
            f"{_rate(R + 'reused_tokens_total')} / {_rate(R + 'prompt_tokens_total')}",
            "percentunit",
        ),
        _number("Engines on record", f"sum({_fleet(C + 'engines', by='role, state')})"),
        _number("Requests per second", _rate(R + "requests_total"), "reqps"),
        _graph("Path share", (_rate(R + "requests_total", by="path"), "{{path}}"), unit="reqps"),
        _graph(
            "Time to first token, p50 and p95 by path",
            (_quantile(0.5, R + "ttft_seconds", by="path"), "{{path}} p50"),
            (_quantile(0.95, R + "ttft_seconds", by="path"), "{{path}} p95"),
            unit="s",
        ),
        _graph(
            "Tokens saved",
            (_rate(R + "reused_tokens_total", by="path"), "reused, {{path}}"),
            (_SAVED, "read by claims, at most"),
            unit="short",
            text="Per second.",
        ),
        _graph(
            "What retention costs",
            (_BLOCK_SECONDS, "block-seconds per second: blocks held"),
            text="Blocks held for later turns and for open claims.",
        ),
        _graph(
            "What a block held for an hour buys",
            (f"3600 * {_SAVED} / {_BLOCK_SECONDS}", "tokens read by claims"),
            (
                f"3600 * {_REUSED} / {_BLOCK_SECONDS}",
                "tokens reused, direct turns too",
            ),
        ),
        _graph(
            "How retained tokens end",
            (_rate(C + "locations_ended_tokens_total", by="how"), "{{how}}"),
            text="claimed and continued were of use.",
        ),
    ),
    open=True,
)

ENGINES = Row(
    "Engines",
    (
        _graph("By role and state", (_fleet(C + "engines", by="role, state"), "{{role}} {{state}}")),
        _graph(
            "Events",
            (_rate(C + "engine_events_total", by="event"), "{{event}}"),
            (f"max(rate({_of(C + 'engines_gone_total')}[$__rate_interval]))", "gone"),
        ),
        _graph(
            "Conversations retained",
            _each_engine(C + "retained_conversations", ""),
        ),
        _graph("Tokens retained", _each_engine(C + "retained_tokens", "")),
        _graph(
            "Blocks: retained on record, held, free, all",
            _each_engine(C + "retained_blocks", " on record"),
            _each_engine(C + "engine_held_blocks", " held"),
            _each_engine(C + "engine_free_blocks", " free"),
            _each_engine(C + "engine_total_blocks", " all"),
        ),
        _graph(
            "Requests: running, waiting",
            _each_engine(C + "engine_running_requests", " running"),
            _each_engine(C + "engine_waiting_requests", " waiting"),
        ),
        _graph(
            "Block-seconds per second",
            (_fleet_rate(C + "retained_block_seconds_total", _ENGINE, by="engine_id"), "{{engine_id}}"),
        ),
        _graph(
            "Tokens saved per second",
            (_rate(C + "saved_tokens_total", _ENGINE, by="engine_id"), "{{engine_id}}"),
        ),
    ),
)

TENANTS = Row(
    "Tenants",
    (
        _graph(
            "Requests",
            (_rate(R + "tenant_requests_total", _TENANT, by="tenant_id, path"), "{{tenant_id}} {{path}}"),
            unit="reqps",
        ),
        _graph(
            "Tokens reused per second",
            (_rate(R + "tenant_reused_tokens_total", _TENANT, by="tenant_id"), "{{tenant_id}}"),
            (_rate(C + "tenant_saved_tokens_total", _TENANT, by="tenant_id"), "{{tenant_id}} read by claims"),
        ),
        _graph(
            "Conversations retained",
            _each_tenant(C + "tenant_retained_conversations"),
        ),
        _graph(
            "Tokens retained",
            _each_tenant(C + "tenant_retained_tokens"),
        ),
        _graph(
            "Blocks retained",
            _each_tenant(C + "tenant_retained_blocks"),
        ),
        _graph(
            "Block-seconds per second",
            (
                _fleet_rate(C + "tenant_retained_block_seconds_total", _TENANT, by="tenant_id"),
                "{{tenant_id}}",
            ),
        ),
    ),
)

CONTROL_PLANE = Row(
    "Control plane",
    (
        _graph("Healthy", (_of(C + "healthy"), "{{instance}}")),
        _graph(
            "Replicas and versions",
            (_of(C + "replicas"), "{{instance}} knows"),
            (_of(C + "replica_rank"), "{{instance}} rank"),
            (f"count by (version, store) ({_of(C + 'build_info')})", "{{version}} {{store}}"),
        ),
        _graph("RPCs", (_rate(C + "rpcs_total", by="method, code"), "{{method}} {{code}}"), unit="reqps"),
        _graph("RPCs under way", (f"sum by (method) ({_of(C + 'rpcs_in_flight')})", "{{method}}")),
        _graph(
            "RPCs, p99", (_quantile(0.99, C + "rpc_duration_seconds", by="method"), "{{method}}"), unit="s"
        ),
        _graph("Operations", (_rate(C + "operations_total", by="operation, code"), "{{operation}} {{code}}")),
        _graph(
            "Operations under way",
            (f"sum by (operation) ({_of(C + 'operations_in_flight')})", "{{operation}}"),
        ),
        _graph(
            "Operations, p99",
            (_quantile(0.99, C + "operation_duration_seconds", by="operation"), "{{operation}}"),
            unit="s",
        ),
        _graph("Refusals", (_rate(C + "refusals_total", by="reason"), "{{reason}}")),
        _graph(
            "Turns and lookups by what was known",
            (_rate(C + "turns_total", by="outcome"), "turn: {{outcome}}"),
            (_rate(C + "lookups_total", by="outcome"), "lookup: {{outcome}}"),
        ),
        _graph("Claims", (_rate(C + "claims_total", by="outcome"), "{{outcome}}")),
        _graph("Claims open", (f"max({_of(C + 'claims_open')})", "open")),
        _graph(
            "Claims' ages at their end",
            (_quantile(0.5, C + "claim_age_seconds"), "p50"),
            (_quantile(0.99, C + "claim_age_seconds"), "p99"),
            unit="s",
        ),
        _graph("How claims end", (_rate(C + "claims_ended_total", by="how"), "{{how}}")),
        _graph("Announcements", (_rate(C + "announcements_total", by="outcome"), "{{outcome}}")),
        _graph(
            "Renewals and touches",
            (_rate(C + "renewals_total", by="outcome"), "renewal: {{outcome}}"),
            (_rate(C + "touches_total", by="outcome"), "touch: {{outcome}}"),
        ),
        _graph("How locations end", (_rate(C + "locations_ended_total", by="how"), "{{how}}")),
        _graph(
            "Releases and orders to engines",
            (_rate(C + "releases_total", by="outcome"), "release: {{outcome}}"),
            (_rate(C + "release_orders_total", by="reason"), "order: {{reason}}"),
        ),
        _graph("Conversations evicted", (_rate(C + "conversations_evicted_total"), "evicted")),
        _graph("Engines' streams", (_of(C + "engine_streams"), "{{instance}}")),
    ),
)

STORE = Row(
    "Store",
    (
        _graph(
            "Calls", (_rate(C + "store_calls_total", by="operation, outcome"), "{{operation}} {{outcome}}")
        ),
        _graph(
            "Calls, p99",
            (_quantile(0.99, C + "store_call_duration_seconds", by="operation"), "{{operation}}"),
            unit="s",
        ),
        _graph("Staleness", (_of(C + "mirror_staleness_seconds"), "{{instance}}"), unit="s"),
        _graph("Records known", (_of(C + "mirror_records"), "{{instance}}")),
        _graph("Sweep overdue", (_of(C + "sweep_overdue_seconds"), "{{instance}}"), unit="s"),
        _graph("Decisions made anew", (_rate(C + "contentions_total"), "per second")),
    ),
)

ROUTER = Row(
    "Router",
    (
        _graph("Answers", (_rate(R + "requests_total", by="status"), "{{status}}"), unit="reqps"),
        _graph(
            "Reasons", (_rate(R + "requests_total", by="path, reason"), "{{path}} {{reason}}"), unit="reqps"
        ),
        _graph(
            "Under way and waiting",
            (f"sum({_of(R + 'requests_in_flight')})", "under way"),
            (f"sum({_of(R + 'queued')})", "waiting for an engine"),
            (_rate(R + "overloaded_total", by="status"), "turned away, {{status}} per second"),
            (_rate(R + "refused_total", by="status"), "not let in, {{status}} per second"),
        ),
        _graph(
            "Engines in rotation",
            (f"max by (role) ({_of(R + 'engines_up')})", "{{role}} up"),
            (f"max by (role) ({_of(R + 'engines_ejected')})", "{{role}} ejected"),
            (f"min by (engine) ({_of(R + 'engine_available')})", "{{engine}} available"),
        ),
        _graph(
            "Work at engines",
            (f"sum by (engine) ({_of(R + 'engine_outstanding_requests')})", "{{engine}} requests"),
            (_rate(R + "engine_legs_total", by="engine, leg"), "{{engine}} {{leg}} per second"),
        ),
        _graph("Tokens ahead", (f"sum by (engine) ({_of(R + 'engine_ahead_tokens')})", "{{engine}}")),
        _graph(
            "Prompt tokens computed in a second, learned",
            (f"max by (engine) ({_of(R + 'engine_computed_tokens_per_second')})", "{{engine}}"),
        ),
        _graph("Prefill, p95", (_quantile(0.95, R + "prefill_seconds", by="path"), "{{path}}"), unit="s"),
        _graph(
            "Retries and oddities",
            (_rate(R + "retries_total", by="leg"), "{{leg}} again"),
            (_rate(R + "prefill_without_params_total"), "prefill without params"),
            (_rate(R + "client_disconnects_total"), "clients gone"),
        ),
        _graph(
            "Control plane: answers and claims",
            (_rate(R + "lookups_total", by="outcome"), "known: {{outcome}}"),
            (_rate(R + "claims_total", by="outcome"), "claim: {{outcome}}"),
        ),
        _graph(
            "Control plane: calls",
            (_rate(R + "plane_calls_total", by="call, outcome"), "{{call}} {{outcome}}"),
            (f"min({_of(R + 'plane_up')})", "up"),
        ),
        _graph(
            "Control plane: p99",
            (_quantile(0.99, R + "plane_call_duration_seconds", by="call"), "{{call}}"),
            unit="s",
        ),
        _graph("Versions", (f"count by (version) ({_of(R + 'build_info')})", "{{version}}")),
    ),
)

CONNECTOR = Row(
    "Connector",
    (
        _graph(
            "Blocks",
            (_of(K + "retained_blocks"), "{{instance}} retained"),
            (_of(K + "held_blocks"), "{{instance}} held"),
            (_of(K + "budget_blocks"), "{{instance}} budget"),
        ),
        _graph("Bytes retained", (_of(K + "retained_bytes"), "{{instance}}"), unit="bytes"),
        _graph("Conversations", (_of(K + "retained_conversations"), "{{instance}}")),
        _graph(
            "Turns",
            (_rate(K + "retained_turns_total"), "retained"),
            (_rate(K + "freed_turns_total"), "freed"),
            (_rate(K + "not_retained_turns_total", by="reason"), "not retained: {{reason}}"),
        ),
        _graph(
            "Announcements and early frees",
            (_rate(K + "announcements_total", by="outcome"), "announced: {{outcome}}"),
            (_rate(K + "early_frees_total", by="reason"), "freed early: {{reason}}"),
            (_rate(K + "dropped_announcements_total"), "announcements dropped"),
        ),
        _graph("Prefills", (_rate(K + "prefills_total", by="outcome, detail"), "{{outcome}} {{detail}}")),
        _graph(
            "Pulls",
            (_rate(K + "pulls_total"), "pulls"),
            (_rate(K + "read_failures_total"), "failed"),
            (_rate(K + "reads_total", by="outcome"), "reads: {{outcome}}"),
        ),
        _graph(
            "Tokens",
            (_rate(K + "pulled_tokens_total"), "pulled"),
            (_rate(K + "verified_tokens_total"), "verified"),
            (_rate(K + "mismatched_tokens_total"), "mismatched"),
        ),
        _graph("Bytes pulled", (_rate(K + "pulled_bytes_total"), "estimated"), unit="Bps"),
        _graph(
            "Control plane",
            (_of(K + "control_plane_attached"), "{{instance}} attached"),
            (_of(K + "control_plane_silence_seconds"), "{{instance}} seconds silent"),
            (f"sum by (queue) ({_of(K + 'queue_entries')})", "waiting: {{queue}}"),
        ),
        _graph(
            "Questions",
            (_rate(K + "questions_total", by="outcome"), "{{outcome}}"),
            (
                f"{_rate(K + 'question_seconds_total')} / {_rate(K + 'questions_total', _ANSWERED)}",
                "seconds to an answer",
            ),
        ),
        _graph(
            "Faults and resets",
            (_rate(K + "faults_total", by="where"), "fault: {{where}}"),
            (_rate(K + "cache_resets_total", by="cause"), "reset: {{cause}}"),
        ),
    ),
)

ROWS = (OVERVIEW, ENGINES, TENANTS, CONTROL_PLANE, STORE, ROUTER, CONNECTOR)

NOT_SHOWN = {
    K + "events_total": "For finding faults: what it counts is of no interest until something is wrong.",
}
"""Metrics that are on no panel, and why."""
