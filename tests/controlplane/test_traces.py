"""The control plane's work under the trace of whoever asks, over streams and calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog
from structlog.typing import EventDict

from kvplane.client.errors import ControlPlaneUnavailableError, InvalidFieldError
from kvplane.client.model import ConversationKey
from kvplane.client.turns import TurnsStream
from kvplane.tracing.context import CURRENT, Span, Tracer
from tests.controlplane.wire import KEY, Wire
from tests.tracing.recorded import Recorded, recording

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording("plane") as made:
        yield made


@asynccontextmanager
async def serving(tracer: Tracer | None = None) -> AsyncIterator[Wire]:
    wire = Wire(tracer=tracer)
    await wire.start()
    try:
        yield wire
    finally:
        CURRENT.set(None)
        wire.store.set_unavailable(False)
        await wire.stop()


async def test_calls_and_operations_of_a_trace_are_spans_of_it_and_others_are_none(
    recorded: Recorded,
) -> None:
    async with serving(recorded.tracer) as wire, TurnsStream(wire.client.open_turns) as stream:
        await stream.begin_turn(KEY, "b0")
        await wire.client.begin_turn(KEY, "b1", wait_s=0.0)
        assert recorded.spans.get_finished_spans() == ()
        CURRENT.set(Span(GIVEN))
        await stream.lookup_location(KEY)
        await wire.client.begin_turn(KEY, "b2", wait_s=0.0)
        for ask in (stream.begin_turn, wire.client.begin_turn):
            with pytest.raises(InvalidFieldError):
                await ask(ConversationKey("t", "", "c"), "b3")
        CURRENT.set(None)
        await stream.lookup_location(KEY)
    done = recorded.spans.get_finished_spans()
    assert [span.name for span in done] == [
        "LocationService/Turns lookup",
        "store.transact",
        "LocationService/BeginTurn",
        "LocationService/Turns begin_turn",
        "LocationService/BeginTurn",
    ]
    assert {f"{span.context.trace_id:032x}" for span in done if span.context is not None} == {TRACE}
    assert [span.status.is_ok for span in done] == [True, True, True, True, False]
    assert done[3].attributes is not None
    assert done[3].attributes["kvplane.problem"] == "InvalidFieldError"


async def test_what_is_no_trace_is_passed_over() -> None:
    async with serving() as wire, TurnsStream(wire.client.open_turns) as stream:
        CURRENT.set(Span("nonsense"))
        assert (await stream.begin_turn(KEY, "b0")).turn
        assert (await wire.client.begin_turn(KEY, "b1", wait_s=0.0)).turn


async def test_a_refusal_is_logged_under_its_trace() -> None:
    seen = list[str]()

    def noted(logger: object, method: str, event: EventDict) -> EventDict:
        span = CURRENT.get()
        if event["event"] in ("rpc_refused", "rpc_failed"):
            seen.append(span.trace_id if span is not None else "")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[noted])
    try:
        async with serving() as wire:
            wire.store.set_unavailable(True)
            CURRENT.set(Span(GIVEN))
            with pytest.raises(ControlPlaneUnavailableError):
                await wire.client.begin_turn(KEY, "b1")
    finally:
        structlog.configure(**before)
    assert seen == [TRACE]
