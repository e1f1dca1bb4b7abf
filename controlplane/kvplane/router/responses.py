"""The Responses API, as vLLM serves it.

A response that goes on from a stored one (`previous_response_id`) can only be made where that is stored, and
the router keeps nothing: so the ids that it has engines give to responses say where each is and of which
conversation it is part. `resp_` + random number + tag of the engine + root, 32, 8 and 32 hexadecimal digits.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvplane.router.api import BROKE, Api, Said, count, ends_with_tools, messages_text, objects
from kvplane.router.chat import set_details
from kvplane.router.openai import Body, PromptText

_OWN_TOOLS = ("function", "custom", "namespace")
"""Tools that the client runs; an engine that runs tools itself computes several prompts per request."""
_ID = re.compile(r"resp_[0-9a-f]{32}([0-9a-f]{8})([0-9a-f]{32})")
_FIRST_EVENTS = (b"event: response.created", b"event: response.in_progress")
_FAILED = (b"event: error", b"event: response.failed")


@dataclass(frozen=True, slots=True)
class ResponseId:
    """What an id of ours says."""

    engine_tag: str
    root: str


def read_response_id(value: object) -> ResponseId | None:
    """Return what a response's id says, None if it is none of ours."""
    found = _ID.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else ResponseId(found[1], found[2])


def new_response_id(engine_url: str, root: str) -> str:
    """Return an id for a response that an engine is about to make."""
    own = uuid.uuid4().hex
    return f"resp_{own}{engine_tag(engine_url)}{root or own}"


def new_root() -> str:
    """Return a root for a conversation that begins."""
    return uuid.uuid4().hex


def engine_tag(url: str) -> str:
    """Return by what an engine is named in ids."""
    return blake2b(url.encode(), digest_size=4).hexdigest()


class Responses(Api):
    """POST /v1/responses."""

    path = "/v1/responses"
    limits = ("max_output_tokens",)
    # A prefill engine that stored its leg under the response's id would show it for the response.
    not_for_prefill = ("background", "store", "min_tokens", "request_id")

    def decode_only_reason(self, body: Body) -> str | None:
        """See Api."""
        if body.get("previous_response_id") is not None:
            return "stored_response"
        if body.get("background"):
            return "background"
        if any(tool.get("type") not in _OWN_TOOLS for tool in objects(body.get("tools"))):
            return "engine_runs_tools"
        return None

    def prompt_text(self, body: Body) -> PromptText:
        """See Api."""
        said = body.get("input")
        items = said if isinstance(said, list) else [{"role": "user", "content": said}]
        return messages_text(items, body.get("instructions"), body.get("tools"))

    def history(self, body: Body) -> Sequence[Said] | None:
        """See Api."""
        if body.get("previous_response_id") is not None:
            return None
        said = body.get("input")
        items = [{"role": "user", "content": said}] if isinstance(said, str) else objects(said)
        first = [Said("system", instructions, False)] if (instructions := body.get("instructions")) else []
        return first + [_said(item) for item in items]

    def is_answer(self, answer: Body) -> bool:
        """See Api."""
        return "output" in answer and answer.get("status") != "failed"

    def prompt_tokens(self, answer: Body) -> int | None:
        """See Api."""
        return count(answer, "usage", "input_tokens")

    def cached_tokens(self, answer: Body) -> int | None:
        """See Api."""
        return count(answer, "usage", "input_tokens_details", "cached_tokens")

    def set_cached_tokens(self, answer: Body, tokens: int | None) -> None:
        """See Api."""
        set_details(answer.get("usage"), "input_tokens_details", tokens)

    def calls_tools(self, answer: Body) -> bool:
        """See Api."""
        return ends_with_tools(*(item.get("type") for item in objects(answer.get("output"))))

    def begun(self, first: bytes) -> bool:
        """See Api. The first two events are sent before anything has been computed."""
        events = first.split(b"\n\n")
        return any(event and not event.startswith(_FIRST_EVENTS) for event in events[:3]) or len(events) > 3

    def stream_error(self, first: bytes) -> bytes | None:
        """See Api."""
        if any(event.startswith(_FAILED) for event in first.split(b"\n\n")[:3]):
            return self.error_body(BROKE, 500)
        return super().stream_error(first)


def _said(item: Body) -> Said:
    kind = item.get("type", "message")
    if kind == "message":
        role = str(item.get("role"))
        return Said(role, item.get("content"), role == "assistant")
    if str(kind).endswith("_output"):
        return Said("tool", [{"tool": item.get("call_id")}, item.get("output")], False)
    return Said("assistant", None, True)
