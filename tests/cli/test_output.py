"""Tables in files and pipes: as wide as they need, whatever is in them, however many rows."""

from __future__ import annotations

import time

import pytest

from kvplane.cli.output import print_table


def test_columns_are_in_line_however_wide_their_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ("name", ">count", "where"),
        [("\u65e5\u672c", "1,000", "a"), ("x\x1b", "2", ""), ("abcdef", "3", "c")],
    )
    assert capsys.readouterr().out.splitlines() == [
        "NAME    COUNT  WHERE",
        "\u65e5\u672c    1,000  a",
        "x\\x1b       2",
        "abcdef      3  c",
    ]


def test_nothing_is_cut_or_folded(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "where"), [("x" * 700, "y" * 700)])
    assert capsys.readouterr().out.splitlines()[1] == f"{'x' * 700}  {'y' * 700}"


def test_a_title_alone_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", ">n"), [])
    assert capsys.readouterr().out == "ID  N\n"


def test_a_large_fleet_is_listed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [tuple(f"{column} {row}" for column in range(9)) for row in range(20_000)]
    before = time.process_time()
    print_table(tuple("abcdefghi"), rows)
    assert time.process_time() - before < 4.0
    assert capsys.readouterr().out.count("\n") == 20_001
