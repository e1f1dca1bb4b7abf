"""Streamed replies on their way to the client: what is looked for in them, and what is taken out."""

from __future__ import annotations

import json
import re

from kvplane.router.api import Api
from kvplane.router.openai import BETWEEN_ENGINES, Body, dump

_TOOL_END = re.compile(
    rb'"(?:finish_reason|stop_reason|type)"\s*:\s*"(?:tool_calls|tool_use|function_call)"',
)
_LONGEST_MARK = 64
"""More than what the pattern matches, white space left aside."""


class ToolCallScan:
    """Looks for a reply that ends with tools to be run, as it passes, without reading it.

    Text of the reply cannot look like it: there the quotes are escaped.
    """

    __slots__ = ("_tail", "found")

    def __init__(self) -> None:
        self.found = False
        self._tail = b""

    def see(self, chunk: bytes) -> None:
        """Look at the next piece of the reply, wherever it was cut."""
        if self.found:
            return
        window = self._tail + chunk if self._tail else chunk
        if b"tool_" in window or b"function_call" in window:
            self.found = _TOOL_END.search(window) is not None
        # What is looked for is within one event.
        self._tail = b"" if window.endswith(b"\n\n") else window[-_LONGEST_MARK:]


_HINT = b"_t"
"""In all of the following; it is looked for first, since in most events there is none of them."""
_PRIVATE = b"_transfer_params"
_CACHED = (b"cached_tokens", b"cache_read_input_tokens")
_LONGEST_EVENT = 4 << 20
"""An event that is longer passes as it is: memory is bounded, and no engine's is."""


class StreamGuard:
    """Passes a stream on, event by event, without what engines tell each other.

    Only events that seem to hold something are read. Usage in them gets `cached` as the number of cached
    tokens, which the decode engine cannot know: UNCHANGED leaves it, None takes it off. What is not a whole
    event yet waits for its rest; nobody could have used it.
    """

    __slots__ = ("_api", "_cached", "_fix", "_held")

    UNCHANGED = -1

    def __init__(self, api: Api, cached: int | None = UNCHANGED) -> None:
        self._api = api
        self._fix = cached != self.UNCHANGED
        self._cached = cached
        self._held = b""

    def passed(self, chunk: bytes) -> bytes:
        """Return what may go on after the next piece has come, wherever it was cut; perhaps nothing."""
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not chunk.endswith(b"\n\n"):
            end = max(_after(chunk, b"\n\n"), _after(chunk, b"\r\n\r\n"))
            if len(chunk) - end <= _LONGEST_EVENT:
                chunk, self._held = chunk[:end], chunk[end:]
        if _HINT in chunk and (
            _PRIVATE in chunk or (self._fix and (_CACHED[0] in chunk or _CACHED[1] in chunk))
        ):
            return self._cleaned(chunk)
        return chunk

    def rest(self) -> bytes:
        """Return what is left at the end of the stream."""
        held, self._held = self._held, b""
        return self._cleaned(held) if held else held

    def _cleaned(self, events: bytes) -> bytes:
        return b"\n".join(map(self._line, events.split(b"\n")))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or not (_PRIVATE in line or any(mark in line for mark in _CACHED)):
            return line
        try:
            event = json.loads(line[5:])
        except (ValueError, RecursionError):
            return line
        if not isinstance(event, dict):
            return line
        # Events of Responses hold a response, the first one of Messages a message.
        for answer in (event, event.get("response"), event.get("message")):
            if isinstance(answer, dict):
                scrub(answer)
                if self._fix and self._api.cached_tokens(answer) is not None:
                    self._api.set_cached_tokens(answer, self._cached)
        return b"data: " + dump(event)


def _after(chunk: bytes, boundary: bytes) -> int:
    found = chunk.rfind(boundary)
    return 0 if found < 0 else found + len(boundary)


def scrub(answer: Body) -> None:
    """Take out of an answer what engines tell each other."""
    for name in BETWEEN_ENGINES:
        answer.pop(name, None)
