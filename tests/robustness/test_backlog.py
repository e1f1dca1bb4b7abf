"""A slow control plane gets fewer and larger messages, not a queue that never ends."""

from __future__ import annotations

import asyncio
import contextlib
import time

from kvplane.client.client import ControlPlaneClient
from kvplane.client.outbox import Outbox
from kvplane.client.session import EngineSession
from tests.fakes.attach import AttachPlane, until
from tests.robustness.fake_engines import announcement, spec

ANNOUNCED = 60
MOST_MESSAGES = 12


async def test_what_is_said_while_answers_are_awaited_goes_together() -> None:
    """Found by `clients_delayed`: with 50 ms a message, 25 announcements a second were more than one engine's
    stream could take; they waited ever longer, 10 s in the end, although a message may carry 1,024.
    """
    async with AttachPlane() as plane:
        outbox = Outbox(monotonic=time.monotonic)
        client = ControlPlaneClient(plane.address)
        session = EngineSession(client, spec("d"), outbox, lambda event: None, monotonic=time.monotonic)
        running = asyncio.create_task(session.run())
        await until(lambda: session.attached)
        plane.acknowledging.clear()
        before = session._sequence
        for number in range(ANNOUNCED):
            outbox.announce(
                announcement("d", f"c{number}", f"q{number}", number + 1), expires_at=time.monotonic() + 60
            )
            session.wake()
            await asyncio.sleep(0.005)
        plane.acknowledging.set()
        await until(lambda: len(plane.announced()) == ANNOUNCED)
        assert session._sequence - before <= MOST_MESSAGES
        await session.aclose()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
