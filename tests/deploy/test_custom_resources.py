"""Kinds that Kubernetes does not know: against models made from their definitions, or else by hand.

cert-manager's and the Prometheus operator's come as Python packages that are made from their CRDs (1.17.1 and
0.80.1). There is none for the Gateway API: of an HTTPRoute the fields that the chart uses are looked at here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.deploy.charts import CASES, CUSTOM, ROOT, Resource, render, values_of
from tests.deploy.test_chart_refusals import merged

MODELS = {
    "Certificate": "cert_manager",
    "PodMonitor": "prometheus_operator",
    "PrometheusRule": "prometheus_operator",
    "ServiceMonitor": "prometheus_operator",
}
VERSIONS = {"cert_manager": "cert-manager.io/v1", "prometheus_operator": "monitoring.coreos.com/v1"}


def check(resource: Resource) -> None:
    """Raise ValidationError for a field that is unknown, missing, or not what it may be."""
    package = MODELS[resource["kind"]]
    assert resource["apiVersion"] == VERSIONS[package]
    model: Any = getattr(import_module(f"cloudcoil.models.{package}.v1"), resource["kind"])
    model.model_validate_json(json.dumps(resource), strict=True, extra="forbid")


def of_the_chart(*kinds: str) -> Iterator[Resource]:
    for case in CASES:
        yield from (resource for resource in render(values_of(case)) if resource["kind"] in kinds)


@pytest.fixture(scope="module")
def resources() -> list[Resource]:
    monitor = (ROOT / "deploy" / "helm" / "engines" / "pod-monitor.yaml").read_text()
    return [yaml.safe_load(monitor), *of_the_chart(*MODELS)]


def test_their_models_take_them(resources: list[Resource]) -> None:
    assert {resource["kind"] for resource in resources} == set(MODELS)
    assert set(MODELS) | {"HTTPRoute"} == CUSTOM | {"PodMonitor"}
    for resource in resources:
        check(resource)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Certificate", "spec.privateKey.rotationPolicy", "Sometimes"),
        ("Certificate", "spec.issuerRef.nam", "x"),
        ("Certificate", "spec.usages", ["server"]),
        ("PodMonitor", "spec.podMetricsEndpoints", [{"port": 8000}]),
        ("PrometheusRule", "spec.groups", [{"rules": []}]),
        ("ServiceMonitor", "spec.selector", None),
        ("ServiceMonitor", "spec.endpoints", [{"port": "metrics", "interval": "soon"}]),
        ("ServiceMonitor", "spec.endpoint", []),
    ],
)
def test_what_is_wrong_would_be_seen(resources: list[Resource], kind: str, path: str, value: object) -> None:
    found = next(resource for resource in resources if resource["kind"] == kind)
    broken = place = json.loads(json.dumps(found))
    *folders, name = path.split(".")
    for folder in folders:
        place = place[folder]
    place[name] = value
    with pytest.raises(ValidationError):
        check(broken)


@pytest.mark.parametrize("longest", [600, 86_400])
def test_the_route_has_fields_of_the_gateway_api(longest: int) -> None:
    values = merged(values_of("everything"), {"router": {"longestStream": longest}})
    rendered = render(values)
    (route,) = (resource for resource in rendered if resource["kind"] == "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    spec = route["spec"]
    assert set(spec) <= {"parentRefs", "hostnames", "rules"}
    for parent in spec["parentRefs"]:
        assert set(parent) <= {"name", "namespace", "sectionName"}
        assert all(isinstance(value, str) and value for value in parent.values())
    for host in spec.get("hostnames", ()):
        assert re.fullmatch(r"(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?", host)
    (rule,) = spec["rules"]
    assert set(rule) == {"matches", "timeouts", "backendRefs"}
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    # Durations are those of GEP-2257: at most five digits for each unit.
    assert rule["timeouts"] == {"request": f"{longest}s"}
    assert re.fullmatch(r"([0-9]{1,5}(h|m|s|ms)){1,4}", rule["timeouts"]["request"])
    services = {one["metadata"]["name"]: one["spec"] for one in rendered if one["kind"] == "Service"}
    for backend in rule["backendRefs"]:
        assert set(backend) == {"name", "port"}
        assert backend["port"] in {port["port"] for port in services[backend["name"]]["ports"]}
