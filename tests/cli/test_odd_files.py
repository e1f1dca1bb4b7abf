"""Files that mean harm: one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvplane.cli.config import ConfigError, load_config
from kvplane.controlplane.access import AccessFileError, load_access
from kvplane.router.settings import SettingsError, engine_url
from kvplane.store.files import MAX_FILE_BYTES


@pytest.mark.parametrize(
    "read", [lambda file: load_config({}, file, {}), lambda file: load_access(str(file))]
)
@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "{a=" * 5000, '"a\\nb" = 1', "a = 'b\nc'"])
def test_what_is_no_such_file_is_refused_in_a_line(
    tmp_path: Path, read: Callable[[Path], object], text: str
) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    with pytest.raises((ConfigError, AccessFileError)) as raised:
        read(file)
    assert "\n" not in str(raised.value)


def test_a_url_of_several_lines_is_shown_in_one() -> None:
    with pytest.raises(SettingsError) as raised:
        engine_url("http://a\nb\x1b[2J")
    assert str(raised.value).isprintable()


def test_a_configuration_of_megabytes_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large.toml"
    file.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_config({}, file, {})
