"""How many streams a replica serves: one more is refused, and one that ends makes room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from kvplane.controlplane import location_service
from kvplane.controlplane.callers import CURRENT
from kvplane.controlplane.errors import TooManyStreamsError, status_of
from kvplane.controlplane.places import Places
from kvplane.controlplane.upkeep.dump import MAX_LINE_BYTES, DumpError, lines_of, read_dump
from kvplane.v1 import location_pb2
from tests.controlplane.harness import Rig, running


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(location_service, "MAX_WATCHES", 2)
    monkeypatch.setattr(location_service, "MAX_TURNS_STREAMS", 2)
    async with running() as rig:
        yield rig


def watch(rig: Rig) -> Any:
    return rig.plane.location_servicer.WatchLocations(location_pb2.WatchLocationsRequest(), None)


async def test_a_watch_too_many_is_refused_until_another_ends(rig: Rig) -> None:
    watches = [watch(rig) for _ in range(2)]
    running_ = [asyncio.ensure_future(anext(one)) for one in watches]
    await asyncio.sleep(0)
    with pytest.raises(TooManyStreamsError) as raised:
        await anext(watch(rig))
    assert status_of(raised.value, "r")[2] == "TOO_MANY_STREAMS"
    for task in running_:
        task.cancel()
    await asyncio.gather(*running_, return_exceptions=True)
    another = asyncio.ensure_future(anext(watch(rig)))
    done, _ = await asyncio.wait((another,), timeout=0.05)
    assert not done
    another.cancel()
    await asyncio.gather(another, return_exceptions=True)


async def test_a_turns_stream_too_many_is_refused(rig: Rig) -> None:
    gate = asyncio.Event()

    async def requests() -> AsyncIterator[location_pb2.TurnsRequest]:
        await gate.wait()
        return
        yield

    class Context:
        async def write(self, answer: object) -> None:
            raise AssertionError

    servicer = rig.plane.location_servicer
    open_ = [asyncio.ensure_future(servicer.Turns(requests(), Context())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyStreamsError):
        await servicer.Turns(requests(), Context())
    gate.set()
    await asyncio.gather(*open_)
    await servicer.Turns(requests(), Context())


def caller(name: str) -> Any:
    return SimpleNamespace(identity=SimpleNamespace(name=name))


def test_one_caller_leaves_places_for_the_others() -> None:
    places, said = Places("streams", 100), list[str]()
    with ExitStack() as held:

        def fill(name: str) -> int:
            taken = 0
            token = CURRENT.set(caller(name))
            try:
                while True:
                    held.enter_context(places.take())
                    taken += 1
            except TooManyStreamsError as error:
                said.append(str(error))
                return taken
            finally:
                CURRENT.reset(token)

        assert fill("greedy") == 80
        assert fill("greedy") == 0
        assert fill("router") == 16
        assert [fill(f"late{number}") for number in range(5)] == [3, 1, 0, 0, 0]
    assert "greedy" in said[0]
    assert places.taken == 0
    assert not places._has


def test_who_is_not_told_apart_may_take_all() -> None:
    places = Places("streams", 3)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(places.take())
        with pytest.raises(TooManyStreamsError, match="serves 3 streams already"):
            held.enter_context(places.take())


def test_a_line_of_a_dump_that_never_ends_is_read_no_further_than_shows_it() -> None:
    class Endless:
        read = 0

        def readline(self, most: int) -> bytes:
            self.read += most
            return b"x" * most

    stream: Any = Endless()

    def lines() -> Iterator[bytes]:
        yield from lines_of(stream)

    with pytest.raises(DumpError, match="line 1: longer"):
        read_dump(lines(), ())
    assert stream.read == MAX_LINE_BYTES + 1
