"""The end of an engine's stream, however it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvplane.controlplane import model as m
from kvplane.v1 import engine_pb2
from tests.controlplane.harness import Rig


async def test_a_lost_stream_counts_at_once_even_if_its_reader_cannot_be_stopped(rig: Rig) -> None:
    """Seen with a killed engine: the handler was cancelled while it waited for its reader, and nothing after
    that wait happened; the engine's locations were offered for the rest of its lease.
    """
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    let_go = asyncio.Event()

    async def requests() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=engine.engine_epoch)
        yield engine_pb2.AttachEngineRequest(sequence=1, hello=hello)
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    attached = asyncio.Event()

    async def serve() -> None:
        async for _ in rig.plane.attachments.serve(requests()):
            attached.set()

    handler = asyncio.create_task(serve())
    await attached.wait()
    assert isinstance(await rig.lookup(), m.Found)
    handler.cancel()
    await rig.clock.advance(0)
    assert await rig.lookup() is m.MissReason.ENGINE_GONE
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await handler
