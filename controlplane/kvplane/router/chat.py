"""Chat Completions and Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplane.router.api import Api, Said, count, ends_with_tools, is_one, messages_text, objects, plain_text
from kvplane.router.openai import NO_TEXT, Body, PromptText


class _Choices(Api):
    """What the two have in common: an answer of choices, usage as OpenAI first counted it."""

    limits = ("max_tokens", "max_completion_tokens")
    not_for_prefill = ("stream_options", "min_tokens", "best_of")
    length_name = b'prompt_tokens"'

    def prefill_body(self, body: Body, params: Mapping[str, Any]) -> Body:
        """See Api."""
        leg = super().prefill_body(body, params)
        if "n" in leg:
            leg["n"] = 1
        return leg

    def decode_only_reason(self, body: Body) -> str | None:
        """See Api.

        Several sequences would each read the prefill engine's blocks, which are freed after the first read;
        logprobs of the prompt need the whole prompt computed where they are returned.
        """
        if not is_one(body.get("n")) or not is_one(body.get("best_of")) or body.get("use_beam_search"):
            return "several_choices"
        if body.get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        if body.get("echo") and (body.get("logprobs") or body.get("prompt") is not None):
            return "echo"
        return None

    def is_answer(self, answer: Body) -> bool:
        """See Api."""
        return "choices" in answer

    def prompt_tokens(self, answer: Body) -> int | None:
        """See Api."""
        return count(answer, "usage", "prompt_tokens")

    def cached_tokens(self, answer: Body) -> int | None:
        """See Api."""
        return count(answer, "usage", "prompt_tokens_details", "cached_tokens")

    def set_cached_tokens(self, answer: Body, tokens: int | None) -> None:
        """See Api."""
        set_details(answer.get("usage"), "prompt_tokens_details", tokens)

    def calls_tools(self, answer: Body) -> bool:
        """See Api."""
        return ends_with_tools(*(choice.get("finish_reason") for choice in objects(answer.get("choices"))))


def set_details(usage: object, name: str, tokens: int | None) -> None:
    """Set or take off `cached_tokens` in the details of a usage object."""
    if not isinstance(usage, dict):
        return
    details = usage.get(name)
    if tokens is not None:
        usage[name] = {**(details if isinstance(details, dict) else {}), "cached_tokens": tokens}
    elif isinstance(details, dict):
        details.pop("cached_tokens", None)


class ChatCompletions(_Choices):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def prompt_text(self, body: Body) -> PromptText:
        """See Api."""
        messages = body.get("messages")
        return messages_text(messages, body.get("tools")) if isinstance(messages, list) else NO_TEXT

    def history(self, body: Body) -> Sequence[Said]:
        """See Api."""
        return [
            Said(role, _content(message), role == "assistant")
            for message in objects(body.get("messages"))
            if isinstance(role := message.get("role"), str)
        ]


def _content(message: Body) -> object:
    said = message.get("content")
    called = message.get("tool_call_id")
    return said if called is None else [{"tool": called}, *(said if isinstance(said, list) else [said])]


class Completions(_Choices):
    """POST /v1/completions."""

    path = "/v1/completions"

    def decode_only_reason(self, body: Body) -> str | None:
        """See Api."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            return "several_prompts"
        if isinstance(body.get("prompt_embeds"), list):
            return "several_prompts"
        return super().decode_only_reason(body)

    def prompt_text(self, body: Body) -> PromptText:
        """See Api."""
        return plain_text(body.get("prompt"))

    def history(self, body: Body) -> None:
        """See Api."""
        return
