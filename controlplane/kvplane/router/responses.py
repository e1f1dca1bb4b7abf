"""The Responses API, as vLLM serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvplane.router.api import (
    BROKE,
    Api,
    Said,
    count,
    ends_with_tools,
    event_in,
    messages_text,
    objects,
    squeezed,
)
from kvplane.router.chat import set_details
from kvplane.router.openai import Body, PromptText, is_harmless_id
from kvplane.router.response_id import new_response_id, read_response_id

_OWN_TOOLS = ("function", "custom", "namespace")
"""Tools that the client runs; an engine that runs tools itself computes several prompts per request."""
_FIRST_EVENTS = (b"event:response.created", b"event:response.in_progress")
_FAILED = (b"event:error", b"event:response.failed")


class Responses(Api):
    """POST /v1/responses."""

    path = "/v1/responses"
    limits = ("max_output_tokens",)
    not_for_prefill = ("background", "min_tokens", "request_id")

    def prefill_body(self, body: Body, params: Mapping[str, Any]) -> Body:
        """See Api. What the leg says is no response that anybody will ask for."""
        return super().prefill_body(body, params) | {"store": False}

    def name_answer(self, leg: Body, engine_url: str, root: str) -> None:
        """See Api. A harmless id that the client has chosen stays; what is no string the engine refuses."""
        given = leg.get("request_id")
        if given is None or (isinstance(given, str) and not is_harmless_id(given)):
            leg["request_id"] = new_response_id(engine_url, root)

    def names_engine(self, body: Body) -> str | None:
        """See Api."""
        known = read_response_id(body.get("previous_response_id"))
        return None if known is None else known.engine_tag

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
        text = messages_text(items, body.get("instructions"), body.get("tools"), by_model=_is_reply)
        if body.get("previous_response_id") is None:
            return text
        return replace(text, since=text.characters, partial=True)

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
        events = _events(first)[:-1]  # of the last one, more is to come
        return any(not event.startswith(_FIRST_EVENTS) for event in events[:3]) or len(events) > 2

    def stream_error(self, first: bytes) -> bytes | None:
        """See Api."""
        if any(event.startswith(_FAILED) for event in _events(first)[:3]):
            return self.error_body(BROKE, 500)
        return super().stream_error(first)


def _events(stream: bytes) -> list[bytes]:
    """Return how the events of a stream begin; the last one is what has come of one, perhaps nothing."""
    *whole, last = stream.replace(b"\r\n", b"\n").split(b"\n\n")
    events = [squeezed(event_in(event + b"\n")) for event in whole]
    return [event for event in events if event] + [squeezed(event_in(last))]


def _is_reply(item: object) -> bool:
    return isinstance(item, dict) and _said(item).by_model


def _said(item: Body) -> Said:
    kind = item.get("type", "message")
    if kind == "message":
        role = str(item.get("role"))
        return Said(role, item.get("content"), role == "assistant")
    if str(kind).endswith("_output"):
        return Said("tool", [{"tool": item.get("call_id")}, item.get("output")], False)
    return Said("assistant", None, True)
