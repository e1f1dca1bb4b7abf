"""Make kvplane.yml and its tests: `python -m deploy.alerts.generate`; with --check only compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.alerts.rules import GROUPS, Rule, Series

_HERE = Path(__file__).parent
RULES, TESTS = _HERE / "kvplane.yml", _HERE / "kvplane.test.yml"
_HEAD = "# Made of rules.py by `python -m deploy.alerts.generate`.\n"
_LOOKED_AT_MIN = (5, 20, 40)
"""Minutes at which tests look whether a rule is quiet, besides that by which it would have fired."""


def rules() -> str:
    """Return the rules as Prometheus reads them."""
    lines = ["groups:"]
    for group, members in GROUPS.items():
        lines += [f"  - name: {group}", "    rules:"]
        for rule in members:
            lines += [
                f"      - alert: {rule.name}",
                f"        expr: {_text(rule.query)}",
                *([f"        for: {rule.lasting}m"] if rule.lasting else []),
                "        labels:",
                f"          severity: {rule.severity}",
                "        annotations:",
                f"          summary: {_text(rule.summary)}",
                f"          runbook: {_text(rule.runbook)}",
            ]
    return _HEAD + "\n".join(lines) + "\n"


def tests() -> str:
    """Return tests of the rules as promtool reads them: each fires on its series, and only on those."""
    lines = ["rule_files:", f"  - {RULES.name}", "evaluation_interval: 1m", "tests:"]
    for rule in _all():
        lines += [f"  # {rule.name} fires", *_case(rule.fires, rule, fires=True)]
        lines += [f"  # {rule.name} stays quiet", *_case(rule.quiet, rule, fires=False)]
    return _HEAD + "\n".join(lines) + "\n"


def _case(series: Series, rule: Rule, *, fires: bool) -> Iterator[str]:
    yield "  - interval: 1m"
    yield "    input_series:"
    for name, values in series.items():
        yield f"      - series: {_text(name)}"
        yield f"        values: {_text(values)}"
    yield "    alert_rule_test:"
    for minute in (rule.seen_at,) if fires else (*_LOOKED_AT_MIN, rule.seen_at):
        yield f"      - eval_time: {minute}m"
        yield f"        alertname: {rule.name}"
        if not fires:
            yield "        exp_alerts: []"
            continue
        yield "        exp_alerts:"
        yield f"          - exp_labels: {_mapping({**rule.labels, 'severity': rule.severity})}"
        yield f"            exp_annotations: {_mapping({'summary': rule.summary, 'runbook': rule.runbook})}"


def _all() -> Iterator[Rule]:
    for members in GROUPS.values():
        yield from members


def _text(value: str) -> str:
    """Return a text as YAML has it; JSON's is."""
    return json.dumps(value, ensure_ascii=False)


def _mapping(value: Mapping[str, str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Write the files, or with --check tell whether they are as they would be written."""
    made = {RULES: rules(), TESTS: tests()}
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    for name in stale:
        print(f"deploy/alerts/{name} is not what rules.py makes: make generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
