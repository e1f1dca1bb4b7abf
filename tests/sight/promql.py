"""What a PromQL expression refers to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

from deploy.grafana.catalogue import Known

_VARIABLES = {"$__rate_interval": "5m", "$job": ".+", "$engine": ".+", "$tenant": ".+"}


@dataclass(frozen=True)
class Use:
    """One selector: the series it is of, and the labels it looks at or that are kept of it."""

    series: str
    labels: frozenset[str]


def uses(expression: str) -> list[Use]:
    """Return every selector of an expression, those of a dashboard with its variables. Raises ValueError."""
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return list(_walk(promql_parser.parse(expression), frozenset()))


def _walk(node: Any, kept: frozenset[str]) -> Iterator[Use]:
    if isinstance(node, promql_parser.VectorSelector):
        yield Use(node.name or "", kept | {matcher.name for matcher in node.matchers.matchers})
        return
    if isinstance(node, promql_parser.AggregateExpr):
        kept = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
    elif isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile":
        assert "le" in str(node), "a quantile needs the buckets' bounds"
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        inner = getattr(node, name, None)
        if inner is not None:
            yield from _walk(inner, kept)
    for inner in getattr(node, "args", None) or ():
        yield from _walk(inner, kept)


def legend_labels(legend: str) -> set[str]:
    """Return the labels that a legend of Grafana's shows."""
    return set(re.findall(r"\{\{(\w+)\}\}", legend))


def check(expression: str, known: dict[str, Known]) -> set[str]:
    """Return the metrics that an expression refers to; all there are, with labels that they have."""
    by_series = {series: metric for metric in known.values() for series in metric.series}
    found = set[str]()
    for use in uses(expression):
        metric = by_series.get(use.series)
        assert metric is not None, f"{use.series} in {expression} does not exist"
        assert use.labels <= metric.all_labels, f"{use.series} has no {use.labels - metric.all_labels}"
        found.add(metric.name)
    assert found, f"{expression} refers to nothing"
    return found
