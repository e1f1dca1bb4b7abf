"""What the router reads and writes of the OpenAI schema. Everything else passes through."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.router.identity import OWN_FIELDS

Body = dict[str, Any]

DIRECT_PARAMS: Mapping[str, Any] = {"do_remote_prefill": False, "do_remote_decode": False}
"""Tells a decode engine to compute the prompt itself."""
COLD_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "kvplane": {"router": True},
}
"""Tells a prefill engine that another engine will read what it computes.

And that a router of ours is at work, which asks the control plane itself.
"""

_BETWEEN_ENGINES = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What engines tell each other through the router; never taken from a client."""
_CAPPED = ("max_tokens", "max_completion_tokens")
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of")


class BadRequestError(ValueError):
    """The body cannot be used; `param` names the field, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def parse_body(raw: bytes) -> Body:
    """Return the request as a dict. Raises BadRequestError."""
    try:
        body = json.loads(raw)
    except RecursionError:
        raise BadRequestError("The request body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise BadRequestError("The request body is not valid UTF-8.") from None
    except ValueError as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    return body


def dump(value: object) -> bytes:
    """Return JSON as bytes, without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def error_body(message: str, status: int, *, param: str | None = None, kind: str | None = None) -> bytes:
    """Return an error as OpenAI and vLLM write them."""
    if kind is None:
        kind = {404: "NotFoundError", 413: "BadRequestError", 400: "BadRequestError"}.get(
            status, "ServiceUnavailableError" if status == 503 else "InternalServerError"
        )
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def _engine_body(body: Body) -> Body:
    """Return a client's body without what is ours, and without any way to steer KV transfers.

    vLLM takes engine arguments from `vllm_xargs` too, where they would win over what we leave out.
    """
    dropped = OWN_FIELDS | _BETWEEN_ENGINES
    leg = {name: value for name, value in body.items() if name not in dropped}
    arguments = leg.get("vllm_xargs")
    if isinstance(arguments, dict):
        leg["vllm_xargs"] = {name: arguments[name] for name in arguments if name not in _BETWEEN_ENGINES}
    return leg


def prefill_body(body: Body, params: Mapping[str, Any]) -> Body:
    """Return the body of the prefill leg: one token, one choice, no stream."""
    leg = _engine_body(body)
    for name in _NOT_FOR_PREFILL:
        leg.pop(name, None)
    capped = [name for name in _CAPPED if name in leg] or ["max_tokens"]
    leg.update(dict.fromkeys(capped, 1))
    leg["stream"] = False
    if "n" in leg:
        leg["n"] = 1
    leg["kv_transfer_params"] = dict(params)
    return leg


def decode_body(body: Body, params: Mapping[str, Any] | None) -> Body:
    """Return the body of the decode leg: the client's own, with our params in place of any of its own."""
    leg = _engine_body(body)
    if params is not None:
        leg["kv_transfer_params"] = dict(params)
    return leg


def _is_one(value: object) -> bool:
    """Whether a count is one, or left to the engine. Engines also read 3.0 and "3" as numbers."""
    return value is None or value is True or str(value).strip() in ("1", "1.0")


def decode_only_reason(body: Body) -> str | None:
    """Return why a request cannot be split between engines, None if it can.

    Several sequences would each read the prefill engine's blocks, which are freed after the first read;
    logprobs of the prompt need the whole prompt computed where they are returned.
    """
    if not _is_one(body.get("n")) or not _is_one(body.get("best_of")) or body.get("use_beam_search"):
        return "several_choices"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return "several_prompts"
    if isinstance(body.get("prompt_embeds"), list):
        return "several_prompts"
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo") and (body.get("logprobs") or body.get("prompt") is not None):
        return "echo"
    return None


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt's measure: parts in order (a message each), their sizes in characters, and other text."""

    parts: tuple[tuple[int, int], ...]
    """(hash, characters) per message; hashes hold within this process only."""
    overhead: int
    tokens: int | None = None
    """Exact length where the client sent token ids."""
    prompt: str | None = None
    """The whole prompt where it is plain text."""

    @property
    def characters(self) -> int:
        """Characters of everything that goes into the prompt."""
        return self.overhead + len(self.prompt or "") + sum(size for _, size in self.parts)


NO_TEXT = PromptText((), 0)
"""The measure of nothing."""
_MESSAGE_OVERHEAD = 16
"""Characters that stand for the template's markup around one message."""


def prompt_text(body: Body) -> PromptText:
    """Measure a prompt. Cost: linear in the number of messages, and in characters where they are hashed."""
    messages = body.get("messages")
    if isinstance(messages, list):
        tools = body.get("tools")
        overhead = len(json.dumps(tools)) if tools else 0
        return PromptText(tuple(_message(message) for message in messages), overhead)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return PromptText((), 0, prompt=prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return PromptText((), 0, tokens=len(prompt))
    return NO_TEXT


def _message(message: object) -> tuple[int, int]:
    if not isinstance(message, dict):
        return 0, 0
    content = message.get("content")
    role = message.get("role")
    if isinstance(content, str) and isinstance(role, str | None) and not message.get("tool_calls"):
        return hash((role, content)), len(content) + _MESSAGE_OVERHEAD
    text = json.dumps(message, sort_keys=True)
    size = len(text)
    if isinstance(content, list):
        # The base64 of an image says nothing about its tokens.
        size = sum(
            len(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else 1024
            for part in content
        )
    return hash(text), size + _MESSAGE_OVERHEAD


_TOOL_FINISHES = ("tool_calls", "function_call", "tool_use")


def calls_tools(answer: Body) -> bool:
    """Tell whether a whole reply ends with tools to be run: of Chat Completions, Responses or Messages."""
    choices, output = answer.get("choices"), answer.get("output")
    ends = [item.get("finish_reason") for item in _objects(choices)]
    ends += [item.get("type") for item in _objects(output)]
    return any(end in _TOOL_FINISHES for end in [*ends, answer.get("stop_reason")])


def _objects(value: object) -> list[Body]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


_TOOL_MARKS = (b"tool_", b"function_call")
_TOOL_END = re.compile(
    rb'"(?:finish_reason|stop_reason|type)"\s*:\s*"(?:tool_calls|tool_use|function_call)"',
)
_LONGEST_MARK = 64
"""More than what the pattern matches, white space left aside."""


class ToolCallScan:
    """Looks through a streamed reply for the same, as it passes, without reading it.

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
        window = self._tail + chunk
        if any(mark in window for mark in _TOOL_MARKS):
            self.found = _TOOL_END.search(window) is not None
        self._tail = window[-_LONGEST_MARK:]


def cached_tokens(answer: Body) -> int | None:
    """Return usage.prompt_tokens_details.cached_tokens of an answer, None if it does not say."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if isinstance(value, int) else None


def prompt_tokens(answer: Body) -> int | None:
    """Return usage.prompt_tokens of an answer, None if it does not say."""
    usage = answer.get("usage")
    value = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None


def set_cached_tokens(answer: Body, tokens: int | None) -> None:
    """Put what the prefill leg found cached into an answer; None takes a number off that would be wrong."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details")
    if tokens is not None:
        usage["prompt_tokens_details"] = {**(details or {}), "cached_tokens": tokens}
    elif isinstance(details, dict):
        details.pop("cached_tokens", None)
