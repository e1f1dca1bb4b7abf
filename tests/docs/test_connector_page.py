"""deploy/CONNECTOR.md against the connector's own code."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from typing import Any

import pytest

from kvplane.connector.config import PREFIX, ConfigError, ConnectorConfig, read_config
from kvplane.connector.envelope import Outcome
from tests.docs.pages import ROOT

PAGE = (ROOT / "deploy" / "CONNECTOR.md").read_text()
CODE = ROOT / "connector" / "kvplane" / "connector"
ROWS = {
    key: (values, default)
    for key, values, default in re.findall(r"^\| `(kvplane_\w+)` \| (.*?) \| (.*?) \|", PAGE, re.M)
}
KEYS = [f"{PREFIX}{field.name}" for field in fields(ConnectorConfig)]
REFUSING = {
    "keeper.py": ("_refusal",),
    "retention.py": ("refusal",),
    "engine.py": ("_kind", "_group", "cache_layout"),
    "lifecycle.py": ("refusal",),
}
"""Functions that say why not, in what they return or set."""
LEASES = ("kvplane_min_ttl_s", "kvplane_max_ttl_s", "kvplane_max_age_s")
"""These have to fit each other: all are put at the same bound."""


def read(**given: Any) -> ConnectorConfig:
    return read_config({"kvplane_address": "10.0.0.9:50051", **given}, {})


def test_every_key_has_its_row_and_no_other() -> None:
    assert set(ROWS) == set(KEYS)


@pytest.mark.parametrize("key", [key for key in KEYS if key != "kvplane_address"])
def test_defaults_are_as_told(key: str) -> None:
    value = getattr(read(), key.removeprefix(PREFIX))
    told = ROWS[key][1]
    if key == "kvplane_endpoint":
        assert (
            read_config({}, {"KVPLANE_ADDRESS": "a:1", told.strip("`"): "http://b:1"}).endpoint
            == "http://b:1"
        )
    elif value in ("", {}):
        assert told == "none"
    elif value is None:
        assert told == "adaptive"
    else:
        assert told == (str(value).lower() if isinstance(value, bool | str) else f"{value:g}")


RANGES = {key: match for key in KEYS if (match := re.match(r"([\d.]+) to ([\d.]+)", ROWS.get(key, ("",))[0]))}


def test_numbers_have_a_range() -> None:
    numbers = {key for key in KEYS if isinstance(getattr(read(), key.removeprefix(PREFIX)), int | float)}
    assert numbers - {"kvplane_tls"} | {"kvplane_ttl_s"} == set(RANGES)


@pytest.mark.parametrize("key", list(RANGES))
def test_ranges_are_as_told(key: str) -> None:
    kind = int if key in ("kvplane_chunk_tokens", "kvplane_metrics_port") else float
    low, high = (kind(float(bound)) for bound in RANGES[key].groups())
    leases = LEASES if key in (*LEASES, "kvplane_ttl_s") else ()
    for bound in (low, high):
        read(**dict.fromkeys(leases, bound), **({} if key in leases else {key: bound}))
    for beyond in (low - 1, high + 1):
        with pytest.raises(ConfigError):
            read(**{**dict.fromkeys(leases, high), key: beyond})


def test_what_is_counted_is_explained() -> None:
    """Reasons that the connector gives for retaining or pulling nothing, as its code spells them."""
    counted = {str(outcome) for outcome in Outcome}
    for path in CODE.glob("*.py"):
        text = path.read_text()
        counted |= set(re.findall(r'not_retained:(\w+)"', text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name in REFUSING.get(path.name, ()):
                for answer in ast.walk(node):
                    if isinstance(answer, ast.Return | ast.Assign) and answer.value is not None:
                        counted |= _words(answer.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("PullPlan", "cold"):
                    counted |= set[str]().union(*map(_words, node.args))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_REFUSED_KINDS":
                assert isinstance(node.value, ast.Dict)
                counted |= set[str]().union(*map(_words, node.value.values))
    assert {"peer_breaker", "over_share", "recurrent_model", "bounded_replay", "ask_timeout"} <= counted
    assert not {word for word in counted if f"`{word}`" not in PAGE}


def _words(expression: ast.expr) -> set[str]:
    """Words that an expression may stand for; names of attributes are none."""
    if isinstance(expression, ast.Call):
        return set()
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return {expression.value} if re.fullmatch(r"[a-z]+(_[a-z]+)*", expression.value) else set()
    parts = (part for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr))
    return set[str]().union(*map(_words, parts))
