"""The topology of deploy/compose: parts of it are killed and restarted, and clients see nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.compose.run import Plan, play
from deploy.compose.topology import Service, Topology

pytestmark = [pytest.mark.robustness, pytest.mark.timeout(180)]


def _check(topology: Topology, service: Service) -> int:
    """Run a service's health check as its container would; return the exit code."""
    kind, program, *arguments = topology.config["services"][service.name]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    here = [argument.replace("127.0.0.1", service.address) for argument in arguments]
    return subprocess.run([sys.executable, *here], capture_output=True, check=False, timeout=30).returncode


def test_no_request_fails_and_no_stream_breaks(tmp_path: Path) -> None:
    with Topology(tmp_path, {"DRAIN_GRACE": "3"}) as topology:
        (checked, gone), (router, _) = topology.of_kind("serve"), topology.of_kind("route")
        assert [_check(topology, one) for one in (checked, router)] == [0, 0]
        said = list[str]()
        tally = play(topology, Plan(seconds=1.0, conversations=6), said.append)
        report = "\n".join([*said, tally.report()])
        gone.kill()
        assert _check(topology, gone) != 0
    assert tally.clean, report
    assert tally.streams >= 20, report
    assert tally.paths["direct"] + tally.paths["pull"] > 0, report
    assert sum(line.startswith("restarting") for line in said) == 4, report
