"""Records that another hand wrote: no other tenant's are told, none fails a call, lists go on after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.eager import SLICE, Start, gather, now
from kvplane.controlplane.engine_service import EngineServicer
from kvplane.controlplane.records import UnreadableRecordError
from kvplane.store.base import Put
from kvplane.v1 import engine_pb2, location_pb2
from tests.controlplane.harness import Rig, key, running

MINE, OTHERS = key("mine", tenant_id="t1"), key("others", tenant_id="t2")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig


async def forged(rig: Rig, **members: object) -> m.Location:
    """Put a location of one tenant where one of another tenant's belongs; returns it."""
    await rig.retain(await rig.engine(), "q", OTHERS)
    found = await rig.lookup(OTHERS)
    assert isinstance(found, m.Found)
    location = changed(found.location, **members)
    await rig.store.transact([], [Put(keys.location(MINE), records.dump_location(location))])
    return location


async def test_another_tenants_location_is_not_told_whatever_its_key() -> None:
    async with running() as rig:
        await forged(rig)
        assert await rig.lookup(MINE) is m.MissReason.UNKNOWN_CONVERSATION
        assert await rig.claim(conversation=MINE) is m.MissReason.UNKNOWN_CONVERSATION
        found, _, _ = await rig.plane.locations.list(after=b"", limit=10, tenant_id="", engine_id="")
        assert [item.location.key for item, _ in found] == [OTHERS]
        request = location_pb2.WatchLocationsRequest(from_revision=1, tenant_id="t1")
        watched: Any = rig.plane.location_servicer.WatchLocations(request, None)
        assert not (await asyncio.wait_for(anext(watched), 60)).events
        await watched.aclose()


async def test_a_location_of_an_impossible_epoch_is_overwritten() -> None:
    async with running() as rig:
        await forged(rig, key=MINE, holder=m.Holder("d", -1, "q"))
        await rig.retain(await rig.engine(), "new", MINE)
        assert isinstance(await rig.lookup(MINE), m.Found)


@pytest.mark.parametrize("name", ["turn", "token_count", "block_count", "deadline_ms", "wanted_until_ms"])
async def test_impossible_numbers_are_no_location(rig: Rig, name: str) -> None:
    await rig.retain(await rig.engine(), "q")
    found = await rig.lookup()
    assert isinstance(found, m.Found)
    most = 2**63 - 1 if name != "block_count" else -(2**31)
    for bad in (-1, most):
        with pytest.raises(UnreadableRecordError):
            records.load_location(records.dump_location(changed(found.location, **{name: bad})))


async def test_a_claim_of_ids_longer_than_any_is_none(rig: Rig) -> None:
    await rig.retain(await rig.engine(), "q")
    claim = await rig.claim()
    assert isinstance(claim, m.Claim)
    location = changed(claim.location, key=key("x" * 70_000))
    await rig.store.transact(
        [], [Put(keys.claim("claim"), records.dump_claim(changed(claim, location=location)))]
    )
    assert await rig.plane.releases.finish_claim("claim", "r") is m.ReleaseOutcome.NOTHING


async def test_engines_are_listed_past_records_that_are_none(rig: Rig) -> None:
    for engine_id in ("a", "b", "c"):
        await rig.engine(engine_id)
    await rig.store.transact([], [Put(keys.engine("b"), b"\xff"), Put(keys.ENGINES + b"b\xff", b"\xff")])
    listed, token, pages = [], "", 0
    servicer: EngineServicer = rig.plane.engine_servicer
    while token or not pages:
        request = engine_pb2.ListEnginesRequest(page_size=1, page_token=token)
        answer = await servicer.ListEngines(request, None)
        listed += [engine.spec.engine_id for engine in answer.engines]
        token, pages = answer.next_page_token, pages + 1
    assert (listed, pages) == (["a", "c"], 4)


async def test_a_load_that_no_message_can_hold_is_none(rig: Rig) -> None:
    engine = await rig.engine()
    load = m.EngineLoad(1, 1, 1, 1, 1)
    for bad in (replace(load, retained_conversations=2**31), replace(load, free_blocks=-1)):
        raw = records.dump_load(engine.engine_epoch, bad)
        await rig.store.transact([], [Put(keys.load("d"), raw)])
        answer = await rig.plane.engine_servicer.ListEngines(engine_pb2.ListEnginesRequest(), None)
        assert not answer.engines[0].HasField("load")


async def test_what_is_left_of_a_batch_that_is_cancelled_is_closed_and_cancelled() -> None:
    ended = list[int]()

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(number)

    start: Start[None] = now
    task = asyncio.create_task(gather([work(number) for number in range(2 * SLICE)], start))
    await asyncio.sleep(0)  # now it waits for others to have their turn
    task.cancel()
    await asyncio.wait((task,))
    assert sorted(ended) == list(range(SLICE))


async def test_tokens_beyond_any_count_are_not_added_up(rig: Rig) -> None:
    location = await forged(rig, key=MINE, token_count=2**63 - 1)
    request = engine_pb2.ListEnginesRequest(with_holdings=True)
    answer = await rig.plane.engine_servicer.ListEngines(request, None)
    assert location.holder.engine_id == answer.engines[0].spec.engine_id
    assert (answer.engines[0].holdings.conversations, answer.engines[0].holdings.tokens) == (1, 100)
