"""What a replica says of itself, of its store, and of the engines it knows."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from deploy.rig.etcd import EtcdServer
from kvplane.client import model as cm
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import InvalidFieldError
from kvplane.controlplane.model import Settings
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.url import open_store
from kvplane.v1 import engine_pb2
from tests.controlplane.wire import KEY, SPEC, Wire, announcement


async def test_a_replica_tells_its_settings_and_how_its_store_does(wire: Wire) -> None:
    status = await wire.client.get_status()
    assert status.serving
    assert status.replica_id
    assert status.version
    assert status.settings == cm.PlaneSettings(480.0, 10.0, 30.0, 10.0, 10.0, 2.0, 1_000_000)
    assert not status.store.shared
    assert status.store.latency_s == 0.0  # by the manual clock
    assert status.store.staleness_s == 0.0
    assert status.store.trouble == ""
    assert status.fleet_time_s == status.clock_time_s
    await wire.clock.advance(12.5)
    assert (await wire.client.get_status()).uptime_s == status.uptime_s + 12.5


async def test_it_answers_while_its_store_does_not(wire: Wire) -> None:
    wire.store.set_unavailable(True)
    status = await wire.client.get_status()
    assert status.store.latency_s is None
    assert status.store.trouble


async def test_a_clock_that_was_stepped_is_told() -> None:
    class Stepped(SystemClock):
        def machine_ms(self) -> int:
            return super().machine_ms() + 90_000

    clock = Stepped()
    async with open_store("memory://", clock) as store, ControlPlaneServer(store, clock) as server:
        port = await server.start("127.0.0.1:0")
        async with ControlPlaneClient(f"127.0.0.1:{port}") as client:
            status = await client.get_status()
    assert 89 < status.clock_time_s - status.fleet_time_s < 91


async def test_replicas_of_one_etcd_know_each_other(etcd_server: EtcdServer) -> None:
    clock, url = SystemClock(), f"etcd://{etcd_server.endpoint}/status-test"
    settings = Settings(max_staleness_s=0.8)
    async with (
        open_store(url, clock) as store_a,
        open_store(url, clock) as store_b,
        ControlPlaneServer(store_a, clock, settings) as one,
        ControlPlaneServer(store_b, clock, settings) as other,
    ):
        await one.start("127.0.0.1:0")
        port = await other.start("127.0.0.1:0")
        async with ControlPlaneClient(f"127.0.0.1:{port}", timeout_s=10) as client:
            async with asyncio.timeout(120):
                while len((status := await client.get_status()).replicas) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    assert status.store.shared
    assert status.store.latency_s is not None
    assert status.store.version.startswith("etcd 3.")
    assert status.store.size_bytes > 0
    assert {replica.version for replica in status.replicas} == {status.version}
    assert status.replica_id in {replica.replica_id for replica in status.replicas}


async def test_what_an_engine_says_of_its_settings_comes_back(wire: Wire) -> None:
    settings = cm.EngineSettings(
        "kv_consumer", "0.1.0", "10.0.0.7", 5600, False, "fail", 60.0, 45.5, "recurrent_model", "ab"
    )
    spec = cm.EngineSpec(cm.EngineId("s"), cm.EngineRole.DECODE, settings=settings)
    await wire.client.register_engine(spec)
    await wire.client.register_engine(SPEC)
    plain, telling = await wire.client.list_engines()
    assert plain.spec.settings is None
    assert telling.spec == spec


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (engine_pb2.EngineSettings(kv_role="x" * 65), "kv_role"),
        (engine_pb2.EngineSettings(side_channel_host="x" * 257), "side_channel_host"),
        (engine_pb2.EngineSettings(side_channel_port=65_536), "side_channel_port"),
    ],
)
async def test_settings_have_limits(wire: Wire, settings: engine_pb2.EngineSettings, field: str) -> None:
    spec = engine_pb2.EngineSpec(engine_id="d", role=engine_pb2.ENGINE_ROLE_DECODE, settings=settings)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wire.call("RegisterEngine", engine_pb2.RegisterEngineRequest(spec=spec))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"spec.settings.{field}" in (refused.value.details() or "")


async def test_durations_that_no_engine_has_are_refused(wire: Wire) -> None:
    spec = engine_pb2.EngineSpec(engine_id="d", role=engine_pb2.ENGINE_ROLE_DECODE)
    spec.settings.max_ttl.seconds = -1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await wire.call("RegisterEngine", engine_pb2.RegisterEngineRequest(spec=spec))
    assert "spec.settings.max_ttl" in (refused.value.details() or "")


async def test_how_and_when_an_engine_was_heard_of(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.clock.advance(3)
    (engine,) = await wire.client.list_engines()
    assert engine.contact is cm.EngineContact.UNARY
    assert (engine.registered_s, engine.last_seen_s) == (3.0, 3.0)
    await wire.client.renew_engine(SPEC.engine_id, epoch)
    (engine,) = await wire.client.list_engines()
    assert (engine.registered_s, engine.last_seen_s) == (3.0, 0.0)


async def test_engines_that_are_gone_are_listed_if_asked_for(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.client.register_engine(cm.EngineSpec(cm.EngineId("e"), cm.EngineRole.PREFILL))
    await wire.client.deregister_engine(SPEC.engine_id, epoch)
    assert [engine.spec.engine_id for engine in await wire.client.list_engines()] == ["e"]
    gone, live = await wire.client.list_engines(include_gone=True)
    assert (gone.spec.engine_id, gone.engine_epoch, gone.contact) == ("d", epoch, cm.EngineContact.GONE)
    assert (live.spec.engine_id, live.contact) == ("e", cm.EngineContact.UNARY)
    first = await wire.call("ListEngines", engine_pb2.ListEnginesRequest(page_size=1, include_gone=True))
    assert [engine.spec.engine_id for engine in first.engines] == ["d"]
    rest = engine_pb2.ListEnginesRequest(page_token=first.next_page_token, include_gone=True)
    assert [e.spec.engine_id for e in (await wire.call("ListEngines", rest)).engines] == ["e"]


async def test_what_engines_hold_is_counted_if_asked_for(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    other = cm.ConversationKey("t", "m", "other")
    turn = await wire.retain(epoch)
    await wire.retain(epoch, "q2", other)
    (engine,) = await wire.client.list_engines()
    assert engine.holdings is None
    assert engine.announcements == 2
    (engine,) = await wire.client.list_engines(with_holdings=True)
    assert engine.holdings == cm.EngineHoldings(2, 200, 8, 0)
    await wire.client.claim_location(KEY, "claim", "router", turn=turn)
    (engine,) = await wire.client.list_engines(with_holdings=True)
    assert engine.holdings == cm.EngineHoldings(2, 200, 8, 0)  # counted a moment ago
    await wire.clock.advance(1)
    (engine,) = await wire.client.list_engines(with_holdings=True)
    assert engine.holdings == cm.EngineHoldings(1, 100, 4, 1)


async def test_a_late_turn_is_no_announcement(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    old = (await wire.client.begin_turn(KEY, "old")).turn
    new = (await wire.client.begin_turn(KEY, "new", wait_s=0)).turn
    await wire.client.announce_location(SPEC.engine_id, epoch, announcement("new", new))
    await wire.client.announce_location(SPEC.engine_id, epoch, announcement("late", old))
    (engine,) = await wire.client.list_engines()
    assert engine.announcements == 1


async def test_locations_are_listed_by_model_and_by_how_their_ids_begin(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    for number, (model, conversation) in enumerate([("m", "ab"), ("m", "a"), ("m", "b"), ("n", "ab")]):
        key = cm.ConversationKey("t", model, conversation)
        await wire.retain(epoch, f"q{number}", key)

    async def listed(**filters: str) -> list[tuple[str, str]]:
        locations, _ = await wire.client.list_locations(**filters)
        return sorted((found.key.model, found.key.conversation_id) for found in locations)

    assert await listed(model="n") == [("n", "ab")]
    assert await listed(conversation_prefix="a") == [("m", "a"), ("m", "ab"), ("n", "ab")]
    assert await listed(model="m", conversation_prefix="ab") == [("m", "ab")]
    with pytest.raises(InvalidFieldError):
        await listed(conversation_prefix="x" * 257)
    page = await wire.client.list_locations_page(page_size=3)
    rest = await wire.client.list_locations_page(page_size=3, page_token=page.next_page_token)
    assert (len(page.locations), len(rest.locations), rest.next_page_token) == (3, 1, "")
