"""The chart, rendered by Helm's own SDK."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "kvplane"
CASES = {path.stem: path for path in sorted((ROOT / "deploy" / "helm" / "ci").glob("*.yaml"))}
NAMESPACE, RELEASE = "inference", "prod"
CONTROL_PLANE, ROUTER = "prod-kvplane-control-plane", "prod-kvplane-router"
CUSTOM = {"Certificate", "HTTPRoute", "PrometheusRule", "ServiceMonitor"}
"""Kinds that Kubernetes itself does not know, so that it has no schema of them."""

Resource = dict[str, Any]


def render(values: Mapping[str, Any], *, release: str = RELEASE) -> list[Resource]:
    """Return what the chart makes of values. Raises helm_python.HelmError."""
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(dict(values))
        manifests = chart.render(dict(values), name=release, namespace=NAMESPACE)
    return [
        resource
        for name, text in sorted(manifests.items())
        if name.endswith(".yaml")
        for resource in yaml.safe_load_all(text)
        if resource
    ]


@dataclass(frozen=True)
class Rendered:
    """What a values file becomes."""

    name: str
    resources: tuple[Resource, ...]

    def of(self, *kinds: str) -> list[Resource]:
        return [resource for resource in self.resources if resource["kind"] in kinds]

    def one(self, kind: str, name: str) -> Resource:
        (found,) = (r for r in self.of(kind) if r["metadata"]["name"] == name)
        return found

    def pods(self) -> Iterator[tuple[str, Resource]]:
        """Workloads: name, and the pod that they make."""
        for resource in self.of("Deployment", "DaemonSet"):
            yield resource["metadata"]["name"], resource["spec"]["template"]

    def arguments(self, name: str) -> list[str]:
        (container,) = dict(self.pods())[name]["spec"]["containers"]
        found: list[str] = container["args"]
        return found


def values_of(case: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CASES[case].read_text())
    return found
