"""Play conversations through the router, as any OpenAI client would, and time an answer's first word."""

import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 300.0
PATH_HEADER = "x-kvplane-path"
VOCABULARY = """
river stone market letter window garden bridge winter signal copper engine harbor lantern meadow paper planet
rocket salmon timber valley violin weather yellow anchor basket candle desert eleven forest glacier hammer
island jacket kettle ladder mirror needle orange pepper quarry ribbon saddle tunnel umbrella vessel
"""
WORDS = tuple(VOCABULARY.split())

Message = Mapping[str, str]


class DemoError(Exception):
    """The demo cannot go on; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer."""

    text: str
    ttft_ms: float
    """From sending the request to the first piece of content."""
    prompt_tokens: int
    path: str
    """What the router says it did: cold, pull or direct."""
    reason: str
    reused_tokens: int | None
    """What the router says was reused, where it knows."""


def words(count: int, seed: str) -> str:
    """Return `count` words; the same seed gives the same text, another seed another."""
    source = random.Random(seed)
    return " ".join(source.choice(WORDS) for _ in range(count))


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream up to its end mark."""
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            answer.read()  # to the very end: a client that hangs up early counts as gone
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise DemoError(f"the stream broke off: {json.dumps(event['error'])[:300]}")
        yield event


def ask(
    router_url: str,
    messages: Sequence[Message],
    *,
    model: str,
    conversation_id: str,
    path: str,
    max_tokens: int,
) -> Reply:
    """Send one turn with the path forced to `path` and read the streamed answer to its end.

    Raises DemoError when the router answers with an error, with nothing, or not in TIMEOUT_SECONDS.
    """
    body = json.dumps(
        {
            "model": model,
            "messages": list(messages),
            "conversation_id": conversation_id,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,  # every answer has the same length
        }
    )
    headers = {"content-type": "application/json", PATH_HEADER: path}
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(router_url).netloc, timeout=TIMEOUT_SECONDS)
    try:
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body=body, headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            text = " ".join(answer.read(2000).decode(errors="replace").split())
            raise DemoError(f"the router answered {answer.status}: {text[:300]}")
        first: float | None = None
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        for event in _events(answer):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                content = choice.get("delta", {}).get("content")
                if content:
                    first = first or time.perf_counter()
                    pieces.append(content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DemoError(f"no usable answer from the router at {router_url}: {error!r}") from error
    finally:
        connection.close()
    if first is None:
        raise DemoError(f"the router's answer ended without any content (path {path})")
    if "prompt_tokens" not in usage:
        raise DemoError("the stream carried no usage although stream_options asked for it")
    reused = answer.getheader("x-kvplane-reused-tokens")
    return Reply(
        text="".join(pieces),
        ttft_ms=(first - begin) * 1000,
        prompt_tokens=int(usage["prompt_tokens"]),
        path=answer.getheader(PATH_HEADER) or "unknown",
        reason=answer.getheader("x-kvplane-reason") or "no reason given",
        reused_tokens=int(reused) if reused is not None and reused.isdigit() else None,
    )
