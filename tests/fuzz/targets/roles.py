"""All RPCs of a control plane with an access file, by callers who may, who may not, and who are nobody."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import grpc

from kvplane.controlplane.access import load_access
from kvplane.controlplane.callers import Access
from kvplane.controlplane.roles import Role
from kvplane.controlplane.security import SecuritySettings
from tests.fuzz.callers import (
    ACCESS,
    KNOWN,
    Caller,
    access_without,
    check_operations,
    denied,
    some_caller,
)
from tests.fuzz.chance import Chance
from tests.fuzz.core import Wrong
from tests.fuzz.messages import encoded, make
from tests.fuzz.targets.rpcs import METHODS, STREAMS, UNARY, Calls, Context, PlaneTarget, check
from tests.fuzz.targets.wire import Wire

_OFTEN = ("EngineService/RegisterEngine", "LocationService/BeginTurn", "LocationService/AnnounceLocation") * 3
_DENIALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
_BY_NAME = {caller.name: caller for caller in KNOWN}
_SECRET = b"remote_block_ids"
"""Of what KV could be read with, which is not for those who only look."""


def _written(stack: contextlib.ExitStack) -> Path:
    """Return an access file of all known callers, which goes with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-fuzz-"))
    file = Path(folder, "access")
    file.write_text(ACCESS)
    return file


class Roles(PlaneTarget):
    """Unary calls and streams by anyone. Now and then one is taken out of the access file, or put back."""

    name = "roles"
    share = 2.0
    life = 1000

    async def start(self) -> None:
        await super().start()
        self._stack = contextlib.ExitStack()
        self._file = _written(self._stack)
        self._access = Access(str(self._file))
        self.calls = Calls(self.plane, self._access)
        self._gone = ""

    async def stop(self) -> None:
        self._stack.close()
        await super().stop()

    async def once(self, chance: Chance) -> str:
        if chance.odds(0.01):
            self._gone = chance.pick(("", *_BY_NAME))
            self._file.write_text(access_without(self._gone))
            self._access.users = load_access(str(self._file))
            self._access.version += 1
        caller = some_caller(chance)
        self.calls.caller = caller.metadata, caller.names
        if caller.name == self._gone:
            caller = Caller(caller.name)
        if chance.odds(0.15):
            return await self._stream(caller, chance)
        method = chance.pick(UNARY + _OFTEN)
        raw = encoded(make(METHODS[method], chance, self.known), chance)
        self.input = (caller.name, method, raw)
        request, context = await self.calls.unary(method, raw)
        status = check(method, request, context)
        self._require(caller, method, request, context)
        if status == "OK":
            self.world.learn(request, context.answers[0])
        return f"{caller.role or 'nobody'}:{status}"

    async def _stream(self, caller: Caller, chance: Chance) -> str:
        method = chance.pick(STREAMS)
        kind = METHODS[method]
        messages: list[Any] = [make(kind, chance, self.known) for _ in range(chance.pick((1, 2, 3)))]
        if method.endswith("AttachEngine"):
            for number, message in enumerate(messages):
                message.sequence = number + 1
                if number:
                    message.ClearField("hello")
        raws = [encoded(message, chance) for message in messages]
        self.input = (caller.name, method, raws)
        read = list[Any]()
        for raw in raws:
            with contextlib.suppress(Exception):
                read.append(type(messages[0]).FromString(raw))
        watched = read[0] if read and method.endswith("WatchLocations") else None
        context = await self.calls.stream(method, raws, chance.pick((0.0, 0.01, 0.5)))
        status = check(method, watched, context)
        self._require(caller, method, watched, context)
        if method.endswith("Turns"):
            check_operations(caller, read, context.answers)
        elif method.endswith("AttachEngine") and context.answers and read and read[0].HasField("hello"):
            self._require_engine(caller, read[0].hello.engine_id)
        return f"{caller.role or 'nobody'}:{status}"

    def _require(self, caller: Caller, method: str, request: Any, context: Context) -> None:
        why = denied(caller, method, request)
        if why and context.answers:
            raise Wrong(f"{method} answered one who may not: {why}")
        if why in ("nobody", "role") and context.code not in _DENIALS:
            raise Wrong(f"{method} did not deny one who may not: {why}")
        if caller.role is Role.VIEWER and any(
            _SECRET in answer.SerializeToString() for answer in context.answers
        ):
            raise Wrong(f"{method} shows a viewer how KV is read")

    def _require_engine(self, caller: Caller, engine_id: str) -> None:
        if "*" not in caller.engine_ids and engine_id not in caller.engine_ids:
            raise Wrong("a stream is attached for an engine that its caller is not")


class WireRoles(Wire):
    """As `wire`, with an access file and tokens."""

    name = "wire-roles"
    share = 0.1

    async def start(self) -> None:
        self._stack = contextlib.ExitStack()
        self.security = SecuritySettings(access_file=str(_written(self._stack)))
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        self._stack.close()

    def caller(self, chance: Chance) -> Caller:
        """Return one who can be told by what goes over this connection."""
        caller = some_caller(chance)
        while caller.names or any(
            isinstance(value, bytes) for key, value in caller.metadata if key != "x-other"
        ):
            caller = some_caller(chance)
        return caller
