"""HTTP without sockets: bytes into aiohttp's server as from clients, and out of its client as to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import aiohttp
from aiohttp.client_proto import ResponseHandler


class Wire(asyncio.Transport):
    """One side's end of a connection that exists in memory only. `sent` is all that was written."""

    def __init__(self, protocol: Any) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8000)})
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self.sent = bytearray()
        self.closed = asyncio.Event()
        self.flowing = asyncio.Event()
        self.flowing.set()

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.sent += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lost)

    def abort(self) -> None:
        self.close()

    def _lost(self) -> None:
        self._protocol.connection_lost(None)
        self.closed.set()

    def pause_reading(self) -> None:
        self.flowing.clear()

    def resume_reading(self) -> None:
        self.flowing.set()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8000)}.get(name, default)


async def exchange(server: Callable[[], Any], pieces: Iterable[bytes], leaves_after_s: float | None) -> bytes:
    """Send pieces to a server on a connection of its own; returns all that comes until it is closed.

    With `leaves_after_s` the client goes away then.
    """
    protocol = server()
    wire = Wire(protocol)
    protocol.connection_made(wire)
    for number, piece in enumerate(pieces):
        if number:
            await asyncio.sleep(0)
        if not wire.flowing.is_set():
            closed = asyncio.ensure_future(wire.closed.wait())
            flowing = asyncio.ensure_future(wire.flowing.wait())
            await asyncio.wait((closed, flowing), return_when=asyncio.FIRST_COMPLETED)
            closed.cancel()
            flowing.cancel()
        if wire.is_closing():
            break
        protocol.data_received(piece)
    if leaves_after_s is not None:
        await asyncio.sleep(leaves_after_s)
        wire.close()
    await wire.closed.wait()
    return bytes(wire.sent)


@dataclass
class Said:
    """What an engine says to one request: pieces, each after some seconds; then it may hang up."""

    pieces: list[tuple[float, bytes]]
    closes: bool = False


Engines = Callable[[str, bytes, bytes], Said | None]
"""Answers a request to host:port, given its head and its body; None: refuses the connection."""


class _ToEngine(Wire):
    """The router's end of a connection to an engine, and the engine behind it."""

    def __init__(self, protocol: Any, engines: Engines, host: str) -> None:
        super().__init__(protocol)
        self._engines = engines
        self._host = host

    def write(self, data: Any) -> None:
        super().write(data)
        head, separator, rest = bytes(self.sent).partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if b"chunked" in head.lower() and not rest.endswith(b"0\r\n\r\n"):
            return
        if len(rest) >= length:
            self.sent.clear()
            said = self._engines(self._host, head, rest)
            self._say(said if said is not None else Said([], closes=True), 0)

    def _say(self, said: Said, number: int) -> None:
        if self._is_closing:
            return
        if number == len(said.pieces):
            if said.closes:
                self.close()
            return
        delay_s, piece = said.pieces[number]
        if delay_s:
            self._loop.call_later(delay_s, self._deliver, said, number, piece)
        else:
            self._loop.call_soon(self._deliver, said, number, piece)

    def _deliver(self, said: Said, number: int, piece: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(piece)
            self._say(said, number + 1)


@contextmanager
def connected(engines: Engines) -> Iterator[None]:
    """Have all connections that aiohttp's client makes be to some engines in memory."""

    async def connect(self: Any, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        host = f"{req.url.host}:{req.url.port}"
        if engines(host, b"CONNECT", b"") is None:
            raise aiohttp.ClientConnectorError(req.connection_key, ConnectionRefusedError(111, "refused"))
        protocol: ResponseHandler = self._factory()
        protocol.connection_made(_ToEngine(protocol, engines, host))
        return protocol

    with mock.patch.object(aiohttp.TCPConnector, "_create_connection", connect):
        yield
