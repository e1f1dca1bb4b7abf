"""One request, one trace: router, both engines' headers, control plane, store; with spans and without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from kvplane.cli.logs import with_trace
from kvplane.client.model import EngineRole
from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from kvplane.tracing.context import Tracer
from tests.controlplane.wire import Wire
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.router.rig import chat, expected_reply, long_text, until
from tests.tracing.recorded import Recorded, recording

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@dataclass
class Fleet:
    p: FakeEngine
    d: FakeEngine
    url: str
    http: aiohttp.ClientSession

    async def say(self, *turns: str, **headers: str) -> dict[str, str]:
        """Send a turn; returns the answer's headers."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        body = json.dumps(chat(*turns)).encode()
        async with self.http.post(f"{self.url}/v1/chat/completions", headers=sent, data=body) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
            return {name.lower(): value for name, value in reply.headers.items()}


@asynccontextmanager
async def fleet(router: Tracer | None = None, plane: Tracer | None = None) -> AsyncIterator[Fleet]:
    """A router, two engines and a control plane that speaks gRPC."""
    wire = Wire(tracer=plane)
    async with AsyncExitStack() as stack:
        await wire.start()
        stack.push_async_callback(wire.stop)
        p = FakeEngine(EngineConfig(EngineRole.PREFILL, prefix_caching=False), wire.client)
        d = FakeEngine(EngineConfig(EngineRole.DECODE), wire.client)
        for engine in (p, d):
            await stack.enter_async_context(engine)
        settings = RouterSettings(
            port=0, plane_address=wire.address, prefill_urls=(p.url,), decode_urls=(d.url,)
        )
        server = await stack.enter_async_context(RouterServer(settings, tracer=router))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(p, d, f"http://127.0.0.1:{server.port}", http)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording("router") as made:
        yield made


@pytest.fixture
def plane_recorded() -> Iterator[Recorded]:
    with recording("plane") as made:
        yield made


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    found = [span for span in spans.get_finished_spans() if span.name == name]
    assert len(found) == 1, [span.name for span in spans.get_finished_spans()]
    return found[0]


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace, own id and parent's of a span."""
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def traceparents(engine: FakeEngine) -> list[str]:
    """What an engine was told last, by header, whatever its spelling."""
    return [value for name, value in engine.headers[-1].items() if name.lower() == "traceparent"]


async def test_a_request_is_one_trace_with_the_right_parents(
    recorded: Recorded, plane_recorded: Recorded
) -> None:
    router_spans, plane_spans = recorded.spans, plane_recorded.spans
    async with fleet(recorded.tracer, plane_recorded.tracer) as f:
        first = long_text(200)
        await f.say(first)
        router_spans.clear()
        plane_spans.clear()
        answer = await f.say(
            first,
            expected_reply(chat(first)),
            "next",
            Traceparent=GIVEN,
            x_kvplane_path="pull",
            x_request_id="r-1",
        )
        assert (answer["x-request-id"], answer["x-kvplane-path"]) == ("r-1", "pull")
        await until(lambda: any(span.name.startswith("POST") for span in router_spans.get_finished_spans()))
        root = named(router_spans, "POST /v1/chat/completions")
        trace, root_id, parent = ids(root)
        assert (trace, parent) == (TRACE, PARENT)
        assert root.attributes is not None
        assert root.attributes["kvplane.request_id"] == "r-1"
        assert root.attributes["kvplane.path"] == "pull"
        names = ("begin_turn", "claim_location", "prefill", "decode")
        legs = {name: ids(named(router_spans, name)) for name in names}
        assert {(trace, parent) for trace, _, parent in legs.values()} == {(TRACE, root_id)}
        for leg, engine in (("prefill", f.p), ("decode", f.d)):
            (told,) = traceparents(engine)
            assert told[:53] == f"00-{TRACE}-{legs[leg][1]}-"
        for leg, operation in (("begin_turn", "begin_turn"), ("claim_location", "claim")):
            trace, served, parent = ids(named(plane_spans, f"LocationService/Turns {operation}"))
            assert (trace, parent) == (TRACE, legs[leg][1])
            stored = [span.name for span in plane_spans.get_finished_spans() if ids(span)[2] == served]
            assert stored == ["store.transact"]


async def test_a_request_without_a_trace_begins_one_and_each_has_its_own(recorded: Recorded) -> None:
    async with fleet(recorded.tracer) as f:
        for number in range(3):
            await f.say(f"hello {number}")
    roots = [ids(span) for span in recorded.spans.get_finished_spans() if span.name.startswith("POST")]
    assert len({trace for trace, _, _ in roots}) == 3
    assert {parent for _, _, parent in roots} == {""}


async def test_an_unsampled_trace_is_passed_on_and_not_recorded(recorded: Recorded) -> None:
    async with fleet(recorded.tracer) as f:
        await f.say("hello", traceparent=f"00-{TRACE}-{PARENT}-00")
        (told,) = traceparents(f.d)
        assert (told[3:35], int(told[-2:], 16) & 1) == (TRACE, 0)
    assert recorded.spans.get_finished_spans() == ()


async def test_a_leg_that_fails_says_so(recorded: Recorded) -> None:
    async with fleet(recorded.tracer) as f:
        f.p.faults.append("500")
        await f.say("hello")
    legs = [span for span in recorded.spans.get_finished_spans() if span.name == "prefill"]
    assert not legs[0].status.is_ok
    assert legs[0].status.description == "LegFailedError"


async def test_without_spans_the_trace_goes_everywhere_all_the_same() -> None:
    async with fleet() as f:
        answer = await f.say("hello", traceparent=GIVEN, x_request_id="r-2")
        assert answer["x-request-id"] == "r-2"
        assert traceparents(f.p) == traceparents(f.d) == [GIVEN]
        await f.say("other", x_request_id="r-3")  # on the same connection, of no trace
        assert traceparents(f.d) == []
        await f.say("more", traceparent="nonsense")
        assert traceparents(f.d) == []


async def test_logs_say_of_which_trace() -> None:
    with capture_logs() as lines:
        structlog.get_config()["processors"].insert(0, with_trace)
        async with fleet() as f:
            await f.say("hello", traceparent=GIVEN, x_request_id="r-4")
            await f.say("other", x_request_id="r-5")
    served = {line["request_id"]: line for line in lines if line["event"] == "turn_served"}
    assert served["r-4"]["trace_id"] == TRACE
    assert len(served["r-5"]["trace_id"]) == 32
    assert served["r-5"]["trace_id"] != TRACE
    own = [line for line in lines if line["event"].startswith(("router_", "control_plane_"))]
    assert own
    assert not any("trace_id" in line for line in own)
