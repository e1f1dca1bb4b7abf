"""Runs checks in vLLM's environment, which has no pytest: one line per check, and the version at the end."""

from __future__ import annotations

import traceback
from typing import Any


def run(names: dict[str, Any], version: str) -> int:
    """Run every function called check_... and return the exit status."""
    checks = [function for name, function in names.items() if name.startswith("check_")]
    failed = 0
    for check in checks:
        try:
            check()
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}")
        else:
            print(f"passed {check.__name__}")
    print(f"{len(checks) - failed} of {len(checks)} checks passed with vLLM {version}")
    return 1 if failed or not checks else 0
