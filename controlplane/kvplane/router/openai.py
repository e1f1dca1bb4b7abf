"""What all generation APIs have in common: bodies, errors, the measure of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def is_harmless_id(value: str) -> bool:
    """Whether an id that a client chose may name its request everywhere: in logs, headers and on record."""
    return 0 < len(value) <= 128 and value.isascii() and value.isprintable()


class BadRequestError(ValueError):
    """The body cannot be used; `param` names the field, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_MOST_VALUES = 2_000_000
"""More than a prompt of a million token ids has."""


def parse_body(raw: bytes) -> Body:
    """Return the request as a dict. Raises BadRequestError."""
    if len(raw) > _MOST_VALUES and sum(map(raw.count, b"[{,")) > _MOST_VALUES:
        # Small values take many times their text in memory.
        raise BadRequestError(f"The request body has more than {_MOST_VALUES:,} values.")
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


_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "BadRequestError",
    413: "BadRequestError",
    429: "RateLimitError",
}


def error_body(message: str, status: int, *, param: str | None = None, kind: str | None = None) -> bytes:
    """Return an error as OpenAI and vLLM write them."""
    if kind is None:
        kind = _KINDS.get(status, "ServiceUnavailableError" if status == 503 else "InternalServerError")
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def engine_body(body: Body) -> Body:
    """Return a client's body without what is ours, and without any way to steer KV transfers.

    vLLM takes engine arguments from `vllm_xargs` too, where they would win over what we leave out.
    """
    dropped = OWN_FIELDS | BETWEEN_ENGINES
    leg = {name: value for name, value in body.items() if name not in dropped}
    arguments = leg.get("vllm_xargs")
    if isinstance(arguments, dict):
        leg["vllm_xargs"] = {name: arguments[name] for name in arguments if name not in BETWEEN_ENGINES}
    return leg


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
