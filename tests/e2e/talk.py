"""A plain OpenAI client for tests: one turn, streamed or not, with the tokens it brought."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.demo.conversation import words
from deploy.rig.engines import MODEL_NAME

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a turn brought. `tokens` are the reply's, as the engine's logprobs spell them."""

    status: int
    text: str
    tokens: tuple[str, ...]
    path: str
    reason: str
    reused_tokens: int | None
    usage: dict[str, Any]
    body: bytes

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine says it did not compute."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def say(
    url: str,
    messages: Sequence[dict[str, str]],
    conversation_id: str | None,
    *,
    path: str | None = None,
    stream: bool = False,
    max_tokens: int = 16,
    timeout_s: float = 300.0,
) -> Answer:
    """Send one turn and read the answer to its end."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "stream": stream,
    }
    if conversation_id is not None:
        body["conversation_id"] = conversation_id
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json", **({"x-kvplane-path": path} if path else {})}
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", body=json.dumps(body), headers=headers)
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    text, tokens, usage = "", list[str](), dict[str, Any]()
    for event in _events(raw, stream) if answer.status == http.client.OK else []:
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text += (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    reused = answer.getheader("x-kvplane-reused-tokens")
    return Answer(
        status=answer.status,
        text=text,
        tokens=tuple(tokens),
        path=answer.getheader("x-kvplane-path") or "",
        reason=answer.getheader("x-kvplane-reason") or "",
        reused_tokens=int(reused) if reused is not None else None,
        usage=usage,
        body=raw,
    )


def _events(raw: bytes, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return [json.loads(raw)]
    lines = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def user(count: int, seed: str) -> dict[str, str]:
    """Return a user's message of `count` words; the same seed gives the same text."""
    return {"role": "user", "content": words(count, seed)}


def assistant(text: str) -> dict[str, str]:
    """Return the model's answer as a message of the history."""
    return {"role": "assistant", "content": text}
