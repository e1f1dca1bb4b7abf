"""What the control plane's metrics say after things have happened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvplane.client import model as cm
from kvplane.client.errors import ControlPlaneError
from kvplane.controlplane.meter import OPERATIONS, STREAMS, UNARY
from kvplane.controlplane.metrics import METRICS, PREFIX, ControlPlaneMetrics, Kind
from kvplane.controlplane.tally import CallTally
from kvplane.store.testing import settle
from kvplane.v1 import engine_pb2, location_pb2, status_pb2
from tests.controlplane.harness import PARAMS
from tests.controlplane.wire import KEY, SPEC, Stream, Wire, announcement, wire_begin, wire_key


class Seen:
    """A control plane that is looked at."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        assert wire.meter is not None
        self.metrics = ControlPlaneMetrics(CollectorRegistry(), wire.server.plane, wire.meter, store="memory")

    async def page(self) -> dict[str, dict[tuple[str, ...], float]]:
        text = (await self.metrics.page()).decode()
        values: dict[str, dict[tuple[str, ...], float]] = {}
        labels = {metric.name: (*metric.labels, "le") for metric in METRICS}
        for family in text_string_to_metric_families(text):
            names = labels[family.name.removeprefix(PREFIX)]
            for sample in family.samples:
                at = tuple(sample.labels[name] for name in names if name in sample.labels)
                values.setdefault(sample.name, {})[at] = sample.value
        return values

    async def value(self, name: str, *labels: str) -> float:
        return (await self.page())[PREFIX + name][labels]


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    wire = Wire(metered=True)
    await wire.start()
    yield Seen(wire)
    await wire.stop()


async def registered(seen: Seen) -> int:
    return (await seen.wire.client.register_engine(SPEC)).engine_epoch


def test_every_method_and_operation_of_the_api_is_counted() -> None:
    unary, streams = set[str](), set[str]()
    for file in (engine_pb2, location_pb2, status_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                is_stream = method.client_streaming or method.server_streaming
                (streams if is_stream else unary).add(method.name)
    assert (set(UNARY), set(STREAMS)) == (unary, streams)
    kinds = location_pb2.TurnsOperation.DESCRIPTOR.oneofs_by_name["operation"].fields
    assert set(OPERATIONS) == {field.name for field in kinds}


async def test_a_plane_that_does_nothing_shows_every_count_at_zero(seen: Seen) -> None:
    page = await seen.page()
    for metric in METRICS:
        if metric.kind is Kind.COUNTER and not metric.labels:
            assert page[metric.full_name] == {(): 0.0}, metric.name
    assert page[PREFIX + "claims_total"]["hit",] == 0.0
    assert page[PREFIX + "rpcs_total"]["BeginTurn", "OK"] == 0.0
    assert page[PREFIX + "healthy"] == {(): 1.0}


async def test_rpcs_count_by_code_and_take_time_only_if_answered(seen: Seen) -> None:
    await seen.wire.call("BeginTurn", wire_begin())
    with pytest.raises(grpc.aio.AioRpcError):
        await seen.wire.call("BeginTurn", wire_begin(tenant_id=""))
    page = await seen.page()
    assert page[PREFIX + "rpcs_total"]["BeginTurn", "OK"] == 1
    assert page[PREFIX + "rpcs_total"]["BeginTurn", "INVALID_ARGUMENT"] == 1
    assert page[PREFIX + "refusals_total"]["INVALID_FIELD",] == 1
    assert page[PREFIX + "rpc_duration_seconds_count"]["BeginTurn",] == 1
    assert page[PREFIX + "rpcs_in_flight"]["BeginTurn",] == 0


async def test_a_location_that_is_read_has_saved_its_tokens(seen: Seen) -> None:
    wire = seen.wire
    epoch = await registered(seen)
    await wire.retain(epoch)
    assert await seen.value("retained_blocks", "d") == 4
    assert await seen.value("tenant_retained_tokens", "t") == 100
    await wire.clock.advance(2.0)
    assert isinstance(await wire.client.claim_location(KEY, "claim", "r"), cm.Claim)
    assert await seen.value("claims_open") == 1
    assert await seen.value("retained_blocks", "d") == 0
    await wire.clock.advance(3.0)
    stream = Stream(wire)
    stream.hello(epoch)
    stream.send(freed=[engine_pb2.Freed(request_id="q1")])
    await stream.until(lambda answer: answer.acknowledged_sequence == 2)
    page = await seen.page()
    assert page[PREFIX + "saved_tokens_total"] == {("d",): 100}
    assert page[PREFIX + "tenant_saved_tokens_total"] == {("t",): 100}
    assert page[PREFIX + "retained_block_seconds_total"]["d",] == pytest.approx(4 * 5.0)
    assert page[PREFIX + "claims_ended_total"]["read",] == 1
    assert page[PREFIX + "claims_open"][()] == 0
    assert page[PREFIX + "claim_age_seconds_sum"][()] == pytest.approx(3.0)
    assert page[PREFIX + "locations_ended_total"]["claimed",] == 1
    assert page[PREFIX + "engine_streams"][()] == 1
    assert page[PREFIX + "rpcs_in_flight"]["AttachEngine",] == 1
    stream.end()


async def test_a_claim_that_is_finished_has_saved_its_tokens_and_one_that_times_out_nothing(
    seen: Seen,
) -> None:
    wire = seen.wire
    epoch = await registered(seen)
    await wire.retain(epoch)
    await wire.client.claim_location(KEY, "one", "r")
    await wire.client.finish_claim("one", "r")
    await wire.retain(epoch, "q2")
    await wire.client.claim_location(KEY, "two", "r")
    for _ in range(8):
        await wire.clock.advance(6.0)
        await wire.client.renew_engine(SPEC.engine_id, epoch)
    page = await seen.page()
    assert page[PREFIX + "claims_ended_total"]["finished",] == 1
    assert page[PREFIX + "claims_ended_total"]["timed_out",] == 1
    assert page[PREFIX + "saved_tokens_total"] == {("d",): 100}


async def test_lookups_turns_and_claims_say_why_there_was_nothing(seen: Seen) -> None:
    wire = seen.wire
    epoch = await registered(seen)
    assert await wire.client.lookup_location(KEY) == "unknown_conversation"
    await wire.retain(epoch)
    await wire.client.lookup_location(KEY)
    await wire.client.claim_location(KEY, "one", "r")
    await wire.client.claim_location(KEY, "two", "r")
    page = await seen.page()
    assert page[PREFIX + "lookups_total"]["unknown_conversation",] == 1
    assert page[PREFIX + "lookups_total"]["hit",] == 1
    assert page[PREFIX + "turns_total"]["unknown_conversation",] == 1
    assert page[PREFIX + "claims_total"]["hit",] == 1
    assert page[PREFIX + "claims_total"]["claimed",] == 1


async def test_how_a_location_ends_is_told_apart(seen: Seen) -> None:
    wire = seen.wire
    epoch = await registered(seen)
    other = cm.EngineSpec(cm.EngineId("e"), cm.EngineRole.DECODE, SPEC.profile)
    other_epoch = (await wire.client.register_engine(other)).engine_epoch
    await wire.retain(epoch, "q1")
    await wire.retain(epoch, "q2")
    turn = (await wire.client.begin_turn(KEY, "begin")).turn
    params = PARAMS.replace(b'"remote_engine_id": "d"', b'"remote_engine_id": "e"')
    elsewhere = replace(announcement("q3", turn), kv_transfer_params=params)
    await wire.client.announce_location(other.engine_id, other_epoch, elsewhere)
    await wire.client.withdraw_location(other.engine_id, other_epoch, cm.RequestId("q3"))
    await wire.retain(epoch, "q4")
    await wire.client.end_conversation(KEY)
    page = await seen.page()
    ended = page[PREFIX + "locations_ended_total"]
    assert ended["continued",] == ended["superseded",] == ended["withdrawn",] == 1
    assert ended["conversation_ended",] == 1
    assert page[PREFIX + "locations_ended_tokens_total"]["withdrawn",] == 100
    assert page[PREFIX + "announcements_total"]["accepted",] == 4
    assert page[PREFIX + "releases_total"]["released",] == 2


async def test_an_engine_that_goes_takes_what_it_held_with_it(seen: Seen) -> None:
    wire = seen.wire
    epoch = await registered(seen)
    await wire.retain(epoch)
    await wire.client.renew_engine(SPEC.engine_id, epoch, cm.EngineLoad(free_blocks=7))
    page = await seen.page()
    assert page[PREFIX + "engines"] == {("decode", "unary"): 1}
    assert page[PREFIX + "engine_free_blocks"] == {("d",): 7}
    await wire.clock.advance(11.0)
    page = await seen.page()
    assert page[PREFIX + "engines_gone_total"][()] == 1
    assert page[PREFIX + "locations_ended_total"]["engine_gone",] == 1
    assert page[PREFIX + "retained_conversations"] == {("d",): 0}
    assert PREFIX + "engine_free_blocks" not in page


async def test_operations_of_a_stream_count_like_calls(seen: Seen) -> None:
    operations = [
        location_pb2.TurnsOperation(id=1, begin_turn=wire_begin()),
        location_pb2.TurnsOperation(id=2, lookup=location_pb2.LookupLocationRequest(key=wire_key())),
        location_pb2.TurnsOperation(id=3, lookup=location_pb2.LookupLocationRequest()),
    ]
    call: Any = seen.wire.client.open_turns()
    await call.write(location_pb2.TurnsRequest(operations=operations))
    await call.done_writing()
    assert sum([len(answer.results) async for answer in call]) == 3
    page = await seen.page()
    assert page[PREFIX + "operations_total"]["begin_turn", "OK"] == 1
    assert page[PREFIX + "operations_total"]["lookup", "INVALID_ARGUMENT"] == 1
    assert (PREFIX + "operation_duration_seconds_count") not in page  # one in eight is timed
    assert page[PREFIX + "operations_in_flight"]["lookup",] == 0
    assert page[PREFIX + "rpcs_total"]["Turns", "OK"] == 1
    assert (PREFIX + "rpc_duration_seconds_count") not in page


def test_of_so_many_one_is_timed_and_all_are_counted() -> None:
    times = iter(range(100))
    calls = CallTally(lambda: float(next(times)), every=3)
    for _ in range(7):
        calls.done(calls.begin())
    assert calls.took is not None
    assert (calls.codes["OK"], sum(calls.took.counts), calls.took.sum_s, calls.in_flight) == (7, 2, 2.0, 0)


async def test_a_store_that_is_away_is_seen(seen: Seen) -> None:
    wire = seen.wire
    wire.store.set_unavailable(True)
    with pytest.raises(ControlPlaneError):
        await wire.client.begin_turn(KEY, "r")
    await wire.clock.advance(1.0)
    await settle()
    page = await seen.page()
    assert page[PREFIX + "healthy"] == {(): 0.0}
    assert page[PREFIX + "refusals_total"]["STORE_UNAVAILABLE",] >= 1


async def test_names_keep_to_practice() -> None:
    for metric in METRICS:
        assert metric.text.endswith(".")
        assert (metric.kind is Kind.HISTOGRAM) == metric.name.endswith(("duration_seconds", "age_seconds")), (
            metric.name
        )
        assert not metric.name.endswith(("_total", "_ms", "_count", "_sum", "_bucket")), metric.name
