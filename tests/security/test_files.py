"""When files of credentials count as changed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from kvplane.client import files as client_files
from kvplane.store import files as store_files


@pytest.mark.parametrize("files", [store_files, client_files])
def test_a_file_that_has_become_readable_is_read_again(tmp_path: Path, files: ModuleType) -> None:
    path = tmp_path / "access.toml"
    path.write_text("old")
    watched = files.Watched((str(path),))
    path.write_text("the new one")
    path.chmod(0)
    assert [watched.look(), watched.look(), watched.look()] == [False, True, False]
    path.chmod(0o640)
    assert [watched.look(), watched.look(), watched.look()] == [False, True, False]
