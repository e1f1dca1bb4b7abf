"""Values that cannot work: the chart says which, and what to do, instead of rendering them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.charts import CHART, render, values_of


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for name, value in change.items():
        out[name] = merged(out.get(name) or {}, value) if isinstance(value, dict) else value
    return out


BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"router": {"kind": "StatefulSet"}}, "'Deployment', 'DaemonSet'"),
    ({"router": {"replicas": "two"}}, "/router/replicas"),
    ({"router": {"workers": 65}}, "maximum: got 65, want 64"),
    ({"controlPlane": {"replica": 3}}, "additional properties 'replica' not allowed"),
    ({"controlPlane": {"etcd": {"endpoints": ["http://etcd:2379"]}}}, "/controlPlane/etcd/endpoints/0"),
    ({"image": {"digest": "sha256:1"}}, "/image/digest"),
    ({"router": {"engines": {"prefill": ["vllm:8000"]}}}, "/router/engines/prefill/0"),
    ({"tls": {"source": "yes"}}, "'none', 'secret', 'cert-manager'"),
    ({"logLevel": "loud"}, "/logLevel"),
    ({"ipFamily": "v6"}, "'IPv4', 'IPv6'"),
    ({"controlPlane": {"etcd": {"endpoints": ["etcd?tls=false:2379"]}}}, "/controlPlane/etcd/endpoints/0"),
    (
        {"controlPlane": {"etcd": {"passwordSecret": {"key": "../x"}}}},
        "/controlPlane/etcd/passwordSecret/key",
    ),
    ({"image": {"repository": ""}}, "/image/repository"),
    ({"image": {"tag": "a b"}}, "/image/tag"),
    ({"router": {"disruptionBudget": {"maxUnavailable": "150%"}}}, "/router/disruptionBudget/maxUnavailable"),
    # Helm takes null for "not there", and templates would say: nil pointer evaluating interface {}.
    ({"router": None}, "missing property 'router'"),
    ({"controlPlane": {"etcd": None}}, "at '/controlPlane': missing property 'etcd'"),
    ({"router": {"longestStream": None}}, "at '/router': missing property 'longestStream'"),
]

BY_CHECK: list[tuple[dict[str, Any], str]] = [
    ({"trustedNetwork": False}, "set tls.source"),
    (
        {"trustedNetwork": False, "tls": {"source": "secret", "controlPlaneSecret": "s"}},
        "controlPlane.access",
    ),
    ({"tls": {"source": "secret"}}, "name it in tls.controlPlaneSecret"),
    ({"tls": {"source": "cert-manager"}}, "tls.issuer.name"),
    ({"tls": {"clientCertificates": True}}, "needs tls.source"),
    (
        {"tls": {"source": "secret", "controlPlaneSecret": "s", "clientCertificates": True}},
        "tls.routerSecret",
    ),
    ({"router": {"token": {"secret": "s"}}}, "router.token would be shown in clear"),
    ({"controlPlane": {"store": "memory"}}, "set controlPlane.replicas: 1"),
    ({"controlPlane": {"etcd": {"endpoints": []}}}, "controlPlane.etcd.endpoints is empty"),
    ({"controlPlane": {"etcd": {"user": "u"}}}, "passwordSecret.name"),
    ({"controlPlane": {"etcd": {"clientCertificate": True}}}, "needs controlPlane.etcd.tlsSecret"),
    (
        {"router": {"kind": "DaemonSet", "autoscaling": {"enabled": True}}},
        "router.autoscaling.enabled: false",
    ),
    ({"router": {"drainGrace": 9}}, "router.drainGrace: 9 s are over before load balancers know"),
    ({"router": {"ingress": {"enabled": True}}}, "router.ingress.host"),
    ({"router": {"gateway": {"enabled": True}}}, "router.gateway.name"),
    ({"monitoring": {"tls": {"secret": "s"}}}, "monitoring.tls.serverName is empty"),
    ({"monitoring": {"tls": {"scraperSecret": "s"}}}, "needs monitoring.tls.secret"),
    (
        {"controlPlane": {"metricsPort": 50051}},
        "metricsPort are both 50051",
    ),
    ({"controlPlane": {"access": {"text": "t", "secret": "s"}}}, "controlPlane.access has text and secret"),
    (
        {"networkPolicy": {"enabled": True}, "engines": {"podLabels": {"app": None}}},
        "engines.podLabels is empty",
    ),
    (
        {"router": {"engines": {"kubernetes": {"prefill": "app=vllm", "decode": "app=vllm"}}}},
        "select the same pods",
    ),
    ({"router": {"options": {"no-allow-remote": True}}}, "no-allow-remote is set by the chart"),
    ({"router": {"options": {"port": 9}}}, "router.options: port is set by the chart"),
    (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 30}}},
        "router.autoscaling: minReplicas is above maxReplicas",
    ),
    ({"router": {"options": {"client-ca": "/x"}}}, "the kubelet has no certificate for its probes"),
]


@pytest.mark.parametrize(("change", "said"), BY_SCHEMA, ids=[said for _, said in BY_SCHEMA])
def test_what_the_schema_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(merged(values_of("minimal"), change))
    assert said in str(refused.value)


@pytest.mark.parametrize(("change", "said"), BY_CHECK, ids=[said for _, said in BY_CHECK])
def test_what_the_chart_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(merged(values_of("minimal"), change))
    assert "kvplane: " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("release", ["prod.v1", "9lives"])
def test_a_release_whose_name_no_service_can_have(release: str) -> None:
    with pytest.raises(helm_python.HelmError, match=f"the release is called {release}"):
        render(values_of("minimal"), release=release)


def test_sections_set_to_null_are_never_a_template_error() -> None:
    """Whatever is null: the chart renders, or says which value is missing."""
    with open(CHART / "values.yaml", encoding="utf-8") as file:
        paths = list(_paths(yaml.safe_load(file)))
    base, unreadable = values_of("everything"), []
    for path in paths:
        change: Any = None
        for name in reversed(path):
            change = {name: change}
        try:
            render(merged(base, change))
        except helm_python.HelmError as refused:
            if not any(said in str(refused) for said in ("kvplane: ", "missing propert")):
                unreadable.append(f"{'.'.join(path)}: {refused}")
    assert not unreadable


def _paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield (*above, name)
            yield from _paths(value, (*above, name))


def test_without_values_it_asks_for_what_it_needs() -> None:
    with pytest.raises(helm_python.HelmError, match="trustedNetwork: true"):
        render({})


def test_lint_finds_no_error() -> None:
    found = helm_python.lint(str(CHART))
    assert found["errors"] == []
