"""The file that `--json` writes: figures, and what they were taken on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvplane.bench.figures import Row
from kvplane.bench.rig import Options

_PACKAGES = ("kvplane", "grpcio", "protobuf", "uvloop")


def document(rows: Sequence[Row], options: Options, store: str) -> dict[str, Any]:
    """Return the run as one JSON object. `store` names the store without its secrets."""
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "processor": _processor(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "options": {
            "seconds": options.seconds,
            "rounds": options.rounds,
            "blocks": options.blocks,
            "store": store,
            "profiled": options.profile is not None,
        },
        "results": [row.as_json() for row in rows],
    }


def write(path: Path, rows: Sequence[Row], options: Options, store: str) -> None:
    """Write the run to a file. Raises OSError."""
    path.write_text(json.dumps(document(rows, options, store), indent=2) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
