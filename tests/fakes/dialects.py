"""The APIs that a fake engine speaks: requests made alike, and replies as vLLM writes them in each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
REASONING = "let me think"
ARGUMENTS = '{"city": "Oslo"}'


def alike(path: str, body: Body) -> Body:
    """Return a request as Chat Completions or Completions would have it."""
    if path == MESSAGES:
        messages = list(body["messages"])
        if body.get("system"):
            messages.insert(0, {"role": "system", "content": body["system"]})
        return {**body, "messages": messages}
    if path == RESPONSES:
        said = body["input"]
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = [item for item in items if item.get("role")]
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        limit = body.get("max_output_tokens")
        return {**body, "messages": messages, **({} if limit is None else {"max_tokens": limit})}
    return body


@dataclass
class Reply:
    """A reply under way: `words` come one by one, the rest is known when it ends."""

    path: str
    body: Body
    reply_id: str
    cached: int
    prompt_tokens: int
    ends: str = "length"
    words: list[str] = field(default_factory=list)
    private: Body | None = None
    """The kv_transfer_params that the engine answers with."""

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def tools(self) -> bool:
        choice = self.body.get("tool_choice")
        return choice == "required" or (isinstance(choice, dict) and choice.get("type") == "any")

    @property
    def reasons(self) -> bool:
        return any(self.body.get(name) for name in ("reasoning_effort", "reasoning", "thinking"))

    @property
    def usage(self) -> Body:
        """As Chat Completions counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.words),
            "total_tokens": self.prompt_tokens + len(self.words),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    # Whole answers

    def whole(self) -> Body:
        return {RESPONSES: self._response, MESSAGES: self._message}.get(self.path, self._completion)()

    def _completion(self) -> Body:
        chat = self.path == CHAT
        choice: Body = {"text": self.text}
        if chat:
            message: Body = {"role": "assistant", "content": self.text}
            if self.reasons:
                message["reasoning"] = REASONING
            if self.tools:
                message["tool_calls"] = [self._tool_call()]
            choice = {"message": message}
        choices = [
            {"index": index, **choice, "logprobs": self._logprobs(), "finish_reason": self._finish()}
            for index in range(int(float(self.body.get("n") or 1)))
        ]
        return {
            "id": f"chatcmpl-{self.reply_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": self.body["model"],
            "choices": choices,
            "usage": self.usage,
            "kv_transfer_params": self.private,
            "system_fingerprint": "fake",
        }

    def _finish(self) -> str:
        return "tool_calls" if self.tools else self.ends

    def _logprobs(self) -> Body | None:
        if self.path != CHAT or not self.body.get("logprobs"):
            return None
        return {"content": [{"token": word, "logprob": -0.5, "top_logprobs": []} for word in self.words]}

    def _tool_call(self) -> Body:
        call = {"name": "weather", "arguments": ARGUMENTS}
        return {"id": "call_1", "type": "function", "index": 0, "function": call}

    def _response(self, status: str = "") -> Body:
        answer: Body = {
            "id": self.body.get("request_id") or f"resp_{self.reply_id}",
            "object": "response",
            "created_at": 1,
            "model": self.body["model"],
            "output": [] if status else self._items(),
            "status": status or ("incomplete" if self.ends == "length" else "completed"),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.body.get("tools") or [],
            "previous_response_id": self.body.get("previous_response_id"),
            "usage": None,
            "kv_transfer_params": None,
        }
        if not status:
            answer["kv_transfer_params"] = self.private
            answer["usage"] = {
                "input_tokens": self.prompt_tokens,
                "output_tokens": len(self.words),
                "total_tokens": self.prompt_tokens + len(self.words),
                "input_tokens_details": {"cached_tokens": self.cached},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        return answer

    def _items(self) -> list[Body]:
        items: list[Body] = []
        if self.reasons:
            thought = [{"type": "reasoning_text", "text": REASONING}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought})
        text: Body = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": None}
        items.append(
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
        )
        if self.tools:
            call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather"}
            items.append({**call, "arguments": ARGUMENTS, "status": "completed"})
        return items

    def _message(self) -> Body:
        content: list[Body] = [{"type": "text", "text": self.text}]
        if self.reasons:
            content.insert(0, {"type": "thinking", "thinking": REASONING, "signature": "s"})
        if self.tools:
            use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": json.loads(ARGUMENTS)}
            content.append(use)
        answer: Body = {
            "id": f"msg_{self.reply_id}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.body["model"],
            "stop_reason": self._stop_reason(),
            "usage": self._message_usage(),
        }
        return answer | ({"kv_transfer_params": self.private} if self.private is not None else {})

    def _stop_reason(self) -> str:
        return "tool_use" if self.tools else "max_tokens" if self.ends == "length" else "end_turn"

    def _message_usage(self) -> Body:
        return {
            "input_tokens": self.prompt_tokens - self.cached,
            "output_tokens": len(self.words),
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
        }

    # Streams

    def starts(self) -> Iterator[bytes]:
        """What is sent before the first token."""
        if self.path == CHAT:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        elif self.path == RESPONSES:
            for kind in ("created", "in_progress"):
                yield _event(f"response.{kind}", response=self._response("in_progress"))
            item: Body = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress"}
            yield _event("response.output_item.added", output_index=0, item={**item, "content": []})
            part: Body = {"type": "output_text", "text": "", "annotations": []}
            place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
            yield _event("response.content_part.added", part=part, **place)
        elif self.path == MESSAGES:
            message = {**self._message(), "content": [], "stop_reason": None}
            yield _event("message_start", message=message)
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def says(self, word: str) -> bytes:
        """The next token."""
        text = ("" if not self.words else " ") + word
        self.words.append(word)
        if self.path == RESPONSES:
            place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
            return _event("response.output_text.delta", delta=text, **place)
        if self.path == MESSAGES:
            return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        return self._chunk({"delta": {"content": text}} if self.path == CHAT else {"text": text})

    def stops(self) -> Iterator[bytes]:
        """What follows the last token."""
        if self.path == RESPONSES:
            for index, item in enumerate(self._items()):
                yield _event("response.output_item.done", output_index=index, item=item)
            yield _event("response.completed", response=self._response())
            return
        if self.path == MESSAGES:
            yield _event("content_block_stop", index=0)
            if self.tools:
                use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
                yield _event("content_block_start", index=1, content_block=use)
                delta = {"type": "input_json_delta", "partial_json": ARGUMENTS}
                yield _event("content_block_delta", index=1, delta=delta)
                yield _event("content_block_stop", index=1)
            why = {"stop_reason": self._stop_reason(), "stop_sequence": None}
            yield _event("message_delta", delta=why, usage=self._message_usage())
            yield _event("message_stop")
            return
        if self.tools and self.path == CHAT:
            yield self._chunk({"delta": {"tool_calls": [self._tool_call()]}})
        end: Body = {"delta": {}} if self.path == CHAT else {"text": ""}
        yield self._chunk({**end, "finish_reason": self._finish()})
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield (
                b"data: "
                + json.dumps({**self._base(), "choices": [], "usage": self.usage}).encode()
                + b"\n\n"
            )
        yield b"data: [DONE]\n\n"

    def fails(self, message: str) -> bytes:
        """A stream's error."""
        if self.path == MESSAGES:
            return _event("error", error={"type": "internal_error", "message": message})
        if self.path == RESPONSES:
            return _event("error", code="500", message=message, param=None)
        error = {"error": {"message": message, "code": 500}}
        return b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"

    def _base(self) -> Body:
        kind = "chat.completion.chunk" if self.path == CHAT else "text_completion"
        return {"id": f"chatcmpl-{self.reply_id}", "object": kind, "created": 1, "model": self.body["model"]}

    def _chunk(self, choice: Body) -> bytes:
        choices = [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]
        return b"data: " + json.dumps({**self._base(), "choices": choices}).encode() + b"\n\n"


def _event(kind: str, **members: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": 0, **members})
    return f"event: {kind}\ndata: {data}\n\n".encode()


def error(path: str, status: int, message: str) -> Body:
    """Return an error as the engine words it."""
    if path.startswith(MESSAGES):
        return {"type": "error", "error": {"type": "BadRequestError", "message": message}}
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
