"""Documentation, dashboard and alerts speak of the metrics there are, of all of them, and are up to date."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.alerts import generate as alerts
from deploy.alerts.rules import GROUPS
from deploy.grafana import generate as grafana
from deploy.grafana.catalogue import Known, catalogue
from deploy.grafana.panels import NOT_SHOWN, ROWS
from tests.sight.promql import check, legend_labels, uses

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".cache" / "promtool" / "usr" / "bin" / "promtool"
PROMTOOL = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.exists() else "")
needs_promtool = pytest.mark.skipif(
    not PROMTOOL, reason="no promtool: deploy/alerts/get_promtool.sh fetches it; rules were not tested"
)
ALL = [rule for members in GROUPS.values() for rule in members]


@pytest.fixture(scope="module")
def known() -> dict[str, Known]:
    return catalogue()


def test_documentation_has_every_metric_as_it_is_and_no_other(known: dict[str, Known]) -> None:
    text = (ROOT / "deploy" / "METRICS.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \{([\w, ]+)\})? \| (\w+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    documented = {name: (tuple(filter(None, labels.split(", "))), kind) for name, labels, kind, _, _ in rows}
    assert len(rows) == len(documented)
    assert documented == {metric.name: (metric.labels, metric.kind) for metric in known.values()}
    assert set(re.findall(r"\bkvplane_\w+?_(?:total|seconds|bytes|blocks)\b", text)) <= set(known)


def test_every_query_of_the_dashboard_refers_to_what_there_is(known: dict[str, Known]) -> None:
    shown = set[str]()
    for row in ROWS:
        for panel in row.panels:
            for query, legend in panel.queries:
                metrics = check(query, known)
                shown |= metrics
                labels = frozenset[str]().union(*(known[name].all_labels for name in metrics))
                assert legend_labels(legend) <= labels, (panel.title, legend)
    assert not shown & set(NOT_SHOWN)
    assert shown | set(NOT_SHOWN) == set(known)


def test_legends_show_only_what_their_queries_keep() -> None:
    for row in ROWS:
        for panel in row.panels:
            for query, legend in panel.queries:
                if re.search(r"\b(sum|max|min|count|avg)\b", query):
                    kept = frozenset[str]().union(*(use.labels for use in uses(query)))
                    assert legend_labels(legend) <= kept, (panel.title, legend)


def test_the_committed_dashboard_is_what_the_code_makes() -> None:
    assert grafana.TARGET.read_text() == grafana.rendered()


def test_the_dashboard_is_one_that_grafana_can_lay_out() -> None:
    board = json.loads(grafana.rendered())
    rows = [panel for panel in board["panels"] if panel["type"] == "row"]
    assert [row["title"] for row in rows] == [row.title for row in ROWS]
    every = [*board["panels"], *(panel for row in rows for panel in row["panels"])]
    assert len({panel["id"] for panel in every}) == len(every)
    graphs = [panel for panel in every if panel["type"] != "row"]
    assert len(graphs) == sum(len(row.panels) for row in ROWS)
    cells = set[tuple[str, int, int]]()
    at_top = {panel["id"] for panel in board["panels"]}
    row_of = {panel["id"]: row["title"] for row in rows for panel in row["panels"]}
    for panel in graphs:
        place = panel["gridPos"]
        where = "top" if panel["id"] in at_top else row_of[panel["id"]]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (where, x, y) not in cells, "panels overlap"
                cells.add((where, x, y))
        assert all(target["expr"] for target in panel["targets"])
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "job", "engine", "tenant"]


def test_every_alert_refers_to_what_there_is(known: dict[str, Known]) -> None:
    by_series = {series: metric for metric in known.values() for series in metric.series}
    for rule in ALL:
        metrics = check(rule.query, known)
        named = {
            by_series[use.series].name
            for case in (rule.fires, rule.quiet)
            for series in case
            if series != "something_else"
            for use in uses(series)
        }
        assert named == metrics, rule.name
        assert set(rule.labels) <= frozenset[str]().union(*(known[name].all_labels for name in metrics))


def test_every_alert_says_what_to_do() -> None:
    assert len({rule.name for rule in ALL}) == len(ALL) >= 20
    for rule in ALL:
        assert rule.name.startswith("Kvplane")
        assert rule.severity in ("critical", "warning", "info")
        assert rule.summary.endswith(".")
        assert len(rule.runbook) > 60
        assert rule.runbook.endswith((".", "?")), rule.name


def test_runbooks_name_metrics_and_files_that_exist(known: dict[str, Known]) -> None:
    for rule in ALL:
        for name in re.findall(r"\bkvplane_(?:controlplane|router|connector)_\w+", rule.runbook):
            assert name in known, (rule.name, name)
        for file in re.findall(r"\bdeploy/[\w./]+\.md", rule.runbook):
            assert (ROOT / file).exists(), (rule.name, file)


def test_the_committed_rules_and_tests_are_what_the_code_makes() -> None:
    assert alerts.RULES.read_text() == alerts.rules()
    assert alerts.TESTS.read_text() == alerts.tests()


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run([PROMTOOL, "check", "rules", str(alerts.RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALL)} rules found" in done.stdout


@needs_promtool
def test_every_alert_fires_and_stays_quiet_when_it_should() -> None:
    done = subprocess.run([PROMTOOL, "test", "rules", str(alerts.TESTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
