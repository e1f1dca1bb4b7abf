"""Each metric of each part moves when what it is about happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from prometheus_client import CollectorRegistry

from deploy.grafana.catalogue import catalogue
from kvplane.client import model as cm
from kvplane.connector.metrics import METRICS
from kvplane.controlplane import model as m
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.metrics import ControlPlaneMetrics
from kvplane.router.admission import AdmissionLimits
from kvplane.router.health import HealthLimits
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from kvplane.v1 import engine_pb2, location_pb2
from tests.connector.test_metrics import Engine
from tests.controlplane.harness import SharedStore, announcement, key, replica
from tests.controlplane.wire import KEY, SPEC, Stream, Wire, wire_begin, wire_key
from tests.fakes import kv
from tests.fakes.core import EngineConfig
from tests.router.rig import CHAT, Rig, chat, long_text, rig, until
from tests.router.tenants import write
from tests.sight.moving import Watcher

CANNOT = {
    "kvplane_controlplane_build_info": "It says what runs, which does not change while it runs.",
    "kvplane_router_build_info": "Likewise.",
}
"""Metrics that never move, and why."""


def of(part: str) -> set[str]:
    return {metric.name for metric in catalogue().values() if metric.part == part} - set(CANNOT)


async def over_a_store_of_its_own() -> set[str]:
    """Have everything happen to a control plane that one store serves alone."""
    wire = Wire(metered=True, settings=m.Settings(max_conversations=3))
    await wire.start()
    assert wire.meter is not None
    metrics = ControlPlaneMetrics(CollectorRegistry(), wire.server.plane, wire.meter, store="memory")

    async def page() -> str:
        return (await metrics.page()).decode()

    watcher, client, clock = Watcher(await page()), wire.client, wire.clock
    spec = cm.EngineSpec(SPEC.engine_id, SPEC.role, SPEC.profile, total_blocks=100)
    epoch = (await client.register_engine(spec)).engine_epoch
    stream = Stream(wire)
    stream.hello(epoch)
    load = engine_pb2.EngineLoad(
        free_blocks=7, retained_blocks=8, running_requests=9, waiting_requests=10, retained_conversations=1
    )
    stream.send(load=load)
    await stream.until(lambda answer: answer.acknowledged_sequence == 2)
    await client.lookup_location(KEY)
    await wire.retain(epoch)
    await client.touch_conversation(KEY, 450.0)
    await client.renew_locations(SPEC.engine_id, epoch, {cm.RequestId("q1"): 300.0})
    watcher.look(await page())
    await clock.advance(1.0)
    await client.claim_location(KEY, "claim", "r")
    watcher.look(await page())
    await clock.advance(1.0)
    stream.send(freed=[engine_pb2.Freed(request_id="q1")])
    await stream.until(lambda answer: answer.acknowledged_sequence == 3)
    await wire.retain(epoch, "q2")
    await client.end_conversation(KEY)
    await stream.until(lambda answer: len(answer.release_orders) > 0)
    with pytest.raises(grpc.aio.AioRpcError):
        await wire.call("BeginTurn", wire_begin(tenant_id=""))
    call: Any = client.open_turns()
    lookup = location_pb2.LookupLocationRequest(key=wire_key())
    operations = [location_pb2.TurnsOperation(id=number, lookup=lookup) for number in range(1, 9)]
    await call.write(location_pb2.TurnsRequest(operations=operations))
    await call.read()
    gate = wire.store.hold_next("transact")
    await call.write(
        location_pb2.TurnsRequest(operations=[location_pb2.TurnsOperation(id=9, begin_turn=wire_begin())])
    )
    await gate.reached()
    watcher.look(await page())
    gate.release()
    await call.read()
    await call.done_writing()
    for number in range(5):
        await client.begin_turn(cm.ConversationKey("t", "m", f"more-{number}"), f"r{number}")
    await clock.advance(1.0)
    watcher.look(await page())
    await wire.retain(epoch, "q3")
    wire.store.set_unavailable(True)
    await clock.advance(500.0)
    await settle()
    watcher.look(await page())
    wire.store.set_unavailable(False)
    stream.end()
    await clock.advance(20.0)
    watcher.look(await page())
    await wire.stop()
    return watcher.moved


async def over_a_shared_store() -> set[str]:
    """Have happen what takes a second replica and a store elsewhere."""
    clock = ManualClock()
    async with MemoryStore(clock) as inner:
        ours, theirs = SharedStore(inner), SharedStore(inner)
        meter = Meter(clock)
        async with replica(meter.instrument(ours), clock, meter=meter) as plane:
            metrics = ControlPlaneMetrics(CollectorRegistry(), plane, meter, store="etcd")
            watcher = Watcher((await metrics.page()).decode())
            while plane.replicas.rank() == 0:  # names are random: until another is before it
                async with replica(theirs, clock) as other:
                    await clock.advance(1.0)
                    engine = await other.engines.register(m.EngineSpec("d", m.EngineRole.DECODE))
                    ours.watching.clear()
                    turn = (await other.turns.begin(key(), f"a{clock.now_ms()}", 0.0)).turn
                    await other.locations.announce("d", engine.engine_epoch, announcement(f"q{turn}", turn))
                    await plane.turns.begin(key(), f"b{clock.now_ms()}", 0.0)
                    await clock.advance(1.0)
                    watcher.look((await metrics.page()).decode())
                    ours.watching.set()
                    await clock.advance(1.0)
                    watcher.look((await metrics.page()).decode())
                    if plane.replicas.rank():
                        return watcher.moved
                await clock.advance(10.0)
    return watcher.moved


async def through_a_router() -> set[str]:
    """Have everything happen to a router, with engines that misbehave."""
    engines = [
        EngineConfig(cm.EngineRole.PREFILL, prefix_caching=False, prefill_s_per_token=0.0001),
        EngineConfig(cm.EngineRole.DECODE),
    ]
    admission = AdmissionLimits(max_engine_requests=1, max_queued=1, queue_timeout_s=5.0)
    health = HealthLimits(consecutive_failures=2, ejection_s=30.0, slow_start_s=0)
    async with rig(prefill=engines[:1], decode=engines[1:] * 2, admission=admission, health=health) as r:

        async def page() -> str:
            return (await r.router.metrics_page()).decode()

        watcher = Watcher(await page())
        for number in range(4):
            text = long_text(600, f"w{number}")
            await r.say(text, f"c{number}", path="cold")
            await r.say("more", f"c{number}", path="pull")
            await r.say("and more", f"c{number}", path="direct")
        async with r.http.post(r.url + CHAT, json=chat("x", stream=True)) as response:
            await response.read()
        watcher.look(await page())
        await what_goes_wrong(r, watcher)
    return watcher.moved


async def with_tenants(folder: Path) -> set[str]:
    """Have a router turn away who says no name."""
    async with rig(tenants_file=await asyncio.to_thread(write, folder, "")) as r:
        watcher = Watcher((await r.router.metrics_page()).decode())
        await r.post(chat("x"))
        watcher.look((await r.router.metrics_page()).decode())
    return watcher.moved


async def what_goes_wrong(r: Rig, watcher: Watcher) -> None:
    """Have engines fail, clients go, requests queue and the control plane be away."""

    async def look() -> None:
        watcher.look((await r.router.metrics_page()).decode())

    await r.post(chat(long_text(100) + " " + kv.STOP_WORD, conversation="ends"))
    r.p.faults.append("500")
    await r.say("again", "retried")
    r.p.gate.clear()
    computed = asyncio.create_task(r.post(chat(long_text(600), conversation="long")))
    await until(lambda: any(engine.ahead_tokens for engine in r.router.pool.engines))
    await look()
    r.p.gate.set()
    assert (await computed).status == 200
    for engine in r.decode:
        engine.gate.clear()
    async with aiohttp.ClientSession() as leaving:
        response = await leaving.post(r.url + CHAT, json=chat("x", conversation="gone", stream=True))
        await response.content.readany()
        response.close()
    await until(lambda: any(engine.aborted for engine in r.decode))
    await until(lambda: r.router._admission.requests == 0)
    posts = []
    for number in range(len(r.decode)):
        posts.append(asyncio.create_task(r.post(chat("x", conversation=f"q{number}"))))
        await until(lambda: sum(held.outstanding for held in r.router.pool.decode_engines()) == len(posts))
    posts.append(asyncio.create_task(r.post(chat("x", conversation="waits"))))
    await until(lambda: r.router._admission.queued)
    assert (await r.post(chat("x", conversation="refused"))).status == 429
    await look()
    for engine in r.decode:
        engine.gate.set()
    assert [answer.status for answer in await asyncio.gather(*posts)] == [200] * len(posts)
    r.d.faults += ["500"] * 8
    number = 0
    while not any(r.router.pool.ejected(engine) for engine in r.router.pool.engines):
        await r.post(chat("x", conversation=f"f{number}"))
        number += 1
        assert number < 40
    await look()
    r.plane.down = True
    for number in range(3):
        await r.post(chat("x", conversation=f"d{number}"))
    await r.p.stop()
    await r.post(chat("x", conversation="last"))
    await look()


async def test_every_metric_of_the_control_plane_moves() -> None:
    moved = await over_a_store_of_its_own() | await over_a_shared_store()
    assert of("controlplane") - moved == set()


async def test_every_metric_of_the_router_moves(tmp_path: Path) -> None:
    moved = await through_a_router() | await with_tenants(tmp_path)
    assert of("router") - moved == set()


def test_every_metric_of_the_connector_moves() -> None:
    engine = Engine()
    before = engine.values()
    engine.live()
    engine.keeper.retention.budget = 60
    after = engine.values()
    moved = {key[0] for key in after if after[key] != before.get(key, 0.0)}
    names = {metric.full_name for metric in METRICS if metric.name in moved}
    assert of("connector") - names == set()


def test_what_cannot_move_exists() -> None:
    assert set(CANNOT) <= set(catalogue())
