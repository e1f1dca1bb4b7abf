"""The commands that run servers, and `kvplane config`."""

from __future__ import annotations

from typing import Any

import typer

from kvplane.cli import options as o
from kvplane.cli import run
from kvplane.cli.config import Config, load_config, toml_line
from kvplane.cli.entry import main
from kvplane.cli.logs import configure_logs
from kvplane.store.url import without_password

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)
"""Found by `entry`, which puts all commands together."""
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


def _load(flags: dict[str, Any]) -> Config:
    file = flags.pop("config", None)
    config = load_config(flags, file)
    configure_logs(config.log_level, config.log_format)
    return config


def _run(program: run.Program, flags: dict[str, Any]) -> None:
    run.until_signalled(program, _load(flags))


@app.command()
def serve(
    config: o.ConfigFile = None,
    store: o.Store = None,
    grpc_host: o.GrpcHost = None,
    grpc_port: o.GrpcPort = None,
    grpc_tls_cert: o.GrpcTlsCert = None,
    grpc_tls_key: o.GrpcTlsKey = None,
    grpc_client_ca: o.GrpcClientCa = None,
    access: o.Access = None,
    allow_remote: o.AllowRemote = None,
    location_ttl: o.LocationTtl = None,
    min_remaining: o.MinRemaining = None,
    claim_timeout: o.ClaimTimeout = None,
    engine_lease: o.EngineLease = None,
    max_staleness: o.MaxStaleness = None,
    turn_wait: o.TurnWait = None,
    max_conversations: o.MaxConversations = None,
    tenant_limits: o.TenantLimits = None,
    drain_timeout: o.DrainTimeout = None,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = None,
    metrics_tls_cert: o.MetricsTlsCert = None,
    metrics_tls_key: o.MetricsTlsKey = None,
    metrics_client_ca: o.MetricsClientCa = None,
    otel_endpoint: o.OtelEndpoint = None,
    log_level: o.LogLevel = None,
    log_format: o.LogFormat = None,
) -> None:
    """Run a control plane."""
    _run(run.serve, dict(locals()))


@app.command()
def route(
    config: o.ConfigFile = None,
    prefill: o.Prefill = None,
    decode: o.Decode = None,
    prefill_dns: o.PrefillDns = None,
    decode_dns: o.DecodeDns = None,
    dns_interval: o.DnsInterval = None,
    kubernetes_prefill: o.KubernetesPrefill = None,
    kubernetes_decode: o.KubernetesDecode = None,
    kubernetes_namespace: o.KubernetesNamespace = None,
    kubernetes_port: o.KubernetesPort = None,
    kubernetes_api: o.KubernetesApi = None,
    kubernetes_token_file: o.KubernetesTokenFile = None,
    kubernetes_ca_file: o.KubernetesCaFile = None,
    engine_api_key_file: o.EngineApiKeyFile = None,
    engine_hosts: o.EngineHosts = None,
    engine_ca: o.EngineCa = None,
    engine_cert: o.EngineCert = None,
    engine_key: o.EngineKey = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    client_ca: o.ClientCa = None,
    plane: o.Plane = None,
    plane_tls: o.PlaneTls = None,
    plane_ca: o.PlaneCa = None,
    plane_cert: o.PlaneCert = None,
    plane_key: o.PlaneKey = None,
    plane_server_name: o.PlaneServerName = None,
    plane_token_file: o.PlaneTokenFile = None,
    host: o.Host = None,
    port: o.Port = None,
    workers: o.Workers = None,
    allow_remote: o.AllowRemote = None,
    path: o.Path_ = None,
    allow_path_header: o.AllowPathHeader = None,
    identity: o.Identity = None,
    tenant: o.Tenant = None,
    tenants: o.Tenants = None,
    direct_max_new_tokens: o.DirectMaxNewTokens = None,
    recompute_threshold: o.RecomputeThreshold = None,
    turn_wait: o.TurnWait = None,
    tool_ttl: o.ToolTtl = None,
    request_timeout: o.RequestTimeout = None,
    max_requests: o.MaxRequests = None,
    max_engine_requests: o.MaxEngineRequests = None,
    max_queued: o.MaxQueued = None,
    queue_timeout: o.QueueTimeout = None,
    eject_after: o.EjectAfter = None,
    ejection_time: o.EjectionTime = None,
    slow_start: o.SlowStart = None,
    drain_grace: o.DrainGrace = None,
    explained_turns: o.ExplainedTurns = None,
    debug_remote: o.DebugRemote = None,
    drain_timeout: o.DrainTimeout = None,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = None,
    metrics_tls_cert: o.MetricsTlsCert = None,
    metrics_tls_key: o.MetricsTlsKey = None,
    metrics_client_ca: o.MetricsClientCa = None,
    otel_endpoint: o.OtelEndpoint = None,
    log_level: o.LogLevel = None,
    log_format: o.LogFormat = None,
) -> None:
    """Run a router in front of prefill and decode engines."""
    _run(run.route, dict(locals()))


@app.command()
def up(
    config: o.ConfigFile = None,
    prefill: o.Prefill = None,
    decode: o.Decode = None,
    prefill_dns: o.PrefillDns = None,
    decode_dns: o.DecodeDns = None,
    dns_interval: o.DnsInterval = None,
    kubernetes_prefill: o.KubernetesPrefill = None,
    kubernetes_decode: o.KubernetesDecode = None,
    kubernetes_namespace: o.KubernetesNamespace = None,
    kubernetes_port: o.KubernetesPort = None,
    kubernetes_api: o.KubernetesApi = None,
    kubernetes_token_file: o.KubernetesTokenFile = None,
    kubernetes_ca_file: o.KubernetesCaFile = None,
    engine_api_key_file: o.EngineApiKeyFile = None,
    engine_hosts: o.EngineHosts = None,
    engine_ca: o.EngineCa = None,
    engine_cert: o.EngineCert = None,
    engine_key: o.EngineKey = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    client_ca: o.ClientCa = None,
    host: o.Host = None,
    port: o.Port = None,
    workers: o.Workers = None,
    grpc_host: o.GrpcHost = None,
    grpc_port: o.GrpcPort = None,
    grpc_tls_cert: o.GrpcTlsCert = None,
    grpc_tls_key: o.GrpcTlsKey = None,
    grpc_client_ca: o.GrpcClientCa = None,
    access: o.Access = None,
    plane_tls: o.PlaneTls = None,
    plane_ca: o.PlaneCa = None,
    plane_cert: o.PlaneCert = None,
    plane_key: o.PlaneKey = None,
    plane_server_name: o.PlaneServerName = None,
    plane_token_file: o.PlaneTokenFile = None,
    allow_remote: o.AllowRemote = None,
    store: o.Store = None,
    path: o.Path_ = None,
    allow_path_header: o.AllowPathHeader = None,
    identity: o.Identity = None,
    tenant: o.Tenant = None,
    tenants: o.Tenants = None,
    direct_max_new_tokens: o.DirectMaxNewTokens = None,
    recompute_threshold: o.RecomputeThreshold = None,
    turn_wait: o.TurnWait = None,
    tool_ttl: o.ToolTtl = None,
    request_timeout: o.RequestTimeout = None,
    max_requests: o.MaxRequests = None,
    max_engine_requests: o.MaxEngineRequests = None,
    max_queued: o.MaxQueued = None,
    queue_timeout: o.QueueTimeout = None,
    eject_after: o.EjectAfter = None,
    ejection_time: o.EjectionTime = None,
    slow_start: o.SlowStart = None,
    drain_grace: o.DrainGrace = None,
    explained_turns: o.ExplainedTurns = None,
    debug_remote: o.DebugRemote = None,
    location_ttl: o.LocationTtl = None,
    min_remaining: o.MinRemaining = None,
    claim_timeout: o.ClaimTimeout = None,
    engine_lease: o.EngineLease = None,
    max_staleness: o.MaxStaleness = None,
    max_conversations: o.MaxConversations = None,
    tenant_limits: o.TenantLimits = None,
    drain_timeout: o.DrainTimeout = None,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = None,
    metrics_tls_cert: o.MetricsTlsCert = None,
    metrics_tls_key: o.MetricsTlsKey = None,
    metrics_client_ca: o.MetricsClientCa = None,
    otel_endpoint: o.OtelEndpoint = None,
    log_level: o.LogLevel = None,
    log_format: o.LogFormat = None,
) -> None:
    """Run router and control plane together: all that one machine needs."""
    _run(run.up, dict(locals()))


@config_app.command("show")
def config_show(config: o.ConfigFile = None) -> None:
    """Print the effective configuration, from file, environment and defaults, as a TOML file for --config."""
    effective = _load({"config": config})
    for name in Config.model_fields:
        value = getattr(effective, name)
        typer.echo(toml_line(name, without_password(value) if name == "store" else value))
