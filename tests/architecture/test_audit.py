"""What make audit makes of pip-audit's report."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.audit import NOT_LOOKED_UP, VULNERABLE, verdict

WELL: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
BAD: dict[str, Any] = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN: dict[str, Any] = {"name": "c", "skip_reason": "not found"}
OURS: dict[str, Any] = {"name": "kvplane", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([WELL, OURS], 0, "1 of 1 packages looked up, 0 with"),
        ([WELL, BAD, OURS], VULNERABLE, "b 2: CVE-1, mended in 3"),
        ([BAD, UNKNOWN], VULNERABLE, "NOT LOOKED UP: c"),
        ([WELL, UNKNOWN], NOT_LOOKED_UP, "NOT LOOKED UP: c"),
        ([UNKNOWN, OURS], NOT_LOOKED_UP, "NOTHING is known"),
        ([OURS], NOT_LOOKED_UP, "0 of 0"),
    ],
)
def test_what_is_not_known_is_not_said_to_be_well(packages: list[Any], code: int, said: str) -> None:
    result, lines = verdict({"dependencies": packages})
    assert result == code
    assert any(said in line for line in lines), lines
