"""A tenant that asks the control plane for more than it may is served, cold, and told why."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.router.rig import chat, long_text, rig


async def test_requests_beyond_the_quota_are_served_cold_and_the_plane_stays_up() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        r.plane.limited = True
        with capture_logs() as logs:
            for _ in range(5):
                reply = await r.say("next")
                assert (reply.status, reply.path, reply.reason) == (200, "cold", "quota")
        assert "kvplane" not in r.d.requests[-1]["kv_transfer_params"]  # no number, so nothing is retained
        assert [line["event"] for line in logs if line["event"].startswith("control_plane")] == []
        assert (await r.metric("kvplane_router_plane_up"))[""] == 1
        r.plane.limited = False
        assert (await r.say("back")).path == "direct"


async def test_a_claim_beyond_the_quota_is_a_lost_one() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        original = r.plane.claim_location

        async def limited(*args: object, **more: object) -> object:
            r.plane.limited = True
            try:
                return await original(*args, **more)  # type: ignore[arg-type]
            finally:
                r.plane.limited = False

        r.plane.claim_location = limited  # type: ignore[method-assign, assignment]
        reply = await r.say("next", path="pull")
        assert (reply.status, reply.path, reply.reason) == (200, "cold", "quota")


async def test_a_conversation_told_by_its_messages_is_not_ended_for_want_of_an_answer() -> None:
    async with rig(identity_sources=("automatic",)) as r:
        body = chat(long_text(200), conversation=None)
        await r.post(body)
        r.plane.limited = True
        ended = list(r.plane.ended)
        reply = await r.post(chat(long_text(200), "reply", "next", conversation=None))
        assert (reply.status, reply.reason) == (200, "quota")
        assert r.plane.ended == ended
