"""The load generator: keeps so many requests in flight, and notes when answers begin and end.

It reads no more of an answer than it must to know that it is whole and right: status, end, number of events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

REQUEST_TIMEOUT_S = 60.0
"""An answer that takes longer has hung."""
_END_OF_HEAD = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class Outcome:
    """What became of a load. Times in seconds."""

    elapsed_s: float = 0.0
    first_byte_s: list[float] = field(default_factory=list)
    """From sending a request to the first byte of its answer's body."""
    failures: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Requests answered rightly."""
        return len(self.first_byte_s)

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return self.done / self.elapsed_s


class _Exchange(asyncio.Protocol):
    """One connection; `ask` sends a request and returns when its answer is whole."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[str] | None = None
        self._head = b""
        self._in_body = False
        self._length: int | None = None
        self._tail = b""
        self._got = 0
        self._clock = time.perf_counter
        self.first_byte = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end("the connection was closed before the answer was whole")

    def ask(self, request: bytes) -> asyncio.Future[str]:
        """Send a request; the future gives "" or what is wrong with the answer."""
        assert self._transport is not None
        self._head, self._tail, self._in_body, self._length, self._got = b"", b"", False, None, 0
        self.first_byte = 0.0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            end = self._head.find(_END_OF_HEAD)
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            status = head[9:12]
            if status != b"200":
                self._end(f"answered {status.decode(errors='replace')}")
                self.close()
                return
            self._in_body = True
            if (at := head.find(b"content-length:")) >= 0:
                self._length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if not data:
                return
        if not self.first_byte:
            self.first_byte = self._clock()
        self._got += len(data)
        self._tail = (self._tail + data)[-64:] if len(data) < 64 else data[-64:]
        if self._length is not None:
            if self._got >= self._length:
                self._end("")
        elif self._tail.endswith(_LAST_CHUNK):
            self._end("" if _DONE in self._tail else "the stream ended without [DONE]")

    def _end(self, problem: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(problem)


Request = Callable[[int], bytes]
"""Gives the n-th request of a load, whole, as it goes over the wire."""


def chat_request(port: int, body: bytes, headers: dict[str, str]) -> bytes:
    """Return a chat completion request as bytes."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


async def load(port: int, request: Request, *, in_flight: int, seconds: float, first: int = 0) -> Outcome:
    """Send requests for some seconds, `in_flight` at once, each on a connection of its own that is kept.

    The n-th request is `request(n)`, counting from `first`. Those under way at the end are waited for.
    """
    outcome, loop = Outcome(), asyncio.get_running_loop()
    began, number = time.perf_counter(), first
    ends = began + seconds

    async def work() -> None:
        nonlocal number
        exchange: _Exchange | None = None
        try:
            while time.perf_counter() < ends:
                mine, number = number, number + 1
                if exchange is None or not exchange.open:
                    _, exchange = await loop.create_connection(_Exchange, "127.0.0.1", port)
                sent = time.perf_counter()
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    problem = await exchange.ask(request(mine))
                if problem:
                    outcome.failures.append(problem)
                else:
                    outcome.first_byte_s.append(exchange.first_byte - sent)
        except (TimeoutError, OSError) as error:
            outcome.failures.append(f"{type(error).__name__}: {error}")
        finally:
            if exchange is not None:
                exchange.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(work())
    outcome.elapsed_s = time.perf_counter() - began
    return outcome


async def hold(port: int, request: Request, *, streams: int) -> list[_Exchange]:
    """Open so many streams and return once each has begun; close them by `close_all`.

    Raises TimeoutError if they have not all begun within REQUEST_TIMEOUT_S, ConnectionError for a failed one.
    """
    loop, held = asyncio.get_running_loop(), list[_Exchange]()
    for number in range(streams):
        _, exchange = await loop.create_connection(_Exchange, "127.0.0.1", port)
        exchange.ask(request(number))
        held.append(exchange)
        if not number % 50:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        while not all(exchange.first_byte for exchange in held):
            if not all(exchange.open for exchange in held):
                raise ConnectionError("a stream was closed before it began")
            await asyncio.sleep(0.05)
    return held


def close_all(held: list[_Exchange]) -> None:
    """Break off the streams that `hold` opened."""
    for exchange in held:
        exchange.close()
