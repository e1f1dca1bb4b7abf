"""TCP links that can be broken: delayed, stalled, half-opened, cut, and healed, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

from deploy.rig.process import LOCALHOST

T = TypeVar("T")

_CHUNK = 64 * 1024
_CALL_S = 10.0


class Fault(Enum):
    """What a link does with what comes.

    DELAY: everything comes later, in order. STALL: nothing passes, and all of it does once healed.
    HALF_OPEN: connections are taken, what is sent is lost, and healing resets them, as after a partition.
    DEAF: requests pass and answers are lost, else as HALF_OPEN. CUT: all are reset and new ones refused.
    """

    NONE = "none"
    DELAY = "delay"
    STALL = "stall"
    HALF_OPEN = "half-open"
    DEAF = "deaf"
    CUT = "cut"


class Proxies:
    """A thread that carries links. Close it, or use it as a context."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._links: list[Link] = []

    def link(self, target_port: int, *, port: int = 0, name: str = "") -> Link:
        """Listen on a loopback port (0: any) and forward to `target_port` of loopback."""
        link = Link(self._call, target_port, name or f"to-{target_port}")
        self._call(link.open(port))
        self._links.append(link)
        return link

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def close(self) -> None:
        """Reset all connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        for link in self._links:
            self._call(link.aclose())
        self._call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Link:
    """One listening port and where it leads. Its public methods may be called from any thread but its own.

    Attributes:
        port: where it listens, on loopback.
    """

    def __init__(
        self, call: Callable[[Coroutine[Any, Any, None]], None], target_port: int, name: str
    ) -> None:
        self.name = name
        self.port = 0
        self.fault = Fault.NONE
        self.delay_s = 0.0
        self.passing = asyncio.Event()
        self._call = call
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        return f"{LOCALHOST}:{self.port}"

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    def break_(self, fault: Fault, *, delay_s: float = 0.0) -> None:
        """Begin a fault; it takes the place of the one before."""
        self._call(self._set(fault, delay_s))

    def heal(self) -> None:
        """Forward again. Connections that lost something are reset. Idempotent."""
        self._call(self._set(Fault.NONE, 0.0))

    async def open(self, port: int) -> None:
        """Listen. On the links' loop, as what follows."""
        self.passing.set()
        self._server = await asyncio.start_server(self._accept, LOCALHOST, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Reset all connections and listen no more. Idempotent."""
        if self._server is not None:
            self._server.close()
        await self._reset(list(self._connections))

    async def _set(self, fault: Fault, delay_s: float) -> None:
        damaged = [connection for connection in self._connections if connection.damaged]
        self.fault, self.delay_s = fault, delay_s
        if fault is Fault.STALL:
            self.passing.clear()
        else:
            self.passing.set()
        if fault is Fault.CUT:
            await self._reset(list(self._connections))
        elif fault is Fault.NONE:
            await self._reset(damaged)

    async def _reset(self, connections: list[_Connection]) -> None:
        for connection in connections:
            connection.reset()
        tasks = [connection.task for connection in connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_CALL_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, writer)
        connection.task = asyncio.current_task()
        self._connections.add(connection)
        try:
            await connection.run(reader, self._target_port)
        except (OSError, asyncio.CancelledError):
            connection.abort()
        finally:
            self._connections.discard(connection)


class _Connection:
    """Both directions of one connection."""

    def __init__(self, link: Link, client: asyncio.StreamWriter) -> None:
        self._link = link
        self._writers = [client]
        self.task: asyncio.Task[None] | None = None
        self.damaged = False

    def reset(self) -> None:
        """Have it end as if the machine behind it had died."""
        if self.task is not None:
            self.task.cancel()

    def abort(self) -> None:
        """Reset both sides: what is on its way is lost."""
        for writer in self._writers:
            with contextlib.suppress(OSError):
                linger = b"\x01\0\0\0\0\0\0\0"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async def run(self, client: asyncio.StreamReader, target_port: int) -> None:
        """Carry it until either side ends it. Raises OSError if it broke, or was refused by a fault."""
        if self._link.fault is Fault.CUT:
            raise ConnectionResetError
        await self._link.passing.wait()
        if self._link.fault is Fault.HALF_OPEN:
            await self._swallow(client)
        target, target_writer = await asyncio.open_connection(LOCALHOST, target_port)
        self._writers.append(target_writer)
        await _until_first(
            *self._direction(client, target_writer, (Fault.HALF_OPEN,)),
            *self._direction(target, self._writers[0], (Fault.HALF_OPEN, Fault.DEAF)),
        )
        for writer in self._writers:
            writer.close()

    async def _swallow(self, client: asyncio.StreamReader) -> None:
        self.damaged = True
        while await client.read(_CHUNK):
            continue
        raise ConnectionResetError

    def _direction(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: tuple[Fault, ...]
    ) -> tuple[Coroutine[Any, Any, None], Coroutine[Any, Any, None]]:
        """Return the two halves of one direction; the second ends when all has been written."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        loop, link = asyncio.get_running_loop(), self._link

        async def read() -> None:
            while data := await reader.read(_CHUNK):
                await queue.put((loop.time() + link.delay_s, data))
            await queue.put((loop.time() + link.delay_s, b""))
            await asyncio.Event().wait()

        async def write() -> None:
            while True:
                due, data = await queue.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await link.passing.wait()
                if not data:
                    return
                if link.fault in losing:
                    self.damaged = True
                    continue
                writer.write(data)
                await writer.drain()

        return read(), write()


async def _until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one ends, then end the others. Raises what it raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
