"""Rules of the tree that no linter knows."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("protos", "store", "controlplane", "connector")


def _modules() -> list[Path]:
    return [
        path
        for source in SOURCES
        for path in sorted((ROOT / source / "kvplane").rglob("*.py"))
        if "_pb2" not in path.name
    ]


def test_the_namespace_package_has_no_init() -> None:
    for source in SOURCES:
        assert not (ROOT / source / "kvplane" / "__init__.py").exists()
        assert not (ROOT / source / "__init__.py").exists()


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_ends_at_five_hundred_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def _imports(path: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_protobuf_types_stop_at_the_edge() -> None:
    allowed = {
        "convert.py",
        "decoding.py",  # stands between gRPC and generated code, where a message is not one yet
        "records.py",
        "validate.py",
        "attachments.py",
        "turn_streams.py",
        "local_turns.py",
        "server.py",
        "errors.py",
        "reflection.py",
    }
    for path in _modules():
        if path.parent.name in ("bench", "client", "etcd") or path.name.endswith("_service.py"):
            continue
        if path.name in allowed:
            continue
        found = {name for name in _imports(path) if "_pb2" in name or name.startswith("google.protobuf")}
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_clocks_are_read_in_one_place_of_the_control_plane() -> None:
    for path in _modules():
        if path.name != "clock.py" and ("store" in path.parts or "controlplane" in path.parts[-2]):
            assert "time" not in _imports(path), path.relative_to(ROOT)


def test_structlog_is_configured_once() -> None:
    for path in _modules():
        if path.name != "logs.py":
            assert "structlog.configure(" not in path.read_text(), path.relative_to(ROOT)


def test_the_wheel_holds_all_source_roots() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = project["tool"]["hatch"]["build"]
    assert set(hatch["dev-mode-dirs"]) == set(SOURCES)
    assert {Path(entry).parts[0] for entry in hatch["targets"]["wheel"]["packages"]} == set(SOURCES)
