"""What the router's log says of a control plane that is away."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvplane.client.errors import ControlPlaneError, ControlPlaneUnavailableError
from tests.fakes.plane import FakePlane
from tests.router.rig import chat, rig, until


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


async def test_what_says_why_it_cannot_answer_is_a_control_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    async def without_store() -> Any:
        raise ControlPlaneUnavailableError("no endpoint of etcd answers", reason="STORE_UNAVAILABLE")

    plane = FakePlane()
    monkeypatch.setattr(plane, "list_engines", without_store)
    with capture_logs() as logs:
        async with rig(plane=plane, poll_interval_s=0.01):
            await until(lambda: "control_plane_unavailable" in [line["event"] for line in logs])
    (line,) = [line for line in logs if line["event"] == "control_plane_unavailable"]
    assert "no endpoint of etcd answers" in line["problem"]
    assert "hint" not in line


async def test_one_that_is_slow_may_wait_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = grpc.aio.Metadata()
    over = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "Deadline Exceeded")

    async def late() -> Any:
        raise ControlPlaneUnavailableError("Deadline Exceeded") from over

    plane = FakePlane()
    monkeypatch.setattr(plane, "list_engines", late)
    with capture_logs() as logs:
        async with rig(plane=plane, poll_interval_s=0.01):
            await until(lambda: "control_plane_unavailable" in [line["event"] for line in logs])
    (line,) = [line for line in logs if line["event"] == "control_plane_unavailable"]
    assert "it may wait for its store" in line["hint"]


async def test_a_crowd_for_one_conversation_is_no_plane_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def contended(*args: Any, **more: Any) -> Any:
        raise ControlPlaneError("sixteen lost races in a row", reason="CONTENTION")

    plane = FakePlane()
    async with rig(plane=plane) as r:
        with monkeypatch.context() as patched:
            patched.setattr(plane, "begin_turn", contended)
            replies = [await r.post(chat("hello")) for _ in range(10)]
        assert {(reply.status, reply.reason) for reply in replies} == {(200, "plane_unavailable")}
        # Others are served as ever.
        assert (await r.post(chat("hello", conversation="c2"))).reason == "unknown_conversation"
        counted = r.router.metrics.registry.get_sample_value
        labels = {"call": "begin_turn", "outcome": "contended"}
        assert counted("kvplane_router_plane_calls_total", labels) == 10
