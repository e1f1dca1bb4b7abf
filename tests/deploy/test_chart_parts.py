"""Parts of the chart that a values file of its own is not worth: budgets, policies, annotations, notes."""

from __future__ import annotations

import tomllib
from hashlib import sha256
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.deploy.charts import (
    CHART,
    CONTROL_PLANE,
    NAMESPACE,
    RELEASE,
    ROOT,
    ROUTER,
    Rendered,
    Resource,
    render,
    values_of,
)
from tests.deploy.test_chart import config_of
from tests.deploy.test_chart_refusals import merged

ENGINES = ROOT / "deploy" / "helm" / "engines"


def made(case: str, **change: Any) -> Rendered:
    return Rendered(case, tuple(render(merged(values_of(case), change))))


def test_a_daemon_set_has_no_budget() -> None:
    """Kubernetes would count no pods for it, and let none of them be evicted."""
    assert [budget["metadata"]["name"] for budget in made("daemonset").of("PodDisruptionBudget")] == [
        CONTROL_PLANE
    ]


def test_a_user_of_etcd_may_be_called_anything() -> None:
    rendered = made("etcd-tls", controlPlane={"etcd": {"user": "kv:a@b/c d"}})
    assert "://kv%3Aa%40b%2Fc%20d@" in config_of(rendered.arguments(CONTROL_PLANE)).store


def test_a_dashboard_may_have_no_label() -> None:
    rendered = made("everything", monitoring={"dashboard": {"labels": {"grafana_dashboard": None}}})
    assert any("dashboard" in one["metadata"]["name"] for one in rendered.of("ConfigMap"))


def test_budgets_keep_no_pod_that_is_not_ready() -> None:
    budgets = made("minimal").of("PodDisruptionBudget")
    assert {budget["metadata"]["name"] for budget in budgets} == {CONTROL_PLANE, ROUTER}
    assert {budget["spec"]["unhealthyPodEvictionPolicy"] for budget in budgets} == {"AlwaysAllow"}


def test_annotations_of_ones_own_replace_the_charts() -> None:
    size, buffering = (f"nginx.ingress.kubernetes.io/proxy-{name}" for name in ("body-size", "buffering"))
    router = {"ingress": {"enabled": True, "host": "llm.example.com", "annotations": {size: "8m"}}}
    with helm_python.Chart.load(str(CHART)) as chart:
        values = merged(values_of("minimal"), {"router": router})
        manifests = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    (text,) = (text for name, text in manifests.items() if name.endswith("router.yaml"))
    assert text.count(size) == 1
    (annotations,) = (
        one["metadata"]["annotations"] for one in yaml.safe_load_all(text) if one["kind"] == "Ingress"
    )
    assert annotations[size] == "8m"
    assert annotations[buffering] == "off"


def peers(policy: Resource, port: str) -> list[dict[str, Any]] | None:
    (rule,) = (rule for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": port}])
    found: list[dict[str, Any]] | None = rule.get("from")
    return found


def test_clients_of_the_router_reach_no_control_plane() -> None:
    clients, callers = {"name": "ingress"}, {"name": "apps"}
    policies = made(
        "everything",
        networkPolicy={"clients": [clients], "callers": [callers], "engineNamespaces": {"name": "gpu"}},
    )
    at_router = peers(policies.one("NetworkPolicy", ROUTER), "http")
    assert at_router == [{"namespaceSelector": {"matchLabels": one}} for one in (callers, clients)]
    at_plane = peers(policies.one("NetworkPolicy", CONTROL_PLANE), "grpc")
    assert at_plane is not None
    assert {"namespaceSelector": {"matchLabels": clients}} not in at_plane
    assert {
        "namespaceSelector": {"matchLabels": {"name": "gpu"}},
        "podSelector": {"matchLabels": {"app": "vllm"}},
    } in at_plane


def test_without_callers_and_clients_the_router_takes_everyone() -> None:
    policies = made("minimal", networkPolicy={"enabled": True})
    assert peers(policies.one("NetworkPolicy", ROUTER), "http") is None
    at_plane = peers(policies.one("NetworkPolicy", CONTROL_PLANE), "grpc")
    assert at_plane is not None
    assert {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "vllm"}}} in at_plane


def test_files_of_ones_own_are_mounted() -> None:
    own: dict[str, Any] = {
        "extraVolumes": [{"name": "engine-ca", "secret": {"secretName": "engine-ca"}}],
        "extraVolumeMounts": [{"name": "engine-ca", "mountPath": "/etc/engine-ca", "readOnly": True}],
        "priorityClassName": "high",
    }
    for resource in made("minimal", controlPlane=own, router=own).of("Deployment"):
        kubernetes_validate.validate(resource, "1.29", strict=True)
        pod = resource["spec"]["template"]["spec"]
        assert own["extraVolumes"][0] in pod["volumes"]
        assert own["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
        assert pod["priorityClassName"] == "high"


def test_the_router_may_have_another_image_for_an_upgrade() -> None:
    images = {
        name: pod["spec"]["containers"][0]["image"]
        for name, pod in made("minimal", image={"tag": "2"}, router={"image": "kvplane:1"}).pods()
    }
    assert images == {CONTROL_PLANE: "kvplane:2", ROUTER: "kvplane:1"}


def test_nobody_has_the_tokens_of_the_example() -> None:
    access = tomllib.loads(values_of("tenants")["controlPlane"]["access"]["text"])
    digests = {digest for one in access["identity"] for digest in one["token_sha256"]}
    assert len(digests) == 2
    guesses = ("", "test", "test2", "token", "secret", "password", "changeme", "router", "engines", "kvplane")
    assert not digests & {sha256(guess.encode()).hexdigest() for guess in guesses}


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_pods_listen_where_the_kubelet_asks(family: str) -> None:
    rendered = made("minimal", ipFamily=family)
    for name, _ in rendered.pods():
        config = config_of(rendered.arguments(name))
        hosts = {config.metrics_host, config.grpc_host if name == CONTROL_PLANE else config.host}
        assert hosts == {"::" if family == "IPv6" else "0.0.0.0"}


def test_a_drain_that_is_too_short_is_no_matter_without_a_router() -> None:
    assert not made("control-plane-only", router={"drainGrace": 0}).of("Ingress")


def test_the_notes_name_an_address_that_is_listened_on() -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        manifests = chart.render(
            merged(values_of("minimal"), {"ipFamily": "IPv6"}), name=RELEASE, namespace=NAMESPACE
        )
    (notes,) = (text for name, text in manifests.items() if name.endswith("NOTES.txt"))
    assert "--router http://[::1]:8000" in notes


@pytest.mark.parametrize("case", ["minimal", "tenants"])
def test_the_notes_say_so_where_the_router_takes_everyone(case: str) -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        manifests = chart.render(values_of(case), name=RELEASE, namespace=NAMESPACE)
    (notes,) = (text for name, text in manifests.items() if name.endswith("NOTES.txt"))
    assert ("everyone who reaches it" in notes) == (case == "minimal")
    scheme = "http" if case == "minimal" else "https"
    assert f"exec deploy/{ROUTER} -- kvplane doctor" in notes
    assert f"--router {scheme}://127.0.0.1:8000" in notes


def test_the_policy_of_engines_lets_the_router_in() -> None:
    policy = yaml.safe_load((ENGINES / "network-policy.yaml").read_text())
    kubernetes_validate.validate(policy, "1.29", strict=True)
    router = dict(made("minimal").pods())[ROUTER]
    labels = router["metadata"]["labels"].items()
    at_http = peers_of_engines(policy, "http")
    assert any(one["podSelector"]["matchLabels"].items() <= labels for one in at_http if "podSelector" in one)
    for role in ("prefill", "decode"):
        pod = yaml.safe_load((ENGINES / f"{role}.yaml").read_text())["spec"]["template"]
        own = pod["metadata"]["labels"].items()
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= own
        assert peers_of_engines(policy, None)[0]["podSelector"]["matchLabels"].items() <= own
        monitor = yaml.safe_load((ENGINES / "pod-monitor.yaml").read_text())["spec"]
        assert monitor["selector"]["matchLabels"].items() <= own
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {one["port"] for one in monitor["podMetricsEndpoints"]} <= ports


def peers_of_engines(policy: Resource, port: str | None) -> list[dict[str, Any]]:
    wanted = None if port is None else [{"port": port}]
    (rule,) = (rule for rule in policy["spec"]["ingress"] if rule.get("ports") == wanted)
    found: list[dict[str, Any]] = rule["from"]
    return found
