"""The flags of the commands. Names, help and defaults come from Config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvplane.cli.config import Config


def _flag(name: str, *more: str) -> Any:
    field = Config.model_fields[name]
    default = field.default
    shown = f" (default: {default})" if default not in (None, (), False) else ""
    return typer.Option(f"--{name.replace('_', '-')}", *more, help=f"{field.description}{shown}")


def _switch(name: str) -> Any:
    spelled = name.replace("_", "-")
    field = Config.model_fields[name]
    return typer.Option(
        f"--{spelled}/--no-{spelled}",
        help=f"{field.description} (default: {'yes' if field.default else 'no'})",
    )


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="KVPLANE_CONFIG",
        help="TOML file with options, named as the flags, with underscores.",
    ),
]
Store = Annotated[str | None, _flag("store")]
GrpcHost = Annotated[str | None, _flag("grpc_host")]
GrpcPort = Annotated[int | None, _flag("grpc_port")]
GrpcTlsCert = Annotated[str | None, _flag("grpc_tls_cert")]
GrpcTlsKey = Annotated[str | None, _flag("grpc_tls_key")]
GrpcClientCa = Annotated[str | None, _flag("grpc_client_ca")]
Access = Annotated[str | None, _flag("access")]
Host = Annotated[str | None, _flag("host")]
Port = Annotated[int | None, _flag("port")]
AllowRemote = Annotated[bool | None, _switch("allow_remote")]
TlsCert = Annotated[str | None, _flag("tls_cert")]
TlsKey = Annotated[str | None, _flag("tls_key")]
ClientCa = Annotated[str | None, _flag("client_ca")]
EngineCa = Annotated[str | None, _flag("engine_ca")]
EngineCert = Annotated[str | None, _flag("engine_cert")]
EngineKey = Annotated[str | None, _flag("engine_key")]
EngineHosts = Annotated[list[str] | None, _flag("engine_hosts")]
Prefill = Annotated[list[str] | None, _flag("prefill")]
Decode = Annotated[list[str] | None, _flag("decode")]
PrefillDns = Annotated[list[str] | None, _flag("prefill_dns")]
DecodeDns = Annotated[list[str] | None, _flag("decode_dns")]
DnsInterval = Annotated[float | None, _flag("dns_interval")]
KubernetesPrefill = Annotated[str | None, _flag("kubernetes_prefill")]
KubernetesDecode = Annotated[str | None, _flag("kubernetes_decode")]
KubernetesNamespace = Annotated[str | None, _flag("kubernetes_namespace")]
KubernetesPort = Annotated[str | None, _flag("kubernetes_port")]
KubernetesApi = Annotated[str | None, _flag("kubernetes_api")]
KubernetesTokenFile = Annotated[str | None, _flag("kubernetes_token_file")]
KubernetesCaFile = Annotated[str | None, _flag("kubernetes_ca_file")]
EngineApiKeyFile = Annotated[str | None, _flag("engine_api_key_file")]
Workers = Annotated[int | None, _flag("workers")]
Plane = Annotated[str | None, _flag("plane")]
PlaneTls = Annotated[bool | None, _switch("plane_tls")]
PlaneCa = Annotated[str | None, _flag("plane_ca")]
PlaneCert = Annotated[str | None, _flag("plane_cert")]
PlaneKey = Annotated[str | None, _flag("plane_key")]
PlaneServerName = Annotated[str | None, _flag("plane_server_name")]
PlaneTokenFile = Annotated[str | None, _flag("plane_token_file")]
Path_ = Annotated[str | None, _flag("path")]
AllowPathHeader = Annotated[bool | None, _switch("allow_path_header")]
Identity = Annotated[list[str] | None, _flag("identity")]
Tenant = Annotated[str | None, _flag("tenant")]
Tenants = Annotated[str | None, _flag("tenants")]
DirectMaxNewTokens = Annotated[int | None, _flag("direct_max_new_tokens")]
RecomputeThreshold = Annotated[int | None, _flag("recompute_threshold")]
TurnWait = Annotated[float | None, _flag("turn_wait")]
ToolTtl = Annotated[float | None, _flag("tool_ttl")]
RequestTimeout = Annotated[float | None, _flag("request_timeout")]
MaxRequests = Annotated[int | None, _flag("max_requests")]
MaxEngineRequests = Annotated[int | None, _flag("max_engine_requests")]
MaxQueued = Annotated[int | None, _flag("max_queued")]
QueueTimeout = Annotated[float | None, _flag("queue_timeout")]
EjectAfter = Annotated[int | None, _flag("eject_after")]
EjectionTime = Annotated[float | None, _flag("ejection_time")]
SlowStart = Annotated[float | None, _flag("slow_start")]
ExplainedTurns = Annotated[int | None, _flag("explained_turns")]
DebugRemote = Annotated[bool | None, _switch("debug_remote")]
LocationTtl = Annotated[float | None, _flag("location_ttl")]
MinRemaining = Annotated[float | None, _flag("min_remaining")]
ClaimTimeout = Annotated[float | None, _flag("claim_timeout")]
EngineLease = Annotated[float | None, _flag("engine_lease")]
MaxStaleness = Annotated[float | None, _flag("max_staleness")]
MaxConversations = Annotated[int | None, _flag("max_conversations")]
OtelEndpoint = Annotated[str | None, _flag("otel_endpoint")]
TenantLimits = Annotated[str | None, _flag("tenant_limits")]
DrainGrace = Annotated[float | None, _flag("drain_grace")]
DrainTimeout = Annotated[float | None, _flag("drain_timeout")]
MetricsPort = Annotated[int | None, _flag("metrics_port")]
MetricsHost = Annotated[str | None, _flag("metrics_host")]
MetricsTlsCert = Annotated[str | None, _flag("metrics_tls_cert")]
MetricsTlsKey = Annotated[str | None, _flag("metrics_tls_key")]
MetricsClientCa = Annotated[str | None, _flag("metrics_client_ca")]
LogLevel = Annotated[str | None, _flag("log_level")]
LogFormat = Annotated[str | None, _flag("log_format")]
