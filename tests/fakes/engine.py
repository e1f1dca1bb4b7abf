"""A fast fake engine with vLLM's HTTP API and the KV behaviour of an engine with our connector.

Start one by hand with `python -m tests.fakes.engine --role decode --port 8200 --plane 127.0.0.1:7400`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections import deque
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Self

from aiohttp import web

if __name__ == "__main__":
    # So that the file can also be started by its path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from tests.fakes import dialects, kv
from tests.fakes.core import Body, EngineConfig, EngineCore, EnginePlane, LoadFailedError, Work


class FakeEngine(EngineCore):
    """An engine on a port of its own. `async with` starts and stops it; `url` is where it answers.

    Faults, each used up by one request, in order: a status as "500", or with a body of its own as
    "400 <html>", "garbage", "hang", "disconnect", "error_stream", "break_stream". None lets one request pass.
    Of these, what generates nothing knows the statuses, "hang" and "disconnect".
    """

    def __init__(self, config: EngineConfig, plane: EnginePlane | None = None) -> None:
        super().__init__(config, plane)
        self.faults: deque[str | None] = deque()
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.passed: list[tuple[str, bytes]] = []
        """What came to routes that generate nothing."""
        self.stored: dict[str, Body] = {}
        """Responses that were to be stored."""
        self.aborted = 0
        self.healthy = True
        self.gate = asyncio.Event()
        """Cleared: replies stop after their first token until it is set."""
        self.gate.set()
        self._runner: web.AppRunner | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The names it answers to."""
        return (self.config.model, *self.config.adapters)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, port: int | None = None) -> None:
        """Listen on a port, by default the one it had before, else a free one; announce itself."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        for path in (dialects.CHAT, dialects.COMPLETIONS, dialects.RESPONSES, dialects.MESSAGES):
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/responses/{id}", self._response)
        app.router.add_get("/version", self._version)
        for path in ("/tokenize", "/v1/embeddings", "/v1/messages/count_tokens", "/v1/audio/transcriptions"):
            app.router.add_post(path, self._echo)
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
        held = self.read_by_other(question["engine_id"], question["request_id"], question["blocks"])
        return web.json_response({"kv": held}, status=200 if held is not None else 409)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "root": self.config.model} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0-fake"})

    async def _response(self, request: web.Request) -> web.Response:
        answer = self.stored.get(request.match_info["id"])
        if answer is None:
            return _error(request.path, 404, "not found")
        return web.json_response(answer)

    async def _echo(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.passed.append((request.path_qs, raw))
        kind = request.headers.get("Content-Type", "")
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault[:3].isdigit():
            return _faulty(request.path, fault, "fault")
        if fault == "disconnect":
            assert request.transport is not None
            request.transport.close()
        if fault == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        answer = {
            "engine": self.engine_id,
            "type": kind,
            "object": "list",
            "model": self.config.model,
            "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
            "usage": {"prompt_tokens": 2, "total_tokens": 2},
            "input_tokens": 7,
        }
        return web.json_response(answer, headers={"x-engine": "yes"})

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "requests": len(self.requests),
                "violations": self.violations,
                "strangers": self.strangers,
                "blocks": self.pool.used,
            }
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault[:3].isdigit():
            headers = {"Retry-After": "7"} if fault in ("429", "503") else {}
            return _faulty(request.path, fault, f"fault {fault}", headers)
        if fault == "garbage":
            return web.Response(text="<html>not what you asked for</html>", content_type="text/html")
        if fault == "disconnect":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        refusal = self._refusal(request.path, body)
        if refusal is not None:
            return refusal
        try:
            if fault == "hang":
                await asyncio.Event().wait()
            alike = dialects.alike(request.path, body)
            work = Work(alike, f"req-{uuid.uuid4().hex[:12]}", kv.prompt_tokens(alike))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        work.prompt_count = len(work.tokens)
        try:
            try:
                await self.prefill(work)
            except LoadFailedError:
                if not body.get("stream"):
                    return _error(request.path, 500, "Internal server error")
                fault = "error_stream"
            reply = dialects.Reply(
                request.path,
                body,
                request.headers.get("X-Request-Id", work.request_id),
                cached=work.local_tokens + max(0, work.pulled_tokens),
                prompt_tokens=work.prompt_count,
            )
            if body.get("stream"):
                return await self._stream(request, work, reply, fault)
            while (token := self.next_token(work)) is not None:
                reply.words.append(kv.word_of(token))
                await self._gap(work)
            reply.private, reply.ends = await self.finish(work), work.finish_reason
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.pool.release(work.blocks)
        if self.config.tells_params and reply.private is None:
            reply.private = {"remote_host": "10.0.0.1"}
        answer = reply.whole()
        if request.path == dialects.RESPONSES and body.get("store", True):
            self.stored[answer["id"]] = answer
        return web.json_response(answer)

    def _refusal(self, path: str, body: Body) -> web.Response | None:
        if body.get("model") not in self.models:
            return _error(path, 404, f"The model `{body.get('model')}` does not exist.")
        prompt = body.get("messages", body.get("prompt", body.get("input")))
        if not isinstance(prompt, list | str):
            return _error(path, 400, "messages: Field required")
        if path == dialects.RESPONSES and {"max_tokens", "max_completion_tokens", "n"} & set(body):
            return _error(path, 400, "a field of another API")
        if path == dialects.MESSAGES and not isinstance(body.get("max_tokens"), int):
            return _error(path, 400, "max_tokens: Field required")
        earlier = body.get("previous_response_id")
        if earlier is not None and earlier not in self.stored:
            return _error(path, 404, f"Response with id '{earlier}' not found.")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is not None and (body.get("min_tokens") or 0) > limit:
            return _error(path, 400, f"min_tokens must be less than or equal to max_tokens={limit}")
        if body.get("stream_options") and not body.get("stream"):
            return _error(path, 400, "Stream options can only be defined when `stream=True`.")
        return None

    async def _gap(self, work: Work) -> None:
        if self.config.token_gap_s:
            await asyncio.sleep(self.config.token_gap_s)
        await self.gate.wait()

    async def _stream(
        self, request: web.Request, work: Work, reply: dialects.Reply, fault: str | None
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        if fault == "error_stream":
            if reply.path == dialects.RESPONSES:
                await out.write(b"".join(islice(reply.starts(), 2)))
            await out.write(reply.fails("KV load failed"))
            return out
        for event in reply.starts():
            await out.write(event)
        while (token := self.next_token(work)) is not None:
            await out.write(reply.says(kv.word_of(token)))
            if fault == "break_stream" and len(work.reply) == 2:
                assert request.transport is not None
                request.transport.close()
                return out
            await self._gap(work)
        reply.private, reply.ends = await self.finish(work), work.finish_reason
        if self.config.tells_params and reply.private is None:
            reply.private = {"remote_host": "10.0.0.1"}
        for event in reply.stops():
            await out.write(event)
        return out


def _faulty(path: str, fault: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    status, with_body, body = fault.partition(" ")
    if with_body:
        return web.Response(status=int(status), text=body, content_type="text/html", headers=headers)
    return _error(path, int(status), message, headers)


def _error(path: str, status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(dialects.error(path, status, message), status=status, headers=headers)


async def _main(arguments: argparse.Namespace) -> None:
    config = EngineConfig(
        role=m.EngineRole(arguments.role),
        model=arguments.model,
        host=arguments.host,
        prefill_s_per_token=arguments.prefill_s_per_token,
        token_gap_s=arguments.token_gap_s,
        connector=not arguments.stock,
        announces_endpoint=arguments.announce_endpoint,
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
    parser.add_argument("--announce-endpoint", action="store_true", help="let routers find it, as its host")
    parser.add_argument("--prefill-s-per-token", type=float, default=0.0)
    parser.add_argument("--token-gap-s", type=float, default=0.0)
    parser.add_argument("--stock", action="store_true", help="behave as vLLM without our connector")
    asyncio.run(_main(parser.parse_args()))
