"""Make kvplane.json of panels.py: `python -m deploy.grafana.generate`, with --check only compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.panels import ROWS, C, Panel

TARGET = Path(__file__).with_name("kvplane.json")
_WIDTH = 24
_GRAPH, _NUMBER = (8, 8), (6, 4)
"""Width and height, in Grafana's units."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    at, number = 0, 0
    for row in ROWS:
        number += 1
        head = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": not row.open,
            "gridPos": {"x": 0, "y": at, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        at += 1
        placed, below = _placed(row.panels, at, number + 1)
        number += len(placed)
        panels.append(head)
        if row.open:
            panels += placed
            at = below
        else:
            head["panels"] = placed  # a collapsed row holds its own
    return {
        "title": "kvplane",
        "uid": "kvplane",
        "tags": ["kvplane", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _placed(panels: tuple[Panel, ...], top: int, number: int) -> tuple[list[dict[str, Any]], int]:
    """Return panels side by side from a height on, and the height below them."""
    made, x, y, height = list[dict[str, Any]](), 0, top, 0
    for panel in panels:
        width, tall = _NUMBER if panel.single else _GRAPH
        if x + width > _WIDTH or (height and tall != height):
            x, y = 0, y + height
        height = tall
        made.append(_panel(panel, number + len(made), {"x": x, "y": y, "w": width, "h": tall}))
        x += width
    return made, y + height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend or "__auto",
        }
        for index, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "stat" if panel.single else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}}
        if panel.single
        else {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}},
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    of_job = '{job=~"$job"}'
    queries = (
        ("job", "Job", 'label_values({__name__=~"kvplane_.+"}, job)'),
        ("engine", "Engine", f"label_values({C}retained_blocks{of_job}, engine_id)"),
        ("tenant", "Tenant", f"label_values({C}tenant_retained_blocks{of_job}, tenant_id)"),
    )
    return [source] + [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }
        for name, label, query in queries
    ]


def rendered() -> str:
    """Return the text of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    """Write the file, or with --check tell whether it is as it would be written."""
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(rendered())
        return 0
    if TARGET.exists() and TARGET.read_text() == rendered():
        return 0
    print("deploy/grafana/kvplane.json is not what panels.py makes: make generate", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
