"""A call that was given up, and comes to pass later: its caller has done it again elsewhere, and gone on."""

from __future__ import annotations

from kvplane.controlplane import model as m
from tests.controlplane.harness import announcement, running


async def test_a_late_duplicate_of_an_announcement_revives_nothing_that_was_withdrawn() -> None:
    """By unary calls: announced without an answer, announced again, withdrawn, freed; then the first arrives.

    The stream's number guards engines that attach against it; see SUPERSEDED in the protos for what is due.
    """
    async with running() as rig:
        engine = await rig.engine()
        value = announcement("q", await rig.begin("b"))
        assert (await rig.announce(engine, value)).outcome is m.AnnounceOutcome.ACCEPTED
        holder = m.Holder("d", engine.engine_epoch, "q")
        assert await rig.plane.releases.withdraw(holder) is m.ReleaseOutcome.RELEASED
        late = await rig.announce(engine, value)
        assert late.outcome is m.AnnounceOutcome.SUPERSEDED
        assert isinstance(await rig.claim(), m.MissReason)


async def test_nor_anything_that_expired_and_was_freed() -> None:
    async with running() as rig:
        engine = await rig.engine()
        value = announcement("q", await rig.begin("b"), ttl_s=15)
        assert (await rig.announce(engine, value)).outcome is m.AnnounceOutcome.ACCEPTED
        await rig.keep_alive(engine, 16.0)
        await rig.plane.releases.freed(m.Holder("d", engine.engine_epoch, "q"))
        assert await rig.orders(engine) == {}
        late = await rig.announce(engine, value)
        assert late.outcome is m.AnnounceOutcome.SUPERSEDED
        assert isinstance(await rig.claim(), m.MissReason)
