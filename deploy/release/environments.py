"""Interpreters and environments that a release is tried in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
"""Of Python, that a release is tried with."""


class ReleaseError(Exception):
    """A step of the release check failed; the text says which and shows the end of its output."""


def run(command: Sequence[str | Path], *, cwd: Path = ROOT, timeout: float = 900.0) -> str:
    """Run a program with a clean Python environment; return what it printed.

    `timeout` is in seconds. Raises ReleaseError when it fails or takes longer.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{' '.join(words)}: not done after {timeout:.0f} s") from None
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-25:])
        raise ReleaseError(f"{' '.join(words)}: exit code {done.returncode}\n{tail}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Return our environment without what would lend a fresh one this checkout, or settings of kvplane's."""
    ours = ("PYTHON", "VIRTUAL_ENV", "KVPLANE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def interpreters() -> dict[str, Path | None]:
    """Return the interpreter of each version, None where there is none.

    Looked for: `pythonX.Y` on the path, and pyenv's (its shims answer only for
    versions that are switched on).
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found: dict[str, Path | None] = {}
    for version in VERSIONS:
        named = shutil.which(f"python{version}")
        candidates = [Path(sys.executable), *([Path(named)] if named else [])]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python"))
        found[version] = next((path for path in candidates if _is(path, version)), None)
    return found


def _is(path: Path, version: str) -> bool:
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        return run([path, "-I", "-c", script], timeout=30).strip() == version
    except (ReleaseError, OSError):
        return False


def environment(folder: Path, interpreter: Path, *requirements: str) -> Path:
    """Make a fresh environment with what is required; return its folder of programs.

    Raises ReleaseError.
    """
    run([interpreter, "-m", "venv", "--clear", folder])
    programs = folder / "bin"
    quiet = ("--disable-pip-version-check", "--no-input", "--quiet", "--no-compile")
    run([programs / "python", "-m", "pip", "install", *quiet, *requirements])
    run([programs / "python", "-m", "pip", "check"])
    return programs


def with_extras(distribution: Path, extras: str = "") -> str:
    """Return the requirement of a wheel or sdist in a file, such as `kvplane[router] @ file:///...`."""
    return f"kvplane{f'[{extras}]' if extras else ''} @ {distribution.resolve().as_uri()}"
