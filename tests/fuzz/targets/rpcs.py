"""All RPCs of a control plane in memory, as gRPC calls them: from bytes of requests to those of answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor

from kvplane.controlplane import model as m
from kvplane.controlplane.callers import Access
from kvplane.controlplane.decoding import Checked
from kvplane.controlplane.errors import UnreadableMessageError
from kvplane.controlplane.guard import guarded
from kvplane.controlplane.roles import ENGINE_SERVICE, LOCATION_SERVICE, STATUS_SERVICE
from kvplane.controlplane.server import MAX_ANSWER_BYTES, ControlPlane
from kvplane.store.base import Store
from kvplane.store.memory import MemoryStore
from kvplane.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    location_pb2,
    location_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.messages import encoded, make
from tests.fuzz.virtual import LoopClock
from tests.fuzz.world import World

METHODS: dict[str, Descriptor] = {
    f"{service.name}/{method.name}": method.input_type
    for file in (engine_pb2.DESCRIPTOR, location_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
"""The API's methods and their requests' types."""
STREAMS = ("EngineService/AttachEngine", "LocationService/Turns", "LocationService/WatchLocations")
UNARY = tuple(name for name in METHODS if name not in STREAMS)
_OFTEN = ("EngineService/RegisterEngine", "LocationService/BeginTurn", "LocationService/AnnounceLocation",
          "LocationService/ClaimLocation") * 3  # fmt: skip
_BAD = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
SETTINGS = m.Settings(max_conversations=40)


class _Server:
    """Stands for gRPC's server: keeps what it would call."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.handlers[f"{service.rpartition('.')[2]}/{name}"] = handler


class Aborted(grpc.aio.AbortError):
    """What `abort` of a context raises."""


class Context:
    """Stands for gRPC's context of one call, from one who shows metadata and names in a certificate."""

    def __init__(
        self, metadata: tuple[tuple[str, str | bytes], ...] = (), names: tuple[str, ...] = ()
    ) -> None:
        self._metadata = metadata
        self._names = [name.encode() for name in names]
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.answers: list[Any] = []

    def done(self) -> bool:
        return False

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_uri": self._names} if self._names else {}

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        self.code, self.details = code, details
        raise Aborted

    async def write(self, answer: Any) -> None:
        self.answers.append(answer)


class Calls:
    """A control plane's handlers, callable with bytes."""

    def __init__(self, plane: ControlPlane, access: Access | None = None) -> None:
        server = _Server()
        checked: Any = Checked(server)  # type: ignore[arg-type]
        engine_pb2_grpc.add_EngineServiceServicer_to_server(
            guarded(plane.engine_servicer, ENGINE_SERVICE, access=access, streams={"AttachEngine"}), checked
        )
        locations = guarded(plane.location_servicer, LOCATION_SERVICE, access=access, streams={"Turns"})
        location_pb2_grpc.add_LocationServiceServicer_to_server(locations, checked)
        status = guarded(plane.status_servicer, STATUS_SERVICE, access=access)
        status_pb2_grpc.add_StatusServiceServicer_to_server(status, checked)
        self._handlers = server.handlers
        self.caller: tuple[tuple[tuple[str, str | bytes], ...], tuple[str, ...]] = ((), ())
        """What calls come with: metadata, and names in a certificate."""

    async def unary(self, method: str, raw: bytes) -> tuple[Any, Context]:
        """Return the request as decoded, and what came of it."""
        handler, context = self._handlers[method], Context(*self.caller)
        request = handler.request_deserializer(raw)
        with contextlib.suppress(Aborted):
            context.answers.append(await handler.unary_unary(request, context))
        return request, context

    async def stream(self, method: str, raws: Iterable[bytes], pause_s: float, most: int = 200) -> Context:
        """Send messages, with a pause before each but the first and the end; take at most so many answers."""
        handler, context = self._handlers[method], Context(*self.caller)

        async def requests() -> AsyncIterator[Any]:
            for number, raw in enumerate(raws):
                if number and pause_s:
                    await asyncio.sleep(pause_s)
                yield handler.request_deserializer(raw)
            await asyncio.sleep(pause_s)

        with contextlib.suppress(Aborted):
            if method.endswith("WatchLocations"):
                answers = handler.unary_stream(handler.request_deserializer(next(iter(raws))), context)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await _take(answers, context, most)
                await answers.aclose()
            elif method.endswith("Turns"):
                await handler.stream_stream(requests(), context)
            else:
                answers = handler.stream_stream(requests(), context)
                await _take(answers, context, most)
                await answers.aclose()
        return context


async def _take(answers: AsyncIterator[Any], context: Context, most: int) -> None:
    async for answer in answers:
        context.answers.append(answer)
        if len(context.answers) >= most:
            return


def check(method: str, request: Any, context: Context) -> str:
    """Return the status of a call; raises Wrong for one that must not be, or for such an answer."""
    if context.code in _BAD:
        raise Wrong(f"{method} answered {context.code}")
    if "Traceback (most recent" in context.details or "site-packages" in context.details:
        raise Wrong(f"{method} tells a caller of our code")
    for answer in context.answers:
        if len(answer.SerializeToString()) > MAX_ANSWER_BYTES:
            raise Wrong(f"{method} answered more than gRPC may send")
        if answer.DESCRIPTOR.name == "TurnsResponse":
            for result in answer.results:
                if result.HasField("error") and result.error.reason == "INTERNAL":
                    raise Wrong(f"{method} failed at an operation")
        elif not isinstance(request, Exception | None):
            apart(method, request, answer)
    return "OK" if context.code is None else context.code.name


def apart(method: str, request: Any, answer: Any) -> None:
    """Raise Wrong if an answer holds another tenant's conversation than was asked for."""
    name = answer.DESCRIPTOR.name
    if name == "ListLocationsResponse":
        found = [location.key.tenant_id for location in answer.locations]
        asked = request.tenant_id
    elif name == "WatchLocationsResponse":
        found = [event.location.key.tenant_id for event in answer.events]
        asked = request.tenant_id
    elif name in ("LookupLocationResponse", "BeginTurnResponse"):
        found = [answer.location.key.tenant_id] if answer.HasField("location") else []
        asked = request.key.tenant_id
    elif name == "ClaimLocationResponse":
        found = [answer.claim.location.key.tenant_id] if answer.HasField("claim") else []
        asked = request.key.tenant_id
    else:
        return
    if asked and any(tenant != asked for tenant in found):
        raise Wrong(f"{method} answered with another tenant's conversation")


class PlaneTarget(Target):
    """A control plane that runs for a life, on the loop's virtual time."""

    def store(self, clock: LoopClock) -> Store:
        return MemoryStore(clock)

    async def start(self) -> None:
        clock = LoopClock()
        self._store = self.store(clock)
        self.plane = ControlPlane(self._store, clock, SETTINGS)
        self._tasks = self.plane.start()
        self.calls = Calls(self.plane)
        self.world = World()
        self.known = self.world.known()
        async with asyncio.timeout(100):
            await self.plane.mirror.caught_up.wait()

    async def stop(self) -> None:
        self.plane.attachments.close()
        await self.plane.attachments.aclose()
        ended = [task for task in self._tasks if task.done() and task.exception() is not None]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.aclose()
        if ended:
            raise Wrong(f"{ended[0].get_name()} ended: {ended[0].exception()!r}")

    async def call(self, method: str, chance: Chance) -> str:
        """Make a request of a method, and call it."""
        raw = encoded(make(METHODS[method], chance, self.known), chance)
        self.input = (method, raw)
        request, context = await self.calls.unary(method, raw)
        status = check(method, request, context)
        if status == "OK":
            self.world.learn(request, context.answers[0])
        if chance.odds(0.01):
            await asyncio.sleep(chance.pick((0.05, 1, 9, 31, 500)))
        return status


class Rpcs(PlaneTarget):
    """Unary calls."""

    name = "rpc"
    share = 4.0

    async def once(self, chance: Chance) -> str:
        return await self.call(chance.pick(UNARY + _OFTEN), chance)


class RpcStreams(PlaneTarget):
    """Streams: several messages each, among unary calls that give them something to tell."""

    name = "rpc-stream"
    share = 1.0
    life = 1000

    async def once(self, chance: Chance) -> str:
        wild, chance.wild = chance.wild, 0.02
        for _ in range(2):
            await self.call(chance.pick(_OFTEN), chance)
        chance.wild = wild
        method = chance.pick(STREAMS)
        messages = [make(METHODS[method], chance, self.known) for _ in range(chance.pick((1, 2, 3, 6)))]
        if method.endswith("AttachEngine"):
            for number, message in enumerate(messages):
                self._attached(message, number, chance)
        raws = [encoded(message, chance) for message in messages]
        self.input = (method, raws)
        calling = self.calls.stream(method, raws, chance.pick((0.0, 0.01, 0.5, 12.0)))
        request = None
        with contextlib.suppress(UnreadableMessageError, Exception):
            request = self.calls._handlers[method].request_deserializer(raws[0])
        context = await self._perhaps_left(calling, chance)
        return check(method, request if "Watch" in method else None, context)

    def _attached(self, message: Any, number: int, chance: Chance) -> None:
        if chance.odds(chance.wild):
            return
        if number:
            message.ClearField("hello")
        else:
            message.hello.engine_id, message.hello.engine_epoch = "d1", self.world.epochs.get("d1", 1)
        message.sequence = number + 1

    async def _perhaps_left(self, calling: Awaitable[Context], chance: Chance) -> Context:
        """Await a call; or leave it in the middle, as callers do."""
        if chance.odds(0.9):
            return await calling
        task = asyncio.ensure_future(calling)
        await asyncio.wait((task,), timeout=chance.pick((0, 0.005, 0.3)))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return Context()
