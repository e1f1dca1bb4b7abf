"""What clients and engines of a router plausibly say, and how answers are read by a client."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.fuzz.chance import Chance
from tests.fuzz.world import params, spoiled_json

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
APIS = (CHAT, CHAT, COMPLETIONS, RESPONSES, MESSAGES)
PRIVATE = ("kv_transfer_params", "ec_transfer_params")
STEERED = "steered-by-a-client"
"""What clients put into transfer params; it must never be in those that an engine is sent."""
Body = dict[str, Any]

FIELDS = (
    "model", "messages", "prompt", "input", "stream", "stream_options", "n", "max_tokens", "conversation_id",
    "conversation", "previous_response_id", "session_id", "prompt_cache_key", "kv_transfer_params",
    "vllm_xargs", "cache_salt", "tools", "tool_choice", "echo", "prompt_logprobs", "background", "store",
    "system", "instructions", "best_of", "logprobs", "use_beam_search", "min_tokens", "max_completion_tokens",
    "request_id", "documents", "chat_template", "truncate_prompt_tokens", "ttl_s", "thinking",
)  # fmt: skip


def said(chance: Chance) -> list[Body]:
    """Return a conversation's messages, of few words."""
    roles = ("user", "assistant")
    count = chance.pick((1, 1, 2, 3, 5))
    made: list[Body] = [
        {"role": roles[number % 2], "content": chance.pick(("hi", "hello there", "x" * 2000, ""))}
        for number in range(count)
    ]
    if chance.odds(0.1):
        made[0]["content"] = [
            {"type": "text", "text": "hi"},
            {"type": "image_url", "image_url": {"url": "data:,"}},
        ]
    return made


def request(path: str, chance: Chance) -> Body:
    """Return a request's body that is as it should be."""
    body: Body = {"model": "m", "stream": chance.odds(0.4)}
    if path == COMPLETIONS:
        body["prompt"] = chance.pick(("hi", [1, 2, 3], ["a", "b"], "x" * 3000))
        body["max_tokens"] = 8
    elif path == RESPONSES:
        body["input"] = chance.pick(("hi", said(chance)))
        if chance.odds(0.2):
            body["previous_response_id"] = chance.pick(("resp_1", "resp_kvp_0_0_0_0", "x"))
    else:
        body["messages"] = said(chance)
        body["max_tokens"] = 8
    if chance.odds(0.7):
        body["conversation_id"] = chance.pick(("c1", "c2", "c3"))
    if chance.odds(0.1):
        body["kv_transfer_params"] = {"remote_host": STEERED, "do_remote_prefill": True}
    if chance.odds(0.05):
        body["vllm_xargs"] = {"kv_transfer_params": {"remote_host": STEERED}, "other": 1}
    return body


def reply(path: str, chance: Chance) -> Body:
    """Return an engine's whole answer, with its private params."""
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    end = chance.pick(("stop", "length", "tool_calls"))
    body: Body = {"id": "x", "model": "m", "kv_transfer_params": private(chance)}
    if path == RESPONSES:
        item = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
        usage = {"input_tokens": 20, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
        return {**body, "object": "response", "status": "completed", "output": [item], "usage": usage}
    if path == MESSAGES:
        usage = {"input_tokens": 20, "output_tokens": 2, "cache_read_input_tokens": 3}
        content = [{"type": "text", "text": "hi"}]
        return {**body, "type": "message", "content": content, "stop_reason": "end_turn", "usage": usage}
    choice: Body = {"index": 0, "finish_reason": end, "kv_transfer_params": None}
    choice |= {"text": "hi"} if path == COMPLETIONS else {"message": {"role": "assistant", "content": "hi"}}
    return {**body, "object": "chat.completion", "choices": [choice], "usage": usage}


def private(chance: Chance) -> Body:
    """Return kv_transfer_params as a prefill engine with our connector answers."""
    made = params("p1")
    if chance.odds(0.8):
        made["kvplane"] = {
            "outcome": chance.pick(("pulled", "cold", "mismatch", "local_hit")),
            "detail": chance.pick(("", "reset")),
            "reused_tokens": 64,
            "local_tokens": 0,
        }
    return made


def events(path: str, chance: Chance) -> list[bytes]:
    """Return an engine's stream, event by event."""
    whole = reply(path, chance)
    if path == RESPONSES:
        said: list[tuple[str, Body]] = [
            ("response.created", {"response": {**whole, "status": "in_progress", "output": []}}),
            ("response.output_text.delta", {"delta": "hi"}),
            ("response.completed", {"response": whole}),
        ]
    elif path == MESSAGES:
        said = [
            ("message_start", {"message": whole}),
            ("content_block_delta", {"delta": {"type": "text_delta", "text": "hi"}}),
            ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": whole["usage"]}),
            ("message_stop", {}),
        ]
    else:
        piece = {"index": 0, "delta": {"content": 'say "kv_transfer_params"'}, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
        said = [
            ("", {"id": "x", "choices": [piece]}),
            ("", {"id": "x", "choices": [last], "kv_transfer_params": whole["kv_transfer_params"]}),
            ("", {"id": "x", "choices": [], "usage": whole["usage"]}),
        ]
    if chance.odds(chance.wild):
        chance.shuffle(said)
    made = []
    for kind, body in said:
        value: Any = {"type": kind, **body} if kind else body
        if chance.odds(chance.wild):
            value = spoiled_json(value, chance, PRIVATE)
        line = b"data: " + json.dumps(value, ensure_ascii=chance.odds(0.5)).encode("utf-8", "replace")
        made.append((b"event: " + kind.encode() + b"\n" if kind else b"") + line + b"\n\n")
    if path in (CHAT, COMPLETIONS):
        made.append(b"data: [DONE]\n\n")
    if chance.odds(0.1):
        made.insert(chance.below(len(made)), chance.pick((b": ping\n\n", b"\n\n", b"\r\n", b"event: x\n\n")))
    if chance.odds(0.1):
        end = chance.pick((b"\r\n", b"\r"))
        made = [event.replace(b"\n", end) for event in made]
    if chance.odds(chance.wild):
        escaped = chance.pick(
            (b"\\u006bv_transfer_params", b"kv\\u005ftransfer_params", b"kv_transfer_param\\u0073")
        )
        made = [event.replace(b"kv_transfer_params", escaped) for event in made]
    return made


def dechunked(raw: bytes) -> bytes:
    """Return a body in chunks as the client puts it together, as far as it came."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size.partition(b";")[0] or b"0", 16)
        if not length:
            break
        body, raw = body + raw[:length], raw[length + 2 :]
    return body


class Answer:
    """An answer of the router's, as a client reads it."""

    def __init__(self, raw: bytes) -> None:
        head, separator, body = raw.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        self.status = int(line.split(b" ")[1]) if separator else 0
        self.headers = {}
        for field in fields:
            name, _, value = field.partition(b":")
            self.headers[name.strip().lower().decode("latin1")] = value.strip().decode("latin1")
        self.body = dechunked(body) if self.headers.get("transfer-encoding") == "chunked" else body
        self.kind = self.headers.get("content-type", "").partition(";")[0]

    def values(self) -> list[Any]:
        """Return the JSON values in it: one, or those of a stream's events."""
        if self.kind != "text/event-stream":
            return _values([self.body])
        return stream_values(self.body)


_LINE_END = re.compile(rb"\r\n|\n|\r")


def stream_values(stream: bytes) -> list[Any]:
    """Return the JSON values of a stream's events, as the standard has it, also of one that was cut off."""
    found, data = list[bytes](), list[bytes]()
    for line in [*_LINE_END.split(stream.removeprefix(b"\xef\xbb\xbf")), b""]:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return _values(found)


def _values(texts: list[bytes]) -> list[Any]:
    values = []
    for text in texts:
        try:
            values.append(json.loads(text))
        except (ValueError, RecursionError):
            continue
    return values


def holds(value: Any, names: tuple[str, ...]) -> bool:
    """Tell whether an object at any depth of a JSON value has a member of such a name."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if any(name in item for name in names):
                return True
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return False
