"""What is released: the wheel holds all and nothing else, and its metadata is right.

Installing it, on each Python, is `make release-check`.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from deploy.release import check
from deploy.release.environments import ROOT, interpreters, with_extras


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder))))


def test_the_wheel_is_whole(wheel: Path) -> None:
    assert check.problems_of_wheel(wheel) == []
    assert wheel.name == f"kvplane-{check.version()}-py3-none-any.whl"


def test_the_sdist_is_whole(tmp_path: Path) -> None:
    sdist = Path(next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path))))
    assert check.problems_of_sdist(sdist) == []


def test_what_is_missing_or_strange_in_a_wheel_is_named(wheel: Path, tmp_path: Path) -> None:
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as made:
        for name in whole.namelist():
            data = whole.read(name)
            if name.endswith("METADATA"):
                data = data.replace(b"\nVersion: ", b"\nVersion: 9").partition(b"\n\n")[0] + b"\n\nnothing"
            if not name.endswith(("cli/run.py", "LICENSE")):
                made.writestr(name, data)
        made.writestr("tests/fakes/engine.py", "")
    assert check.problems_of_wheel(broken) == [
        "missing: kvplane/cli/run.py",
        "does not belong there: tests/fakes/engine.py",
        "LICENSE is missing",
        f"version 9{check.version()}, but pyproject.toml says {check.version()}",
        "the README does not render",
        "the description is not the README",
    ]


def test_our_own_interpreter_is_found() -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = interpreters()
    assert set(found) == {"3.11", "3.12", "3.13"}
    assert found.get(own, Path(sys.executable)) == Path(sys.executable)


def test_a_wheel_in_a_file_is_a_requirement() -> None:
    assert with_extras(Path("/a/b.whl"), "router") == "kvplane[router] @ file:///a/b.whl"
    assert with_extras(Path("/a/b.whl")) == "kvplane @ file:///a/b.whl"
