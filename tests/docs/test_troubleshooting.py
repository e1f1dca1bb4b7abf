"""deploy/TROUBLESHOOTING.md against the code: it has every reason, every warning, every finding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvplane.cli.doctor.engine_checks import _MUST_EQUAL
from kvplane.client.model import MissReason
from kvplane.controlplane.errors import refusals
from kvplane.router.upstream import _PULL_OUTCOMES
from tests.docs.pages import ROOT

PAGE = (ROOT / "deploy" / "TROUBLESHOOTING.md").read_text()
SOURCES = (ROOT / "controlplane", ROOT / "connector", ROOT / "store")
ROUTER = ROOT / "controlplane" / "kvplane" / "router"
LOUD = ("warning", "error", "exception", "critical")


def section(title: str) -> set[str]:
    """Words in code in the tables of a section: in their first column."""
    text = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert text is not None
    cells = re.findall(r"^\| (.*?) \|", text[1], re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def trees(*folders: Path) -> Iterator[ast.Module]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name and "bench" not in path.parts:
                yield ast.parse(path.read_text())


def words(node: ast.AST) -> set[str]:
    """Words that an expression may stand for."""
    if isinstance(node, ast.Constant):
        return (
            {node.value}
            if isinstance(node.value, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", node.value)
            else set()
        )
    if isinstance(node, ast.IfExp):
        return words(node.body) | words(node.orelse)
    if isinstance(node, ast.Tuple):
        return set[str]().union(*map(words, node.elts))
    return set()


def reasons() -> set[str]:
    """Every value that x-kvplane-reason may have, as the router's code spells them."""
    found = {str(miss) for miss in MissReason} | set(_PULL_OUTCOMES)
    for tree in trees(ROUTER):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "went_cold"
            ):
                found |= words(node.args[0])
            elif isinstance(node, ast.Assign) and "turn.reason" in ast.unparse(node.targets[0]):
                found |= words(node.value)
            elif isinstance(node, ast.FunctionDef) and node.name == "decode_only_reason":
                found |= {
                    word
                    for n in ast.walk(node)
                    if isinstance(n, ast.Return) and n.value
                    for word in words(n.value)
                }
    for node in ast.walk(ast.parse((ROUTER / "policy.py").read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in ("_choose", "_no_pull"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return | ast.Assign) and inner.value is not None:
                    found |= words(inner.value)
    for node in ast.walk(ast.parse((ROUTER / "turn.py").read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("_ask_plane", "decide"):
            found |= {
                w for n in ast.walk(node) if isinstance(n, ast.Return) and n.value for w in words(n.value)
            }
    return found


def test_every_reason_is_explained() -> None:
    known = reasons()
    assert {
        "holder_full",
        "plane_unavailable",
        "echo",
        "new_text_short",
        "claim_lost",
        "peer_breaker",
    } <= known
    assert known == section("x-kvplane-reason")


def events() -> set[str]:
    """Events of level warning and above."""
    found = set[str]()
    for tree in trees(*SOURCES):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            of = node.func
            if isinstance(of, ast.Attribute) and of.attr in LOUD and ast.unparse(of.value) in ("log", "_log"):
                found |= words(node.args[0])
            elif ast.unparse(of) == "self._tell" and ast.unparse(node.args[0]).rpartition(".")[2] in LOUD:
                found |= words(node.args[1])
    return found


def test_every_warning_is_explained() -> None:
    known = events()
    assert {"control_plane_lost", "control_plane_unreachable", "engine_fenced", "rpc_refused"} <= known
    assert not known - section("Events in the logs")


def test_every_reason_of_an_error_has_a_cause() -> None:
    assert set(refusals()) == section("Reasons of gRPC errors")


def test_every_finding_of_the_doctor_is_explained() -> None:
    found = {f"{name}_mismatch" for name in _MUST_EQUAL}
    for tree in trees(ROOT / "controlplane" / "kvplane" / "cli" / "doctor"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("problem", "warning", "found"):
                found |= words(node.args[0])
    assert {"no_engines", "clock_skew", "store_slow"} <= found
    assert found == section("What the doctor finds")


def test_what_routers_and_commands_say_is_quoted_rightly() -> None:
    """Lines of /ready and /health, and of commands that do not start: parts of them that the code has."""
    text = "\n".join(path.read_text() for folder in SOURCES for path in folder.rglob("*.py"))
    text = re.sub(r'"\s+f?"', "", text)
    for title in ("Problems at /ready and /health", "What commands say when they do not start"):
        told = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
        assert told is not None
        phrases = [
            p
            for cell in re.findall(r"^\| (.*?) \|", told[1], re.MULTILINE)
            for p in re.findall(r"`(.*?)`", cell)
        ]
        assert len(phrases) > 8
        assert not [phrase for phrase in phrases if phrase not in text]
