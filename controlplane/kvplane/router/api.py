"""What the router must know of a generation API to serve it: one interface, and what its kinds share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvplane.router.openai import (
    NO_TEXT,
    Body,
    PromptText,
    dump,
    engine_body,
    error_body,
    is_error,
    read_error,
)

_MESSAGE_OVERHEAD = 16
"""Characters that stand for the template's markup around one message."""
_ATTACHMENT = 1024
"""Characters that stand for a part which is no text: the base64 of an image says nothing about its tokens."""
_ERRORS = (b'data:{"error"', b"event:error", b"data:[DONE]")
_NO_EVENT = re.compile(rb"(?:\xef\xbb\xbf)?(?:[\r\n]+|:[^\r\n]*[\r\n]+)*+")
_BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_LONGEST_SILENCE = 1 << 16
"""Comments before the first event, in bytes."""
_MOST_TOKENS = 1 << 32
_TOOL_ENDS = frozenset({"tool_calls", "function_call", "tool_use"})


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a request's history."""

    role: str
    content: object
    by_model: bool
    """A reply, as the client tells it again."""


class Api(ABC):
    """How one API is read and written. Stateless: there is one object of each kind.

    A subclass says what its bodies and answers look like; whatever it does not name passes through.
    """

    path: ClassVar[str]
    """Where it is served, here and on engines."""
    limits: ClassVar[tuple[str, ...]]
    """Fields that limit the reply's length; the first one is set where a request has none."""
    not_for_prefill: ClassVar[tuple[str, ...]] = ()
    """Fields that make no sense for a reply of one token, or would keep it."""
    cached_name: ClassVar[bytes] = b"cached_tokens"
    """How an answer calls the number of cached tokens."""
    length_name: ClassVar[bytes] = b'input_tokens"'
    """How the name of the prompt's length ends in an answer."""

    # Requests

    def prefill_body(self, body: Body, params: Mapping[str, Any]) -> Body:
        """Return the body of the prefill leg: one token, one choice, no stream."""
        leg = engine_body(body)
        for name in self.not_for_prefill:
            leg.pop(name, None)
        capped = [name for name in self.limits if name in leg] or self.limits[:1]
        leg.update(dict.fromkeys(capped, 1))
        leg["stream"] = False
        leg["kv_transfer_params"] = dict(params)
        return leg

    def decode_body(self, body: Body, params: Mapping[str, Any] | None) -> Body:
        """Return the body of the decode leg: the client's own, our params in place of any of its own."""
        leg = engine_body(body)
        if params is not None:
            leg["kv_transfer_params"] = dict(params)
        return leg

    def name_answer(self, leg: Body, engine_url: str, root: str) -> None:
        """Set the id of the answer in a decode leg's body, where it says where and of what the answer is."""
        return

    def names_engine(self, body: Body) -> str | None:
        """Return the tag of the only engine that can serve a request, None if any can."""
        return None

    @abstractmethod
    def decode_only_reason(self, body: Body) -> str | None:
        """Return why a request cannot be split between engines, None if it can."""

    @abstractmethod
    def prompt_text(self, body: Body) -> PromptText:
        """Measure a prompt. Cost: linear in messages, and in characters where they are hashed."""

    @abstractmethod
    def history(self, body: Body) -> Sequence[Said] | None:
        """Return what was said so far, oldest first; None where a request does not tell it by messages."""

    # Answers

    @abstractmethod
    def is_answer(self, answer: Body) -> bool:
        """Tell whether an engine's 200 is a reply: not an error, and not something else."""

    @abstractmethod
    def prompt_tokens(self, answer: Body) -> int | None:
        """Return the length of the whole prompt, None if the answer does not say."""

    @abstractmethod
    def cached_tokens(self, answer: Body) -> int | None:
        """Return how much of it was cached, None if the answer does not say."""

    @abstractmethod
    def set_cached_tokens(self, answer: Body, tokens: int | None) -> None:
        """Put in what the prefill leg found cached; None takes a number off that would be wrong."""

    @abstractmethod
    def calls_tools(self, answer: Body) -> bool:
        """Tell whether a whole reply ends with tools to be run by the client."""

    # Streams

    def begun(self, first: bytes) -> bool:
        """Tell whether the beginning of a stream shows that the engine has begun to answer.

        Comments and blank lines show nothing. What is, or may yet become, an error is read to the end of
        its event.
        """
        head = event_in(first)
        start = squeezed(head)
        if not start or start.startswith(b":"):
            return len(first) > _LONGEST_SILENCE
        maybe = any(start.startswith(error[: len(start)]) for error in _ERRORS)
        return not maybe or _BLANK_LINE.search(head) is not None

    def stream_error(self, first: bytes) -> bytes | None:
        """Return the error that a stream begins with, as the body of an answer; None if it does not."""
        head = event_in(first)
        if not squeezed(head).startswith(_ERRORS):
            return None
        lines = _BLANK_LINE.split(head, 1)[0].splitlines()
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            return self.error_body(BROKE, 500)
        if isinstance(said, dict) and said.get("error", said) is None:
            return None  # Some say of each piece that it is none.
        return self.engine_error(data, 500)

    # Errors

    def error_body(self, message: str, status: int, *, param: str | None = None) -> bytes:
        """Return an error of the router's in this API's shape."""
        return error_body(message, status, param=param)

    def engine_error(self, body: bytes, status: int) -> bytes:
        """Return an engine's error in this API's shape: the same bytes wherever they have it already."""
        answer, message = read_error(body, status)
        return body if is_error(answer) else self.error_body(message, status)


BROKE = "The engine failed before the first token."


def event_in(stream: bytes) -> bytes:
    """Return a stream from its first event on: without the comments and blank lines before it."""
    before = _NO_EVENT.match(stream)
    return stream[before.end() :] if before is not None else stream


def squeezed(event: bytes) -> bytes:
    """Return how an event begins, without spaces, which may be there or not."""
    return event[:64].translate(None, b" \t")


def is_one(value: object) -> bool:
    """Tell whether a count is one, or left to the engine. Engines also read 3.0 and "3" as numbers."""
    return value is None or value is True or str(value).strip() in ("1", "1.0")


def objects(value: object) -> list[Body]:
    """Return the objects in a list, nothing where there is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def ends_with_tools(*ends: object) -> bool:
    """Tell whether one of the ways a reply ended is that tools are to be run."""
    return any(isinstance(end, str) and end in _TOOL_ENDS for end in ends)


def count(holder: object, *names: str) -> int | None:
    """Return a count deep in an answer, None if it is not there. An impossible one becomes 0 or the most."""
    for name in names:
        holder = holder.get(name) if isinstance(holder, dict) else None
    return max(0, min(holder, _MOST_TOKENS)) if isinstance(holder, int) else None


def message_part(message: object) -> tuple[int, int]:
    """Return hash and size in characters of one message or item."""
    if not isinstance(message, dict):
        return 0, 0
    content = message.get("content")
    role = message.get("role")
    if isinstance(content, str) and isinstance(role, str | None) and not message.get("tool_calls"):
        return hash((role, content)), len(content) + _MESSAGE_OVERHEAD
    text = json.dumps(message, sort_keys=True)
    size = len(text)
    if isinstance(content, list):
        size = sum(_part_size(part) for part in content)
    return hash(text), size + _MESSAGE_OVERHEAD


def _part_size(part: object) -> int:
    if not isinstance(part, dict):
        return _ATTACHMENT
    for name in ("text", "content", "thinking"):
        if isinstance(text := part.get(name), str):
            return len(text)
    return _ATTACHMENT


def is_reply(message: object) -> bool:
    """Tell whether a message is the model's."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def messages_text(
    messages: Sequence[object], *others: object, by_model: Callable[[object], bool] = is_reply
) -> PromptText:
    """Measure messages and whatever else goes into the prompt."""
    overhead = sum(len(other) if isinstance(other, str) else len(dump(other)) for other in others if other)
    parts = tuple(map(message_part, messages))
    last = next((at for at in reversed(range(len(messages))) if by_model(messages[at])), None)
    since = None if last is None else sum(size for _, size in parts[last + 1 :])
    return PromptText(parts, overhead, since=since)


def plain_text(prompt: object) -> PromptText:
    """Measure a prompt that is text or token ids."""
    if isinstance(prompt, str):
        return PromptText((), 0, prompt=prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return PromptText((), 0, tokens=len(prompt), ids=prompt)
    return NO_TEXT
