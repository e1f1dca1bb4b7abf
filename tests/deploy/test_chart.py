"""The Helm chart: what it renders is valid, fits together, and is taken by kvplane's own commands."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kubernetes_validate
import pytest
import trustme
import yaml

from kvplane.cli.config import Config, load_config
from kvplane.cli.entry import load
from kvplane.cli.front import check_hops
from kvplane.cli.metrics_tls import metrics_files
from kvplane.cli.security import check_grpc_reach, client_security, server_security
from kvplane.cli.tenant_limits import LimitsFile
from kvplane.connector.config import read_config
from kvplane.controlplane.access import load_access
from kvplane.store.clock import SystemClock
from kvplane.store.url import open_store
from tests.deploy.charts import (
    CASES,
    CHART,
    CONTROL_PLANE,
    CUSTOM,
    NAMESPACE,
    ROOT,
    ROUTER,
    Rendered,
    Resource,
    render,
    values_of,
)

KUBERNETES = ("1.29", kubernetes_validate.latest_version())
"""gRPC probes are of 1.27, which the chart asks for; schemas of 1.29 are the oldest looked at."""


@pytest.fixture(scope="module", params=list(CASES))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return Rendered(request.param, tuple(render(values_of(request.param))))


@pytest.fixture(scope="module")
def everything() -> Rendered:
    return Rendered("everything", tuple(render(values_of("everything"))))


def test_there_are_enough_cases() -> None:
    assert {"minimal", "memory", "etcd-tls", "tenants", "daemonset", "everything"} <= set(CASES)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_it(rendered: Rendered, version: str) -> None:
    for resource in rendered.resources:
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, version, strict=True)


def test_a_wrong_resource_would_be_seen(everything: Rendered) -> None:
    for change in ({"replicas": "many"}, {"replica": 1}):
        broken = json.loads(json.dumps(everything.one("Deployment", CONTROL_PLANE)))
        broken["spec"] |= change
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, KUBERNETES[0], strict=True)


def test_everything_has_all_kinds(everything: Rendered) -> None:
    assert {resource["kind"] for resource in everything.resources} == CUSTOM | {
        *("ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy"),
        *("PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount"),
    }


def config_of(arguments: list[str]) -> Config:
    """Read a command line as kvplane does. Raises what that raises."""
    name, *rest = arguments
    command = load(name)
    context = command.make_context(name, list(rest))
    return load_config({key: value for key, value in context.params.items() if key != "config"}, None, {})


def test_our_commands_take_their_arguments(rendered: Rendered) -> None:
    for name, _ in rendered.pods():
        config = config_of(rendered.arguments(name))
        assert config.metrics_port
        files, scraped = metrics_files(config), values_of(rendered.name).get("monitoring", {}).get("tls")
        assert (files is not None) == bool(scraped)
        assert files is None or files.client_ca is not None
        if name == CONTROL_PLANE:
            security = server_security(config)
            check_grpc_reach(config)
            assert (security.tls is not None) == (
                values_of(rendered.name).get("tls", {}).get("source", "none") != "none"
            )
        else:
            check_hops(config)
            assert config.plane == f"dns:///{CONTROL_PLANE}-all.{NAMESPACE}.svc:50051"
            client_security(config, config.plane)


def test_the_store_can_be_opened(rendered: Rendered, tmp_path: Path) -> None:
    url = config_of(rendered.arguments(CONTROL_PLANE)).store
    authority = trustme.CA()
    mine = authority.issue_cert("kvplane")
    for folder in ("etcd", "etcd-password"):
        (tmp_path / folder).mkdir()
    authority.cert_pem.write_to_path(tmp_path / "etcd" / "ca.crt")
    mine.cert_chain_pems[0].write_to_path(tmp_path / "etcd" / "tls.crt")
    mine.private_key_pem.write_to_path(tmp_path / "etcd" / "tls.key")
    (tmp_path / "etcd-password" / "password").write_text("x")
    kind = "memory" if rendered.name == "memory" else "etcd"
    opened = open_store(url.replace("/etc/kvplane", str(tmp_path)), SystemClock())
    assert type(opened).__name__.lower() == f"{kind}store"
    with_files = {"etcd-tls": ("ca=", "cert=", "key=", "kvplane@", "password_file="), "everything": ("ca=",)}
    for part in with_files.get(rendered.name, ()):
        assert part in url


def test_options_are_passed_on(everything: Rendered) -> None:
    plane = config_of(everything.arguments(CONTROL_PLANE))
    assert (plane.location_ttl, plane.claim_timeout, plane.turn_wait) == (600, 45, 0.1)
    assert plane.max_conversations == 2_000_000
    router = config_of(everything.arguments(ROUTER))
    assert (router.tool_ttl, router.allow_path_header) == (600, False)
    assert router.identity == ("conversation_id", "header:X-Session-ID")
    assert router.kubernetes_prefill == "app=vllm,role=prefill"
    assert router.otel_endpoint == "http://collector.observability:4317"


def test_files_are_mounted(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
        arguments = " ".join(rendered.arguments(name)).replace("&", " ").replace("?", " ").split()
        named = [word.partition("=")[2] for word in arguments if "=/etc/kvplane/" in word]
        for file in named:
            assert str(Path(file).parent) in mounts.values(), file
        assert len(mounts) == 1 + len({Path(file).parent for file in named})


def test_pods_are_confined(rendered: Rendered) -> None:
    for _, pod in rendered.pods():
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["enableServiceLinks"] is False
        assert container["resources"]["requests"]
        token = spec["automountServiceAccountToken"]
        assert token == any(word.startswith("--kubernetes-") for word in container["args"])


def test_it_ends_later_than_its_streams(rendered: Rendered) -> None:
    pods = dict(rendered.pods())
    if ROUTER in pods:
        config = config_of(rendered.arguments(ROUTER))
        longest = values_of(rendered.name)["router"] if rendered.name == "daemonset" else {}
        assert config.drain_timeout == longest.get("longestStream", 600)
        patience = pods[ROUTER]["spec"]["terminationGracePeriodSeconds"]
        assert patience > config.drain_grace + config.drain_timeout
        (container,) = pods[ROUTER]["spec"]["containers"]
        probe = container["readinessProbe"]
        assert config.drain_grace > probe["periodSeconds"] * probe["failureThreshold"]
        assert container["livenessProbe"]["terminationGracePeriodSeconds"] < patience, (
            "what hangs is not awaited"
        )
    (container,) = pods[CONTROL_PLANE]["spec"]["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pods[CONTROL_PLANE]["spec"]["terminationGracePeriodSeconds"] > pause + 5


def test_health_is_asked_for_in_a_way_that_is_answered(rendered: Rendered) -> None:
    (container,) = dict(rendered.pods())[CONTROL_PLANE]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    config = config_of(rendered.arguments(CONTROL_PLANE))
    lives, serves = container["livenessProbe"], container["readinessProbe"]
    assert lives["periodSeconds"] * lives["failureThreshold"] >= 60, "a busy one is not restarted"
    at_metrics = {"port": "metrics", "scheme": "HTTP" if config.metrics_tls_cert is None else "HTTPS"}
    assert ports["metrics"] == config.metrics_port
    assert lives["httpGet"] == {"path": "/health", **at_metrics}
    assert container["startupProbe"]["httpGet"] == lives["httpGet"]
    if config.grpc_tls_cert:  # the kubelet's gRPC probe speaks plaintext only
        assert serves["httpGet"] == {"path": "/ready", **at_metrics}
    else:
        assert serves["grpc"] == {"port": config.grpc_port}
    for router in (pod for name, pod in rendered.pods() if name == ROUTER):
        (container,) = router["spec"]["containers"]
        front = config_of(rendered.arguments(ROUTER)).tls_cert
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert container["livenessProbe"]["httpGet"]["scheme"] == ("HTTPS" if front else "HTTP")


def selected(resource: Resource) -> dict[str, str]:
    spec = resource["spec"]
    selector = spec.get("podSelector") or spec.get("selector") or {}
    found: dict[str, str] = selector.get("matchLabels", selector)
    return found


def test_what_selects_pods_selects_one_workload(rendered: Rendered) -> None:
    pods = dict(rendered.pods())
    for resource in rendered.of("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "DaemonSet"):
        labels = selected(resource).items()
        found = [name for name, pod in pods.items() if labels <= pod["metadata"]["labels"].items()]
        assert len(found) == 1, resource["metadata"]["name"]
        if resource["kind"] == "Service":
            (container,) = pods[found[0]]["spec"]["containers"]
            ports = {port["name"] for port in container["ports"]}
            assert {port["targetPort"] for port in resource["spec"]["ports"]} <= ports
    for monitor in rendered.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [s for s in rendered.of("Service") if wanted <= s["metadata"]["labels"].items()]
        with_metrics = [s for s in services if any(p["name"] == "metrics" for p in s["spec"]["ports"])]
        assert len(with_metrics) == 1
        (endpoint,) = monitor["spec"]["endpoints"]
        for name in {CONTROL_PLANE, ROUTER} & set(pods):
            by_https = config_of(rendered.arguments(name)).metrics_tls_cert is not None
            assert (endpoint.get("scheme") == "https") == by_https


def test_certificates_have_the_names_that_callers_use(everything: Rendered) -> None:
    plane = config_of(everything.arguments(ROUTER)).plane or ""
    certificate = everything.one("Certificate", CONTROL_PLANE)["spec"]
    assert plane.removeprefix("dns:///").partition(":")[0] in certificate["dnsNames"]
    mounted = {v["secret"]["secretName"] for _, pod in everything.pods() for v in volumes(pod, "tls")}
    assert mounted == {c["spec"]["secretName"] for c in everything.of("Certificate")}


def volumes(pod: Resource, name: str) -> Iterator[Resource]:
    yield from (volume for volume in pod["spec"]["volumes"] if volume["name"] == name)


def test_engines_get_what_the_connector_takes(rendered: Rendered) -> None:
    data = rendered.one("ConfigMap", "prod-kvplane-engines")["data"]
    assert set(data) == {"prefill", "decode"}
    for role, text in data.items():
        transfer = json.loads(text)
        assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        assert transfer["kv_load_failure_policy"] == "recompute"
        with patch("kvplane.connector.config.open_credentials"):
            config = read_config(transfer["kv_connector_extra_config"], {})
        assert config.address == f"dns:///{CONTROL_PLANE}-all.{NAMESPACE}.svc:50051"
        tls = config_of(rendered.arguments(CONTROL_PLANE)).grpc_tls_cert
        assert bool(config.ca) == bool(tls)
        assert bool(tls) == bool(config.token_file or config.cert)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_engines_beside_the_chart_go_with_it(role: str, everything: Rendered) -> None:
    path = ROOT / "deploy" / "helm" / "engines" / f"{role}.yaml"
    deployment = yaml.safe_load(path.read_text())
    for version in KUBERNETES:
        kubernetes_validate.validate(deployment, version, strict=True)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    reference = variables["KV_TRANSFER_CONFIG"]["valueFrom"]["configMapKeyRef"]
    assert role in everything.one("ConfigMap", reference["name"])["data"]
    assert reference["key"] == role
    host = variables["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]
    assert host == {"fieldPath": "status.podIP"}
    taken_in = yaml.safe_load(path.read_text().replace("# - {name: KVPLANE", "- {name: KVPLANE"))
    (with_endpoint,) = taken_in["spec"]["template"]["spec"]["containers"]
    # Kubernetes fills in what stands before it in the list.
    before, last = with_endpoint["env"][:-1], with_endpoint["env"][-1]
    assert (before, last["name"]) == (container["env"], "KVPLANE_ENDPOINT")
    filled = last["value"].replace("$(VLLM_NIXL_SIDE_CHANNEL_HOST)", "10.0.0.7")
    transfer = json.loads(everything.one("ConfigMap", reference["name"])["data"][role])
    with patch("kvplane.connector.config.open_credentials"):
        made = read_config(transfer["kv_connector_extra_config"], {"KVPLANE_ENDPOINT": filled})
    (port,) = (one["containerPort"] for one in container["ports"] if one["name"] == "http")
    assert made.endpoint == f"http://10.0.0.7:{port}"
    for case in ("minimal", "etcd-tls", "everything"):
        found_by = values_of(case)["router"]["engines"]["kubernetes"]
        wanted = dict(part.split("=") for part in found_by[role].split(","))
        assert wanted.items() <= pod["metadata"]["labels"].items()
        assert found_by["port"] in {text for one in container["ports"] for text in map(str, one.values())}
    given = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    starting, ready, alive = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    assert {json.dumps(probe["httpGet"]) for probe in (starting, ready, alive)} == {
        json.dumps({"path": "/health", "port": "http"})
    }
    assert starting["periodSeconds"] * starting["failureThreshold"] >= 1800, "models take their time"
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 120
    assert alive["terminationGracePeriodSeconds"] < pod["spec"]["terminationGracePeriodSeconds"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    plain = {name: one["value"] for name, one in variables.items() if "value" in one}
    assert {plain["HOME"], plain["HF_HOME"], "/tmp"} <= mounted  # all else is read-only
    # A mount below another is made by the container runtime, and with it folders that are root's.
    assert not any(a != b and a.startswith(f"{b}/") for a in mounted for b in mounted)
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(given["--shutdown-timeout"]) + pause


def test_inline_files_are_right(tmp_path: Path) -> None:
    rendered = Rendered("tenants", tuple(render(values_of("tenants"))))
    for name, text in rendered.one("ConfigMap", CONTROL_PLANE)["data"].items():
        (tmp_path / name).write_text(text)
    assert {one.name for one in load_access(str(tmp_path / "access.toml")).identities} == {
        "router",
        "engines",
    }
    assert LimitsFile(str(tmp_path / "tenant-limits.toml")).current


def test_rules_and_dashboard_are_those_of_deploy(everything: Rendered) -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts" / "kvplane.yml").read_text())
    assert everything.one("PrometheusRule", "prod-kvplane")["spec"] == rules
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "kvplane.json").read_text())
    made = everything.one("ConfigMap", "prod-kvplane-dashboard")["data"]["kvplane.json"]
    assert json.loads(made) == dashboard


def test_the_version_is_kvplanes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_the_schema_knows_each_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(given: dict[str, Any], known: dict[str, Any], path: str) -> None:
        if known.get("additionalProperties") is not False:
            return
        assert set(known["properties"]) - {"global"} == set(given), path
        for name, value in given.items():
            if isinstance(value, dict):
                compare(value, known["properties"][name], f"{path}.{name}")

    assert schema["additionalProperties"] is False
    compare(values, schema, "")
