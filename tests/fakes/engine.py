"""A fast fake engine with vLLM's HTTP API and the KV behaviour of an engine with our connector.

Start one by hand with `python -m tests.fakes.engine --role decode --port 8200 --plane 127.0.0.1:7400`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from aiohttp import web

if __name__ == "__main__":
    # So that the file can also be started by its path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from tests.fakes import kv
from tests.fakes.core import Body, EngineConfig, EngineCore, EnginePlane, Work


class FakeEngine(EngineCore):
    """An engine on a port of its own. `async with` starts and stops it; `url` is where it answers.

    Faults, each used up by one generation request, in order: a status as "500", "garbage", "hang",
    "disconnect", "error_stream", "break_stream". None lets one request pass.
    """

    def __init__(self, config: EngineConfig, plane: EnginePlane | None = None) -> None:
        super().__init__(config, plane)
        self.faults: deque[str | None] = deque()
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self.healthy = True
        self.gate = asyncio.Event()
        """Cleared: replies stop after their first token until it is set."""
        self.gate.set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, port: int | None = None) -> None:
        """Listen on a port, by default the one it had before, else a free one; announce itself."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/kv/read", self._read)
        app.router.add_get("/fake/state", self._state)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.port if port is None else port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        await self.started()

    async def stop(self) -> None:
        """Refuse connections and forget everything, as a killed process does."""
        self.gate.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.stopped()

    # HTTP

    async def _read(self, request: web.Request) -> web.Response:
        question = await request.json()
        return web.json_response({"kv": self.read_by_other(question["request_id"], question["blocks"])})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.config.model, "object": "model"}]})

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"requests": len(self.requests), "violations": self.violations, "blocks": self.pool.used}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.isdigit():
            status = int(fault)
            return _error(status, f"fault {fault}", {"Retry-After": "7"} if status in (429, 503) else {})
        if fault == "garbage":
            return web.Response(text="<html>not what you asked for</html>", content_type="text/html")
        if fault == "disconnect":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        try:
            if fault == "hang":
                await asyncio.Event().wait()
            work = Work(body, f"req-{uuid.uuid4().hex[:12]}", kv.prompt_tokens(body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        work.prompt_count = len(work.tokens)
        try:
            await self.prefill(work)
            if body.get("stream"):
                return await self._stream(request, work, fault)
            while self.next_token(work) is not None:
                await self._gap(work)
            params = await self.finish(work)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.pool.release(work.blocks)
        chat = "messages" in body
        text = " ".join(map(kv.word_of, work.reply))
        message: Body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices = [
            {"index": index, **message, "logprobs": None, "finish_reason": _ends(work)}
            for index in range(int(float(body.get("n") or 1)))
        ]
        return web.json_response(
            {
                "id": f"chatcmpl-{request.headers.get('X-Request-Id', work.request_id)}",
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": body["model"],
                "choices": choices,
                "usage": self._usage(work),
                "kv_transfer_params": params,
                "system_fingerprint": "fake",
            }
        )

    def _refusal(self, body: Body) -> web.Response | None:
        if body.get("model") != self.config.model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        if not isinstance(body.get("messages", body.get("prompt")), list | str):
            return _error(400, "messages: Field required")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is not None and (body.get("min_tokens") or 0) > limit:
            return _error(400, f"min_tokens must be less than or equal to max_tokens={limit}")
        if body.get("stream_options") and not body.get("stream"):
            return _error(400, "Stream options can only be defined when `stream=True`.")
        return None

    async def _gap(self, work: Work) -> None:
        if self.config.token_gap_s:
            await asyncio.sleep(self.config.token_gap_s)
        await self.gate.wait()

    def _usage(self, work: Work) -> Body:
        return {
            "prompt_tokens": work.prompt_count,
            "completion_tokens": len(work.reply),
            "total_tokens": work.prompt_count + len(work.reply),
            "prompt_tokens_details": {"cached_tokens": work.local_tokens + max(0, work.pulled_tokens)},
        }

    async def _stream(self, request: web.Request, work: Work, fault: str | None) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        chat = "messages" in work.body
        base: Body = {
            "id": f"chatcmpl-{work.request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,
            "model": work.body["model"],
        }

        async def send(choice: Body, **more: Any) -> None:
            choices = [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]
            event = {**base, "choices": choices, **more}
            await out.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        if fault == "error_stream":
            await out.write(
                b'data: {"error": {"message": "KV load failed", "code": 500}}\n\ndata: [DONE]\n\n'
            )
            return out
        if chat:
            await send({"delta": {"role": "assistant", "content": ""}})
        while (token := self.next_token(work)) is not None:
            text = ("" if len(work.reply) == 1 else " ") + kv.word_of(token)
            await send({"delta": {"content": text}} if chat else {"text": text})
            if fault == "break_stream" and len(work.reply) == 2:
                assert request.transport is not None
                request.transport.close()
                return out
            await self._gap(work)
        await self.finish(work)
        await send(
            {"delta": {}, "finish_reason": _ends(work)}
            if chat
            else {"text": "", "finish_reason": _ends(work)}
        )
        if (work.body.get("stream_options") or {}).get("include_usage"):
            usage = {**base, "choices": [], "usage": self._usage(work)}
            await out.write(b"data: " + json.dumps(usage).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out


def _ends(work: Work) -> str:
    return "tool_calls" if work.body.get("tool_choice") == "required" else work.finish_reason


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


async def _main(arguments: argparse.Namespace) -> None:
    config = EngineConfig(
        role=m.EngineRole(arguments.role),
        model=arguments.model,
        host=arguments.host,
        prefill_s_per_token=arguments.prefill_s_per_token,
        token_gap_s=arguments.token_gap_s,
        connector=not arguments.stock,
    )
    plane = ControlPlaneClient(arguments.plane) if arguments.plane else None
    engine = FakeEngine(replace(config), plane)
    await engine.start(arguments.port)
    print(f"{arguments.role} engine {engine.engine_id} at {engine.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=[role.value for role in m.EngineRole], required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--plane", help="HOST:PORT of the control plane")
    parser.add_argument("--prefill-s-per-token", type=float, default=0.0)
    parser.add_argument("--token-gap-s", type=float, default=0.0)
    parser.add_argument("--stock", action="store_true", help="behave as vLLM without our connector")
    asyncio.run(_main(parser.parse_args()))
