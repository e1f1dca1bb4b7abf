"""Streamed replies on their way to the client: what is looked for in them, and what is taken out."""

from __future__ import annotations

import json
import re

from kvplane.router.api import Api
from kvplane.router.openai import BETWEEN_ENGINES, Body, dump, parse_json

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
"""In what is looked for; it is looked for first, since in most events there is none of it."""
_PRIVATE = b"_transfer_params"
_BACKSLASH = ord("\\")
"""As a number it is found ten times as fast."""
_ESCAPED_NAME = re.compile(rb"\\u00[567]")
"""A letter of the names in BETWEEN_ENGINES, or their underscore, written as JSON allows."""
_LONGEST_EVENT = 4 << 20
"""A longer one is not held: it passes in pieces, or ends the stream if it holds something private."""
_LINE_ENDS = re.compile(rb"\r\n|\n|\r")
_EVENT_ENDS = re.compile(rb"((?:\r\n|\n|\r(?!\n)){2,})")


class UnreadableEventError(Exception):
    """An event is too long to be cleaned, and holds what is not for clients."""


class StreamGuard:
    """Passes a stream on, event by event, without what engines tell each other.

    Only events that seem to hold something are read. Usage in them gets `cached` as the number of cached
    tokens, which the decode engine cannot know: UNCHANGED leaves it, None takes it off. What is not a whole
    event yet waits for its rest; nobody could have used it. `prompt_tokens` is the prompt's length, None
    until the stream has told it.
    """

    __slots__ = ("_api", "_cached", "_count", "_fix", "_held", "_length", "_within", "prompt_tokens")

    UNCHANGED = -1

    def __init__(self, api: Api, cached: int | None = UNCHANGED) -> None:
        self._api = api
        self._count = api.cached_name
        self._length = api.length_name
        self.prompt_tokens: int | None = None
        self._fix = cached != self.UNCHANGED
        self._cached = cached
        self._held = b""
        self._within = False
        """In an event that is too long to be held."""

    def passed(self, chunk: bytes) -> bytes:
        """Return what may go on after the next piece has come, wherever it was cut; perhaps nothing.

        Raises UnreadableEventError.
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
            if self._within:
                return self._more(chunk)
        if not chunk.endswith(b"\n\n"):
            end = max(_after(chunk, b"\n\n"), _after(chunk, b"\r\n\r\n"), _after(chunk, b"\r\r"))
            chunk, self._held = chunk[:end], chunk[end:]
            if len(self._held) > _LONGEST_EVENT:
                more, self._held, self._within = self._held, b"", True
                return self.passed(chunk) + self._more(more)
        if _HINT in chunk:
            if self.prompt_tokens is None and self._length in chunk:
                self._measure(chunk)
            if _PRIVATE in chunk or (self._fix and self._count in chunk):
                return self._cleaned(chunk)
        if _BACKSLASH in chunk and _ESCAPED_NAME.search(chunk):
            return self._cleaned(chunk)
        return chunk

    def _more(self, piece: bytes) -> bytes:
        """Return what may go on of an event that is too long to be held."""
        end = _EVENT_ENDS.search(piece)
        mine = piece if end is None else piece[: end.end()]
        if holds_private(mine):
            raise UnreadableEventError("an event is too long to be read, and holds what is not for clients")
        if end is not None:
            self._within = False
            return mine + self.passed(piece[end.end() :])
        self._held = piece[-_LONGEST_MARK:]
        return piece[:-_LONGEST_MARK]

    def rest(self) -> bytes:
        """Return what is left at the end of the stream."""
        held, self._held = self._held, b""
        if self.prompt_tokens is None and self._length in held:
            self._measure(held)
        return self._cleaned(held) if held else held

    def _measure(self, events: bytes) -> None:
        for event in _EVENT_ENDS.split(events):
            if self._length not in event:
                continue
            try:
                said = parse_json(_data(_LINE_ENDS.split(event)))
            except ValueError:
                continue
            for answer in _answers(said):
                self.prompt_tokens = self._api.prompt_tokens(answer) or self.prompt_tokens

    def _cleaned(self, events: bytes) -> bytes:
        return b"".join(map(self._event, _EVENT_ENDS.split(events)))

    def _event(self, event: bytes) -> bytes:
        private = holds_private(event)
        if not private and self._count not in event:
            return event
        lines = _LINE_ENDS.split(event)
        others = [line for line in lines if not line.startswith(b"data:")]
        try:
            said = parse_json(_data(lines))
        except ValueError:
            # What cannot be read cannot be cleaned.
            return b"\n".join(others) if private else event
        changed = private and scrub(said)
        for answer in _answers(said) if self._fix else ():
            if self._api.cached_tokens(answer) is not None:
                self._api.set_cached_tokens(answer, self._cached)
                changed = True
        if not changed:
            return event
        return b"\n".join([*others, b"data: " + dump(said)])


def _data(lines: list[bytes]) -> bytes:
    """Return the data of an event of these lines."""
    return b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))


def _answers(said: object) -> list[Body]:
    """Return what an event tells: those of Responses hold a response, the first one of Messages a message."""
    if not isinstance(said, dict):
        return []
    return [
        answer for answer in (said, said.get("response"), said.get("message")) if isinstance(answer, dict)
    ]


def _after(chunk: bytes, boundary: bytes) -> int:
    found = chunk.rfind(boundary)
    return 0 if found < 0 else found + len(boundary)


def holds_private(raw: bytes) -> bool:
    """Tell whether JSON, or a piece of it, seems to hold what engines tell each other, also if escaped."""
    return _PRIVATE in raw or (_BACKSLASH in raw and _ESCAPED_NAME.search(raw) is not None)


def scrub(answer: object) -> bool:
    """Take out of an answer what engines tell each other, at any depth; tells whether there was any."""
    found, left = False, [answer]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            for name in BETWEEN_ENGINES & item.keys():
                del item[name]
                found = True
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return found


def scrubbed(raw: bytes) -> bytes:
    """Return an answer's body without what engines tell each other; nothing where it cannot be read."""
    if not holds_private(raw):
        return raw
    try:
        answer = json.loads(raw)
        return dump(answer) if scrub(answer) else raw
    except (ValueError, RecursionError):  # also of what can be read, but not written
        return raw if _PRIVATE not in raw else b""
