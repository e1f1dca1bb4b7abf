"""Messages as they arrive: what is none, or is far more than any may be, is refused and costs little.

gRPC answers a unary call that cannot be decoded by UNKNOWN and the name of a class, and tells us nothing. So
in place of such a message an error is passed, which the guard raises; a stream's is raised where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvplane.controlplane.errors import UnreadableMessageError
from kvplane.controlplane.gate import Gate

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""What is received; what gRPC elsewhere takes unless told otherwise.

A single announcement has at most 1.3 MB, a prompt 1 MB, all else some kilobytes. Engines of ours send at most
1.5 MiB of announcements and one more, with 1024 ids of all else 3.7 MB; routers 2 MiB of operations and one.
"""
MAX_SPEC_BYTES = 64 * 1024
"""Of RegisterEngine: an engine's spec has at most 27 KB."""
_PLAIN_BYTES = 256 * 1024
"""Of so many bytes a message is decoded whatever is in it: empty elements take some 50 times as much."""
_MOST_FIELDS = 8192
"""No message has more than four lists of 1024 elements and some fields beside them."""


class Checked:
    """A server as generated code sees it, which adds a service to it: with the deserializers from here.

    With a `gate`, strangers are turned away before that.
    """

    def __init__(self, server: grpc.aio.Server, gate: Gate | None = None) -> None:
        self._server = server
        self._gate = gate

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: the same handlers come by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve the methods of a service."""
        checked = {name: _checked(name, handler) for name, handler in handlers.items()}
        if self._gate is not None:
            self._server.add_generic_rpc_handlers((self._gate.before(service, checked),))
            return
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, checked),))
        self._server.add_registered_method_handlers(service, checked)


def _checked(method: str, handler: Any) -> Any:
    most = MAX_SPEC_BYTES if method == "RegisterEngine" else MAX_REQUEST_BYTES
    decode = decoder(handler.request_deserializer, most, streams=handler.request_streaming)
    return handler._replace(request_deserializer=decode)


def decoder(decode: Callable[[bytes], Any], most: int, *, streams: bool) -> Callable[[bytes], Any]:
    """Return a deserializer: `decode`, of at most so many bytes.

    What is wrong with a message is raised if it `streams`, else it is what is returned.
    """

    def refused(problem: str) -> UnreadableMessageError:
        error = UnreadableMessageError(problem)
        if streams:
            raise error
        return error

    def decoded(raw: bytes) -> Any:
        size = len(raw)
        if size > most:
            return refused(f"the message must be at most {most} bytes")
        if size > _PLAIN_BYTES and has_more_fields(raw, _MOST_FIELDS):
            return refused("the message has more elements than any may have")
        try:
            return decode(raw)
        except DecodeError:
            return refused("the message cannot be decoded")

    return decoded


def has_more_fields(raw: bytes, most: int) -> bool:
    """Tell whether a message has more than `most` fields, each element of a list counted; O(most).

    Of what is no message, as of groups, which none of ours has, it is said to have.
    """
    at, end = 0, len(raw)
    try:
        for _ in range(most):
            if at >= end:
                return False
            tag, at = _varint(raw, at)
            kind = tag & 7
            if kind == 2:
                size, at = _varint(raw, at)
                at += size
            elif kind == 0:
                _, at = _varint(raw, at)
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                return True
    except (IndexError, ValueError):
        return True
    return at < end


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and where it ends. Raises IndexError, ValueError."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
