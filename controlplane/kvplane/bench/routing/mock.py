"""Mock engines, fast enough not to be the limit: they read no more of a request than they must.

One process serves a prefill engine and a decode engine on two ports. A prefill request is answered with one
token and kv_transfer_params as vLLM's, a decode request with a stream of events or, unless it asks for a
stream, with a whole completion.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import uvloop

from kvplane.bench.process import pin
from kvplane.bench.rig import BenchError

MODEL = "mock"
"""Name of the model both serve."""
_START_S = 30.0
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Script:
    """How the decode engine answers: so many events, so many seconds apart."""

    events: int = 64
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the mocks listen."""

    prefill_port: int
    decode_port: int

    @property
    def prefill_url(self) -> str:
        """Base URL of the prefill engine."""
        return f"http://127.0.0.1:{self.prefill_port}"

    @property
    def decode_url(self) -> str:
        """Base URL of the decode engine."""
        return f"http://127.0.0.1:{self.decode_port}"


def _head(status: str, *more: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", "server: mock", *more, "", "")).encode()


def _json_answer(value: object) -> bytes:
    body = json.dumps(value).encode()
    return _head("200 OK", "content-type: application/json", f"content-length: {len(body)}") + body


def _completion(**more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Yes."}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 600, "completion_tokens": 1, "total_tokens": 601}
    completion = {"id": "chatcmpl-mock", "object": "chat.completion", "created": 1, "model": MODEL}
    return {**completion, "choices": [choice], "usage": usage, **more}


_PREFILLED = _json_answer(
    _completion(
        kv_transfer_params={
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(38))],
            "remote_engine_id": "mock-prefill",
            "remote_request_id": "mock-request",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
    )
)
_WHOLE = _json_answer(_completion())
_MODELS = _json_answer({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
_EMPTY = _head("200 OK", "content-length: 0")
_STREAM = _head("200 OK", "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")
_LAST = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _events(count: int) -> list[bytes]:
    """Return the chunks of a stream of `count` events of usual size, the last being [DONE]."""
    chunks = list[bytes]()
    for number in range(count - 1):
        delta = {"role": "assistant", "content": ""} if not number else {"content": f" word{number}"}
        event = {
            "id": "chatcmpl-mock",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
        chunks.append(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
    return [*chunks, _chunk(b"data: [DONE]\n\n")]


class _Served(asyncio.Protocol):
    """One connection, one request after the other."""

    def __init__(self, script: Script, chunks: list[bytes], *, decode: bool) -> None:
        self._script = script
        self._chunks = chunks
        self._decode = decode
        self._data = b""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(_END_OF_HEAD)) >= 0:
            head, start = self._data[:end].lower(), end + len(_END_OF_HEAD)
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 : end].split(b"\r\n", 1)[0])
            elif b"transfer-encoding: chunked" in head:
                last = self._data.find(_LAST, start)
                if last < 0:
                    return
                length = last + len(_LAST) - start
            if len(self._data) < start + length:
                if b"100-continue" in head:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body, self._data = self._data[start : start + length], self._data[start + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._transport.write(_MODELS if b"/models" in head.split(b"\r\n", 1)[0] else _EMPTY)
        elif not self._decode:
            self._transport.write(_PREFILLED)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(_STREAM)
            self._next(0)
        else:
            self._transport.write(_WHOLE)

    def _next(self, number: int) -> None:
        write, chunks, gap_s = self._transport.write, self._chunks, self._script.gap_s
        if not gap_s:
            for chunk in chunks:
                write(chunk)
            write(_LAST)
            return
        write(chunks[number])
        if number + 1 < len(chunks):
            self._timer = asyncio.get_running_loop().call_later(gap_s, self._next, number + 1)
        else:
            write(_LAST)


@asynccontextmanager
async def running(script: Script, *cores: int) -> AsyncIterator[Engines]:
    """Run both engines in a process of their own, on some cores (none: anywhere). Raises BenchError."""
    process, pipe, engines = await asyncio.to_thread(_start, script, cores)
    try:
        yield engines
    finally:
        await asyncio.to_thread(_stop, process, pipe)


def _start(script: Script, cores: tuple[int, ...]) -> tuple[Any, Connection, Engines]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(script, cores, theirs), daemon=True, name="bench-engines")
    process.start()
    theirs.close()
    try:
        return process, ours, Engines(*_ports(ours))
    except BenchError:
        _stop(process, ours)
        raise


def _stop(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _ports(pipe: Connection) -> tuple[int, int]:
    try:
        if pipe.poll(_START_S):
            prefill_port, decode_port = pipe.recv()
            return prefill_port, decode_port
    except (OSError, EOFError):
        pass
    raise BenchError("the mock engines did not start; their error is above")


def _main(script: Script, cores: tuple[int, ...], pipe: Connection) -> None:
    pin(*cores)
    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(script, pipe))


async def _serve(script: Script, pipe: Connection) -> None:
    loop, gone, chunks = asyncio.get_running_loop(), asyncio.Event(), _events(script.events)
    ports = list[int]()
    for decode in (False, True):
        server = await loop.create_server(
            lambda decode=decode: _Served(script, chunks, decode=decode),  # type: ignore[misc]  # mypy#17532
            "127.0.0.1",
            0,
            backlog=4096,
        )
        ports.append(server.sockets[0].getsockname()[1])
    loop.add_reader(pipe.fileno(), gone.set)  # the other end is closed, by whatever means
    pipe.send(tuple(ports))
    await gone.wait()
