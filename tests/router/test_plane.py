"""What the router's log says of a control plane that is away."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.fakes.plane import FakePlane
from tests.router.rig import rig, until


async def test_what_has_never_answered_may_be_something_else() -> None:
    plane = FakePlane()
    plane.down = True
    with capture_logs() as logs:
        async with rig(plane=plane, poll_interval_s=0.01):
            plane.down = False
            await until(lambda: "control_plane_available" in [line["event"] for line in logs])
            plane.down = True
            await until(lambda: [line["event"] for line in logs].count("control_plane_unavailable") == 2)
    hints = [line.get("hint") for line in logs if line["event"] == "control_plane_unavailable"]
    assert "gRPC port of kvplane serve" in str(hints[0])
    assert hints[1] is None
