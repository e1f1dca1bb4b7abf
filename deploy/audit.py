"""make audit: known vulnerabilities of what `pip install '.[server,router]'` brings.

It is installed into an environment of its own, and looked at by pip-audit, which has another. Exit codes:
0 all were looked up and none is known; 1 some are known; 2 it could not be installed; 3 the source of
advisories cannot be reached, or does not know some packages: then nothing is known of those.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOL = "pip-audit==2.10.1"
OWN = "kvplane"
VULNERABLE, NOT_INSTALLED, NOT_LOOKED_UP = 1, 2, 3
_SHOWN = 8


def verdict(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code and what to say of pip-audit's report."""
    packages = [one for one in report["dependencies"] if one["name"] != OWN]
    known = [one for one in packages if one.get("vulns")]
    unknown = [one["name"] for one in packages if "vulns" not in one]
    lines = [
        f"{one['name']} {one['version']}: {vuln['id']}, mended in {', '.join(vuln['fix_versions']) or 'none'}"
        for one in known
        for vuln in one["vulns"]
    ]
    looked_up = len(packages) - len(unknown)
    lines.append(
        f"{looked_up} of {len(packages)} packages looked up, {len(known)} with known vulnerabilities"
    )
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        lines.append(
            f"NOT LOOKED UP: {', '.join(unknown[:_SHOWN])}{more}: the source of advisories lacks them"
        )
    if not looked_up:
        lines.append(
            "The source of advisories cannot be reached from here: NOTHING is known of these packages."
        )
    if known:
        return VULNERABLE, lines
    return (NOT_LOOKED_UP if unknown or not packages else 0), lines


def _installed(folder: Path, *what: str) -> Path:
    """Return the Python of an environment with something installed. Raises CalledProcessError."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    options = ("--quiet", "--disable-pip-version-check", "--no-input")
    subprocess.run([python, "-m", "pip", "install", *options, *what], check=True, cwd=ROOT)
    return python


def main(arguments: list[str] | None = None) -> int:
    """Run; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "audit")
    given = parser.parse_args(arguments)
    try:
        audited = _installed(given.folder / "env", ".[server,router]")
        tool = _installed(given.folder / "tool", TOOL)
    except subprocess.CalledProcessError as error:
        print(f"audit: installing failed: {error}", file=sys.stderr)
        return NOT_INSTALLED
    [packages] = audited.parent.parent.glob("lib/python*/site-packages")
    command = [
        str(tool),
        "-m",
        "pip_audit",
        "--path",
        str(packages),
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        code, lines = verdict(json.loads(done.stdout))
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        code = NOT_LOOKED_UP
        lines = [f"The source of advisories cannot be reached from here: {said[0]}"]
    for line in lines:
        print(f"audit: {line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
