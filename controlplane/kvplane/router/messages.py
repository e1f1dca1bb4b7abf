"""Anthropic's Messages API, as vLLM serves it."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.router.api import Api, Said, count, ends_with_tools, messages_text, objects
from kvplane.router.openai import NO_TEXT, Body, PromptText, dump, is_error, read_error

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(message: str, status: int, kind: str | None = None) -> bytes:
    """Return an error as Anthropic writes them."""
    kind = kind or _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return dump({"type": "error", "error": {"type": kind, "message": message}})


class Messages(Api):
    """POST /v1/messages."""

    path = "/v1/messages"
    limits = ("max_tokens",)
    cached_name = b"cache_read_input_tokens"
    not_for_prefill = ("min_tokens", "stream_options")

    def decode_only_reason(self, body: Body) -> str | None:
        """See Api. There is nothing in this API that could not be split."""
        return None

    def prompt_text(self, body: Body) -> PromptText:
        """See Api."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            return NO_TEXT
        return messages_text(messages, body.get("system"), body.get("tools"))

    def history(self, body: Body) -> Sequence[Said]:
        """See Api."""
        first = [Said("system", system, False)] if (system := body.get("system")) else []
        return first + [
            Said(role, message.get("content"), role == "assistant")
            for message in objects(body.get("messages"))
            if isinstance(role := message.get("role"), str)
        ]

    def is_answer(self, answer: Body) -> bool:
        """See Api."""
        return "content" in answer and answer.get("type") == "message"

    def prompt_tokens(self, answer: Body) -> int | None:
        """See Api. Anthropic counts what was cached apart from the rest."""
        rest = count(answer, "usage", "input_tokens")
        return None if rest is None else rest + _cache(answer)

    def cached_tokens(self, answer: Body) -> int | None:
        """See Api."""
        return count(answer, "usage", "cache_read_input_tokens")

    def set_cached_tokens(self, answer: Body, tokens: int | None) -> None:
        """See Api."""
        usage, total = answer.get("usage"), self.prompt_tokens(answer)
        if not isinstance(usage, dict) or total is None:
            return
        usage.pop("cache_read_input_tokens", None)
        if "cache_creation_input_tokens" in usage:
            usage["cache_creation_input_tokens"] = 0
        usage["input_tokens"] = max(0, total - (tokens or 0))
        if tokens is not None:
            usage["cache_read_input_tokens"] = tokens

    def calls_tools(self, answer: Body) -> bool:
        """See Api."""
        return ends_with_tools(answer.get("stop_reason"))

    def error_body(self, message: str, status: int, *, param: str | None = None) -> bytes:
        """See Api. This API does not name parameters; our messages do."""
        return messages_error(message, status)

    def engine_error(self, body: bytes, status: int) -> bytes:
        """See Api. vLLM answers what it refuses before it looks at the request in OpenAI's shape."""
        answer, message = read_error(body, status)
        whole = is_error(answer) and answer.get("type") == "error"
        return body if whole else messages_error(message, status)


def _cache(answer: Body) -> int:
    names = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(count(answer, "usage", name) or 0 for name in names)
