"""What all generation APIs have in common: bodies, errors, the measure of a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

Body = dict[str, Any]

OWN_FIELDS = frozenset({"conversation_id"})
"""Body fields that engines do not know; taken off before a request goes on."""

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

BETWEEN_ENGINES = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What engines tell each other through the router; never taken from a client."""


_ADDRESSES = ("___prefill_addr_", "___decode_addr_")
"""By these in a request's id some of vLLM's connectors tell engines whom to connect to."""


def is_harmless_id(value: str) -> bool:
    """Whether an id that a client chose may name its request everywhere: in logs, headers and on record."""
    return 0 < len(value) <= 128 and value.isascii() and value.isprintable() and not _steers(value)


def _steers(value: object) -> bool:
    return isinstance(value, str) and any(mark in value for mark in _ADDRESSES)


class BadRequestError(ValueError):
    """The body cannot be used; `param` names the field, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _OddFloat(float):
    """A number that JSON has not, or not within its range; orjson would write null for it."""


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _OddFloat(value)


_DECODER = json.JSONDecoder(parse_float=_float, parse_constant=_OddFloat)
_MOST_VALUES = 2_000_000
"""More than a prompt of a million token ids has."""
_MOST_DEPTH = 256
"""Lists and objects in each other: far fewer than can be written again from anywhere in the router."""
_BRACKETS = b"[{]}"
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


def parse_json(raw: bytes) -> Any:
    """Return a JSON value that is small and flat enough to be worked with.

    Raises BadRequestError if it is not, and any other ValueError for what is no JSON. Cost: as json.loads.
    """
    if len(raw) > _MOST_VALUES and sum(map(raw.count, b"[{,")) > _MOST_VALUES:
        # Small values take many times their text in memory.
        raise BadRequestError(f"The request body has more than {_MOST_VALUES:,} values.")
    try:
        value = _DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    except RecursionError:
        raise BadRequestError(_TOO_DEEP) from None
    if sum(map(raw.count, b"[{")) > _MOST_DEPTH and _depth(raw) > _MOST_DEPTH:
        raise BadRequestError(_TOO_DEEP)
    return value


def read_object(raw: bytes) -> Body:
    """Return a JSON object that an engine made; {} for anything else, such as one nested too deeply."""
    try:
        value = parse_json(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_TOO_DEEP = "The request body is nested too deeply."


def _depth(raw: bytes) -> int:
    """Return how many lists and objects are in each other at most, in valid JSON."""
    if b"\0" in raw:  # in UTF-16 or UTF-32
        raw = raw.decode(json.detect_encoding(raw), "surrogatepass").encode("utf-8", "surrogatepass")
    outside_strings = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    steps = b"".join(outside_strings).translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0)


def parse_body(raw: bytes) -> Body:
    """Return the request as a dict. Raises BadRequestError."""
    try:
        body = parse_json(raw)
    except BadRequestError:
        raise
    except UnicodeDecodeError:
        raise BadRequestError("The request body is not valid UTF-8.") from None
    except ValueError as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    return body


def dump(value: object) -> bytes:
    """Return JSON as bytes, without spaces. What `parse_json` gave comes out as it went in."""
    try:
        return orjson.dumps(value)
    except TypeError:  # longer integers, halves of surrogate pairs, infinity, deep nesting: Python's can
        return json.dumps(value, separators=(",", ":")).encode()


_KINDS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


def error_body(message: str, status: int, *, param: str | None = None, kind: str | None = None) -> bytes:
    """Return an error as OpenAI and vLLM write them."""
    if kind is None:
        kind = _KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


_LONGEST_MESSAGE = 1000


def read_error(body: bytes, status: int) -> tuple[Any, str]:
    """Return what an engine's error is as JSON, None if it is none, and what it says, in 1000 characters.

    Engines, and proxies in front of them, write errors in many ways.
    """
    try:
        answer = parse_json(body)
    except ValueError:
        answer = None
    said: Any = answer
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    if said is None or said is answer:
        said = body[: 4 * _LONGEST_MESSAGE].decode(errors="replace").strip()
    elif not isinstance(said, str):
        said = dump(said).decode()
    return answer, said[:_LONGEST_MESSAGE] or f"The engine answered {status} and did not say why."


def error_code(body: bytes) -> int:
    """Return the status from 400 to 499 that an error in OpenAI's shape names, 0 if it names none."""
    try:
        answer = parse_json(body)
    except ValueError:
        return 0
    error = answer.get("error") if isinstance(answer, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 500 else 0


def is_error(answer: object) -> bool:
    """Tell whether an answer is an error as OpenAI and vLLM write them, or as Anthropic does."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def engine_body(body: Body) -> Body:
    """Return a client's body without what is ours, and without any way to steer KV transfers.

    vLLM takes engine arguments from `vllm_xargs` too, where they would win over what we leave out.
    """
    dropped = OWN_FIELDS | BETWEEN_ENGINES
    leg = {name: value for name, value in body.items() if name not in dropped}
    if _steers(leg.get("request_id")):
        del leg["request_id"]
    arguments = leg.get("vllm_xargs")
    if isinstance(arguments, dict):
        leg["vllm_xargs"] = {name: arguments[name] for name in arguments if name not in BETWEEN_ENGINES}
    return leg


def drop_params(value: object) -> bool:
    """Drop from a request whatever could steer KV transfers, as engine_body does; tells if there was any.

    A request may be a list of objects.
    """
    dropped = False
    for item in value if isinstance(value, list) else [value]:
        for holder in (item, item.get("vllm_xargs")) if isinstance(item, dict) else ():
            if isinstance(holder, dict) and not BETWEEN_ENGINES.isdisjoint(holder):
                dropped = True
                for name in BETWEEN_ENGINES:
                    holder.pop(name, None)
        if isinstance(item, dict) and _steers(item.get("request_id")):
            dropped = True
            del item["request_id"]
    return dropped


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
    ids: Sequence[object] | None = None
    """The whole prompt where it is token ids."""
    since: int | None = None
    """Characters after the model's last reply; None where there is none to be seen."""
    partial: bool = False
    """What was said before is with the engine, and not here."""

    @property
    def characters(self) -> int:
        """Characters of everything that goes into the prompt."""
        return self.overhead + len(self.prompt or "") + sum(size for _, size in self.parts)


NO_TEXT = PromptText((), 0)
"""The measure of nothing."""
