from __future__ import annotations

import pytest

from tests.bench import fingerprint


def test_the_table_has_a_line_per_length_and_no_figure_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    fingerprint.main(["--tokens", "2000", "5000", "--rounds", "3"])
    *_, short, long = capsys.readouterr().out.splitlines()
    for line, tokens in ((short, "2,000"), (long, "5,000")):
        name, *figures = line.split()
        assert name == tokens
        assert len(figures) == len(fingerprint.COLUMNS)
        assert all(float(figure) > 0 for figure in figures)
