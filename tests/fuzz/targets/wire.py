"""The same requests as bytes over a real connection, to a control plane as it is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvplane.controlplane.security import SecuritySettings
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.fuzz.callers import Caller, Metadata, denied
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.messages import encoded, make
from tests.fuzz.targets.rpcs import METHODS, SETTINGS, STREAMS, UNARY
from tests.fuzz.world import World

_BAD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)
_STRANGERS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
_OWN = "Internal error from Core"
"""What gRPC's client makes of a write that fails because the server has ended the stream."""
_CALL_S = 20.0
_TOGETHER = 4
"""Calls at once, as of several callers."""


class Wire(Target):
    """Calls and short streams, of which some are left in the middle."""

    name = "wire"
    share = 0.1
    life = 500
    real = True
    security: SecuritySettings | None = None

    def caller(self, chance: Chance) -> Caller | None:
        """Return who makes a call; None: anyone may all."""
        return None

    async def start(self) -> None:
        clock = SystemClock()
        self._store = MemoryStore(clock)
        self._server = ControlPlaneServer(self._store, clock, SETTINGS, security=self.security)
        port = await self._server.start("127.0.0.1:0")
        self._channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._known = World().known()

    async def stop(self) -> None:
        await self._channel.close()
        failed = self._server.failed.is_set()
        await self._server.stop(1.0)
        await self._store.aclose()
        if failed:
            raise Wrong("a task of the control plane failed")

    async def once(self, chance: Chance) -> str:
        calls = [self._call(chance) for _ in range(_TOGETHER)]
        self.input = [call[0] for call in calls]
        statuses = await asyncio.gather(*(call[1] for call in calls))
        for (method, _, caller), status in zip((call[0] for call in calls), statuses, strict=True):
            if status in _BAD:
                raise Wrong(f"{method} answered {status}")
            if caller is not None and status is grpc.StatusCode.OK and denied(caller, method, None):
                raise Wrong(f"{method} answered one who may not")
            if caller is not None and caller.role is None and status not in (None, *_STRANGERS):
                raise Wrong(f"{method} answered a stranger {status}")
        return statuses[0].name if statuses[0] is not None else "left"

    def _call(self, chance: Chance) -> tuple[tuple[str, list[bytes], Caller | None], Any]:
        method = chance.pick(STREAMS) if chance.odds(0.2) else chance.pick(UNARY)
        count = chance.pick((1, 2, 4)) if method in STREAMS[:2] else 1
        raws = [encoded(make(METHODS[method], chance, self._known), chance) for _ in range(count)]
        if not chance.odds(0.999):
            raws[0] = bytes(chance.pick((300_000, 18 << 20)))
        leaves = chance.odds(0.05)
        ask = self._stream if method in STREAMS else self._unary
        caller = self.caller(chance)
        shown = () if caller is None else tuple(pair for pair in caller.metadata if pair[0] != "x-other")
        return (method, [raw[:10_000] for raw in raws], caller), ask(method, raws, leaves, shown)

    async def _unary(
        self, method: str, raws: list[bytes], leaves: bool, shown: Metadata
    ) -> grpc.StatusCode | None:
        ask = self._channel.unary_unary(f"/kvplane.v1.{method}")
        call = ask(raws[0], timeout=_CALL_S, metadata=shown)
        if leaves:
            await asyncio.sleep(0)
            call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await call
        return None if leaves else await call.code()

    async def _stream(
        self, method: str, raws: list[bytes], leaves: bool, shown: Metadata
    ) -> grpc.StatusCode | None:
        path = f"/kvplane.v1.{method}"

        async def requests() -> AsyncIterator[bytes]:
            for raw in raws:
                yield raw

        if method.endswith("WatchLocations"):
            call, leaves = self._channel.unary_stream(path)(raws[0], timeout=_CALL_S, metadata=shown), True
        else:
            call = self._channel.stream_stream(path)(requests(), timeout=_CALL_S, metadata=shown)
        code: grpc.StatusCode | None = None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(0.01 if leaves else _CALL_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
        if call.done() and not call.cancelled():
            code = await call.code()
            if await call.details() == _OWN:
                code = None
        else:
            call.cancel()
        return code
