"""The alert rules, each with what to do and with series that it fires on and stays quiet on.

`generate.py` makes Prometheus' files of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

C, R, K = "kvplane_controlplane_", "kvplane_router_", "kvplane_connector_"

Series = Mapping[str, str]
"""Values by series, as promtool writes them, one a minute: "0+10x60" is 0, 10, 20 and so on."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert.

    Attributes:
        name: of the alert.
        query: PromQL; fires while it gives anything.
        lasting: minutes for which it has to.
        severity: "critical" (people wait or get errors), "warning" (it will come to that) or "info" (waste).
        summary: one line, of what is seen.
        runbook: what to look at and what to do.
        fires: series on which it fires within the hour.
        labels: of the alert that fires, besides its severity.
        quiet: series on which it never does.
    """

    name: str
    query: str
    lasting: int
    severity: str
    summary: str
    runbook: str
    fires: Series
    quiet: Series
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def seen_at(self) -> int:
        """The minute by which it has fired on its series, and still does."""
        return 25 if not self.lasting else 115 if self.lasting >= 60 else 85 if self.lasting >= 30 else 50


def _share(part: str, whole: str) -> str:
    return f"sum(rate({part}[10m])) / sum(rate({whole}[10m]))"


CONTROL_PLANE = (
    Rule(
        "KvplaneControlPlaneUnhealthy",
        f"{C}healthy == 0",
        1,
        "critical",
        "A control plane does not answer calls.",
        "Routers serve everything cold meanwhile, so clients get answers, but slowly. Look at its log"
        " for health_changed, which has the cause: the store does not answer"
        " (kvplane_controlplane_store_calls_total, deploy/STORE.md), or its copy of it is too old"
        " (kvplane_controlplane_mirror_staleness_seconds). With several replicas the others go on.",
        {f'{C}healthy{{instance="a"}}': "0x60"},
        {f'{C}healthy{{instance="a"}}': "1x10 0 1x50"},
        {"instance": "a"},
    ),
    Rule(
        "KvplaneControlPlaneAbsent",
        f"absent({C}build_info)",
        5,
        "critical",
        "No control plane is scraped.",
        "Either none runs, or Prometheus does not reach it: --metrics-port must be given, and beyond loopback"
        " --metrics-host; with --metrics-tls-cert Prometheus needs scheme: https and a tls_config, with"
        " --metrics-client-ca a certificate in it. Routers tell by kvplane_router_plane_up whether one"
        " answers.",
        {"something_else": "1x60"},
        {f'{C}build_info{{version="1"}}': "1x120"},
    ),
    Rule(
        "KvplaneInternalErrors",
        f'sum by (method) (increase({C}rpcs_total{{code="INTERNAL"}}[10m])) > 0',
        0,
        "warning",
        "Calls fail by a fault of kvplane's own.",
        "The control plane's log has rpc_failed with a traceback for each; please report it. Clients"
        " are served cold where such a call fails.",
        {f'{C}rpcs_total{{method="BeginTurn", code="INTERNAL"}}': "0x20 3x40"},
        {f'{C}rpcs_total{{method="BeginTurn", code="UNAVAILABLE"}}': "0+3x60"},
        {"method": "BeginTurn"},
    ),
    Rule(
        "KvplaneStoreErrors",
        _share(f'{C}store_calls_total{{outcome=~"unavailable|full|closed"}}', f"{C}store_calls_total")
        + " > 0.01",
        5,
        "critical",
        "More than one in a hundred calls of the store fail.",
        "full: compact and defragment etcd, or raise its quota (deploy/STORE.md). unavailable: etcd"
        " has no leader, or the network to it is cut: etcdctl endpoint status. Calls that cannot be"
        " decided are refused, and routers serve cold.",
        {
            f'{C}store_calls_total{{operation="transact", outcome="ok"}}': "0+600x60",
            f'{C}store_calls_total{{operation="transact", outcome="unavailable"}}': "0+60x60",
        },
        {
            f'{C}store_calls_total{{operation="transact", outcome="ok"}}': "0+600x60",
            f'{C}store_calls_total{{operation="transact", outcome="unavailable"}}': "0+1x60",
        },
    ),
    Rule(
        "KvplaneStoreSlow",
        f"histogram_quantile(0.99, sum by (le) (rate({C}store_call_duration_seconds_bucket"
        '{operation="transact"}[10m]))) > 0.25',
        10,
        "warning",
        "One in a hundred transactions takes more than 250 ms.",
        "It is part of each turn's time to first token. etcd is as fast as its disks write: look at"
        " etcd_disk_wal_fsync_duration_seconds and at what else uses them; deploy/STORE.md.",
        {
            f'{C}store_call_duration_seconds_bucket{{operation="transact", le="0.25"}}': "0+50x60",
            f'{C}store_call_duration_seconds_bucket{{operation="transact", le="0.5"}}': "0+100x60",
            f'{C}store_call_duration_seconds_bucket{{operation="transact", le="+Inf"}}': "0+100x60",
        },
        {
            f'{C}store_call_duration_seconds_bucket{{operation="transact", le="0.25"}}': "0+100x60",
            f'{C}store_call_duration_seconds_bucket{{operation="transact", le="+Inf"}}': "0+100x60",
        },
    ),
    Rule(
        "KvplaneMirrorStale",
        f"{C}mirror_staleness_seconds > 1",
        2,
        "warning",
        "A control plane hears late of what others have written.",
        "Beyond --max-staleness it refuses calls. The store's watch is slow or broken"
        " (store_watch_broken in the log), or the process is short of CPU.",
        {f'{C}mirror_staleness_seconds{{instance="a"}}': "1.5x60"},
        {f'{C}mirror_staleness_seconds{{instance="a"}}': "0.6x60"},
        {"instance": "a"},
    ),
    Rule(
        "KvplaneSweepOverdue",
        f"{C}sweep_overdue_seconds > 60",
        5,
        "warning",
        "What is over is not cleared away.",
        "Nothing wrong is handed out, but engines hear late that blocks are free. sweep_postponed in"
        " the log has the cause; mostly the store takes no writes.",
        {f'{C}sweep_overdue_seconds{{instance="a"}}': "0+60x60"},
        {f'{C}sweep_overdue_seconds{{instance="a"}}': "6x60"},
        {"instance": "a"},
    ),
    Rule(
        "KvplaneReplicaMissing",
        f"max({C}replicas) < max(max_over_time({C}replicas[1h]))",
        10,
        "warning",
        "A replica of the control plane is gone.",
        "Those that are left serve. Look for the one that went: its log, or why it was not started"
        " again. An intended change of their number clears by itself within an hour.",
        {f'{C}replicas{{instance="a"}}': "3x20 2x40"},
        {f'{C}replicas{{instance="a"}}': "3x60"},
    ),
    Rule(
        "KvplaneConversationsEvicted",
        f"sum(increase({C}conversations_evicted_total[30m])) > 0",
        30,
        "warning",
        "Conversations are forgotten to make room for others.",
        "There are more than --max-conversations on record. Raise it (about 4 KB of memory each), or"
        " have engines give shorter leases (deploy/LEASES.md).",
        {f"{C}conversations_evicted_total": "0+10x90"},
        {f"{C}conversations_evicted_total": "0x90"},
    ),
)

CONVERSATIONS = (
    Rule(
        "KvplaneNothingReused",
        _share(f'{C}turns_total{{outcome="hit"}}', f"{C}turns_total") + " < 0.01"
        f" and sum(rate({C}turns_total[10m])) > 0.1"
        f" and sum(max by (engine_id) ({C}retained_conversations)) > 0",
        30,
        "warning",
        "Conversations are retained, but none is found again.",
        "kvplane doctor looks for the usual causes. Do clients name their conversations alike from"
        " turn to turn (kvplane_router_requests_total by reason: no_conversation_id), do tenants and"
        " models match, are leases shorter than people's pauses"
        " (kvplane_controlplane_locations_ended_total: expired)?",
        {
            f'{C}turns_total{{outcome="hit"}}': "0x90",
            f'{C}turns_total{{outcome="unknown_conversation"}}': "0+60x90",
            f'{C}retained_conversations{{engine_id="d"}}': "50x90",
        },
        {
            f'{C}turns_total{{outcome="hit"}}': "0+30x90",
            f'{C}turns_total{{outcome="unknown_conversation"}}': "0+60x90",
            f'{C}retained_conversations{{engine_id="d"}}': "50x90",
        },
    ),
    Rule(
        "KvplaneClaimsTimeOut",
        _share(f'{C}claims_ended_total{{how="timed_out"}}', f"{C}claims_ended_total") + " > 0.05",
        10,
        "warning",
        "More than one in twenty claims are never read.",
        "Their blocks were held for nobody. Prefill engines that queue for longer than"
        " --claim-timeout (kvplane_controlplane_claim_age_seconds, vLLM's num_requests_waiting), that"
        " die, or that cannot reach the decode engine's side channel"
        " (kvplane_connector_read_failures_total).",
        {
            f'{C}claims_ended_total{{how="timed_out"}}': "0+10x60",
            f'{C}claims_ended_total{{how="read"}}': "0+50x60",
        },
        {
            f'{C}claims_ended_total{{how="timed_out"}}': "0+1x60",
            f'{C}claims_ended_total{{how="read"}}': "0+50x60",
        },
    ),
    Rule(
        "KvplaneClaimsHeldLong",
        f"histogram_quantile(0.95, sum by (le) (rate({C}claim_age_seconds_bucket[10m]))) > 20",
        10,
        "warning",
        "One in twenty claims is open for longer than 20 s.",
        "Readers wait before they read: prefill engines are busy. Add some, or lower the router's"
        " --max-engine-requests, so that requests wait before they claim.",
        {
            f'{C}claim_age_seconds_bucket{{le="20.0"}}': "0+80x60",
            f'{C}claim_age_seconds_bucket{{le="30.0"}}': "0+100x60",
            f'{C}claim_age_seconds_bucket{{le="+Inf"}}': "0+100x60",
        },
        {
            f'{C}claim_age_seconds_bucket{{le="20.0"}}': "0+100x60",
            f'{C}claim_age_seconds_bucket{{le="+Inf"}}': "0+100x60",
        },
    ),
    Rule(
        "KvplaneRetentionWasted",
        _share(
            f'{C}locations_ended_tokens_total{{how!~"claimed|continued"}}', f"{C}locations_ended_tokens_total"
        )
        + " > 0.9",
        60,
        "info",
        "Nine in ten retained tokens end unused.",
        "Conversations do not go on within their leases. That costs nothing while engines have blocks"
        " to spare; else shorter leases (deploy/LEASES.md) or a smaller budget.",
        {
            f'{C}locations_ended_tokens_total{{how="expired"}}': "0+1000x120",
            f'{C}locations_ended_tokens_total{{how="claimed"}}': "0+10x120",
        },
        {
            f'{C}locations_ended_tokens_total{{how="expired"}}': "0+1000x120",
            f'{C}locations_ended_tokens_total{{how="claimed"}}': "0+1000x120",
        },
    ),
    Rule(
        "KvplaneTenantsAtQuota",
        f'sum(rate({C}locations_ended_total{{how="quota"}}[30m])) > 0',
        60,
        "info",
        "Tenants lose conversations to their own quotas.",
        "kvplane_controlplane_tenant_retained_blocks shows whose. Raise the limit, or leave it:"
        " nobody else is touched (deploy/QUOTAS.md).",
        {f'{C}locations_ended_total{{how="quota"}}': "0+5x120"},
        {f'{C}locations_ended_total{{how="quota"}}': "5x120"},
    ),
)

ENGINES = (
    Rule(
        "KvplaneEnginesLost",
        f"max(increase({C}engines_gone_total[10m]))"
        f' - (sum(increase({C}engine_events_total{{event="deregistered"}}[10m])) or vector(0)) > 0.5',
        0,
        "warning",
        "An engine went without a word.",
        "It died, or was cut off for longer than --engine-lease; what it retained is gone."
        " engine_detached in the log has its id. It registers again by itself when it is back.",
        {
            f"{C}engines_gone_total": "0x20 1x40",
            f'{C}engine_events_total{{event="deregistered"}}': "0x60",
        },
        {
            f"{C}engines_gone_total": "0x20 1x40",
            f'{C}engine_events_total{{event="deregistered"}}': "0x20 1x40",
        },
    ),
    Rule(
        "KvplaneEnginesSilent",
        f'sum(max by (role) ({C}engines{{state="silent"}})) > 0',
        2,
        "warning",
        "An engine's stream broke, and it has not come back.",
        "Nothing of it is handed out meanwhile. If it lives, look at its log for what keeps it from"
        " the control plane.",
        {f'{C}engines{{role="decode", state="silent"}}': "1x60"},
        {f'{C}engines{{role="decode", state="attached"}}': "1x60"},
    ),
    Rule(
        "KvplaneEngineStreamsBreak",
        f'sum(increase({C}engine_events_total{{event="detached"}}[10m])) > 10',
        5,
        "warning",
        "Engines attach again and again.",
        "Connections are cut: idle timeouts of a proxy or load balancer between them, or control"
        " planes that are restarted over and over. Two engines with the same id replace each other:"
        " kvplane engines.",
        {f'{C}engine_events_total{{event="detached"}}': "0+3x60"},
        {f'{C}engine_events_total{{event="detached"}}': "0x30 2x30"},
    ),
    Rule(
        "KvplaneConnectorDetached",
        f"{K}control_plane_attached == 0",
        5,
        "warning",
        "An engine has no control plane.",
        "It serves, but retains nothing new after 10 s. kvplane_endpoint in its"
        " kv_connector_extra_config, the network, and whether a control plane answers there.",
        {f'{K}control_plane_attached{{engine_id="d"}}': "0x60"},
        {f'{K}control_plane_attached{{engine_id="d"}}': "1x20 0x2 1x38"},
        {"engine_id": "d"},
    ),
    Rule(
        "KvplaneConnectorFaults",
        f"sum by (where) (increase({K}faults_total[10m])) > 0",
        0,
        "warning",
        "The connector failed at something.",
        "Each costs reuse, never a request. The engine's log has the traceback; please report it.",
        {f'{K}faults_total{{where="finish"}}': "0x20 1x40"},
        {f'{K}faults_total{{where="finish"}}': "1x60"},
        {"where": "finish"},
    ),
    Rule(
        "KvplaneReadsFail",
        f"sum(rate({K}read_failures_total[10m]))"
        f" / (sum(rate({K}pulls_total[10m])) + sum(rate({K}read_failures_total[10m]))) > 0.05",
        5,
        "critical",
        "More than one in twenty reads of retained KV fail.",
        "Where kv_load_failure_policy is fail, each is an error for a client: set it to recompute on"
        " prefill engines. Then the cause: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT must be reachable"
        " from prefill engines; NIXL's own log.",
        {f"{K}read_failures_total": "0+10x60", f"{K}pulls_total": "0+50x60"},
        {f"{K}read_failures_total": "0+1x60", f"{K}pulls_total": "0+50x60"},
    ),
    Rule(
        "KvplaneHistoriesDiffer",
        f"sum(rate({K}mismatched_tokens_total[30m]))"
        f" / (sum(rate({K}mismatched_tokens_total[30m])) + sum(rate({K}verified_tokens_total[30m]))) > 0.5",
        30,
        "info",
        "Half of what is retained is not what clients send next.",
        "Nothing wrong is used, but retention is in vain. Chat templates that strip reasoning,"
        " clients that edit or compact their histories, tools in another order.",
        {f"{K}mismatched_tokens_total": "0+900x90", f"{K}verified_tokens_total": "0+100x90"},
        {f"{K}mismatched_tokens_total": "0+100x90", f"{K}verified_tokens_total": "0+900x90"},
    ),
    Rule(
        "KvplaneAnnouncementsDropped",
        f"sum(increase({K}dropped_announcements_total[10m])) > 0",
        0,
        "warning",
        "Engines drop announcements unsent.",
        "The control plane is away or slower than turns end; those conversations start cold next time. See"
        " KvplaneControlPlaneUnhealthy, and kvplane_connector_queue_entries.",
        {f"{K}dropped_announcements_total": "0x20 4x40"},
        {f"{K}dropped_announcements_total": "4x60"},
    ),
)

ROUTERS = (
    Rule(
        "KvplaneNoDecodeEngine",
        f'min({R}engines_up{{role="decode"}}) < 1',
        1,
        "critical",
        "A router has no decode engine: requests fail.",
        "GET /ready of the router says which engines it knows and what is wrong with each.",
        {f'{R}engines_up{{role="decode"}}': "0x60"},
        {f'{R}engines_up{{role="decode"}}': "2x60"},
    ),
    Rule(
        "KvplaneNoPrefillEngine",
        f'min({R}engines_up{{role="prefill"}}) < 1',
        5,
        "warning",
        "A router has no prefill engine: decode engines compute all prompts.",
        "GET /ready of the router, as for decode engines. Silence this one where there are to be none.",
        {f'{R}engines_up{{role="prefill"}}': "0x60"},
        {f'{R}engines_up{{role="prefill"}}': "2x60"},
    ),
    Rule(
        "KvplaneEnginesEjected",
        f"max by (role) ({R}engines_ejected) > 0",
        5,
        "warning",
        "Engines are up, but out of rotation for their answers.",
        "engine_ejected in the router's log names them and the reason; then the engine's own log.",
        {f'{R}engines_ejected{{role="decode"}}': "1x60"},
        {f'{R}engines_ejected{{role="decode"}}': "0x60"},
        {"role": "decode"},
    ),
    Rule(
        "KvplaneRequestsFail",
        _share(f'{R}requests_total{{status="5xx"}}', f"{R}requests_total") + " > 0.05",
        5,
        "critical",
        "More than one in twenty requests end with an error of ours or of engines.",
        "kvplane_router_requests_total by reason, and the router's log; kvplane explain REQUEST_ID"
        " for one of them.",
        {f'{R}requests_total{{status="5xx"}}': "0+10x60", f'{R}requests_total{{status="2xx"}}': "0+50x60"},
        {f'{R}requests_total{{status="5xx"}}': "0+1x60", f'{R}requests_total{{status="2xx"}}': "0+50x60"},
    ),
    Rule(
        "KvplaneOverloaded",
        f"sum by (status) (rate({R}overloaded_total[5m])) > 0",
        5,
        "critical",
        "Requests are turned away.",
        "429: the router's limits (--max-requests, --max-queued) are reached; 503: no engine became"
        " free within --queue-timeout. Add engines, or routers where kvplane_router_requests_in_flight"
        " is at its limit and engines are not busy.",
        {f'{R}overloaded_total{{status="503"}}': "0+10x60"},
        {f'{R}overloaded_total{{status="503"}}': "10x60"},
        {"status": "503"},
    ),
    Rule(
        "KvplaneRouterWithoutControlPlane",
        f"min({R}plane_up) < 1",
        5,
        "warning",
        "A router gets no answers from the control plane: everything is served cold.",
        "control_plane_unavailable in its log has the cause; then KvplaneControlPlaneUnhealthy.",
        {f"{R}plane_up": "0x60"},
        {f"{R}plane_up": "1x30 0x2 1x28"},
    ),
    Rule(
        "KvplanePrefillLeavesNothing",
        f"sum(rate({R}prefill_without_params_total[10m])) / sum(rate({R}prefill_seconds_count[10m])) > 0.2",
        10,
        "warning",
        "Prefill engines compute prompts and leave nothing to read.",
        "Decode engines compute them again. Usually kv_transfer_config is missing on a prefill"
        " engine, or its kv_role is wrong: kvplane doctor.",
        {
            f"{R}prefill_without_params_total": "0+30x60",
            f'{R}prefill_seconds_count{{path="cold"}}': "0+60x60",
        },
        {
            f"{R}prefill_without_params_total": "0+1x60",
            f'{R}prefill_seconds_count{{path="cold"}}': "0+60x60",
        },
    ),
    Rule(
        "KvplanePullSlowerThanCold",
        f'histogram_quantile(0.5, sum by (le) (rate({R}ttft_seconds_bucket{{path="pull"}}[30m])))'
        f' > 1.5 * histogram_quantile(0.5, sum by (le) (rate({R}ttft_seconds_bucket{{path="cold"}}[30m])))',
        30,
        "info",
        "Pulled turns wait longer for their first token than cold ones.",
        "Pulled prompts are usually longer, so compare at equal lengths with kvplane explain. The"
        " network between engines, or --recompute-threshold too low.",
        {
            f'{R}ttft_seconds_bucket{{path="pull", le="0.5"}}': "0x90",
            f'{R}ttft_seconds_bucket{{path="pull", le="1.0"}}': "0+60x90",
            f'{R}ttft_seconds_bucket{{path="pull", le="+Inf"}}': "0+60x90",
            f'{R}ttft_seconds_bucket{{path="cold", le="0.1"}}': "0+60x90",
            f'{R}ttft_seconds_bucket{{path="cold", le="+Inf"}}': "0+60x90",
        },
        {
            f'{R}ttft_seconds_bucket{{path="pull", le="0.1"}}': "0+60x90",
            f'{R}ttft_seconds_bucket{{path="pull", le="+Inf"}}': "0+60x90",
            f'{R}ttft_seconds_bucket{{path="cold", le="1.0"}}': "0+60x90",
            f'{R}ttft_seconds_bucket{{path="cold", le="+Inf"}}': "0+60x90",
        },
    ),
)

GROUPS: Mapping[str, tuple[Rule, ...]] = {
    "kvplane-control-plane": CONTROL_PLANE,
    "kvplane-conversations": CONVERSATIONS,
    "kvplane-engines": ENGINES,
    "kvplane-routers": ROUTERS,
}
