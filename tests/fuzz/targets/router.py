"""A router between clients and engines, all their bytes in memory: hostile clients, hostile engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

from kvplane.client import convert
from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneError, ControlPlaneUnavailableError
from kvplane.router.admission import AdmissionLimits
from kvplane.router.app import RouterServer
from kvplane.router.health import HealthLimits
from kvplane.router.passing import PASSED
from kvplane.router.settings import RouterSettings
from kvplane.v1 import common_pb2
from tests.fakes.plane import FakePlane
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.messages import make
from tests.fuzz.network import Said, connected, exchange
from tests.fuzz.talk import APIS, CHAT, FIELDS, PRIVATE, STEERED, Answer, events, holds, reply, request
from tests.fuzz.world import World, spoiled_json

P, D1, D2 = "10.0.0.1:8100", "10.0.0.2:8200", "10.0.0.3:8200"
_PATHS = (*APIS * 6, *PASSED, "/v1/conversations/c1/touch", "/v1/responses/resp_1/cancel")
_GETS = ("/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/m", "/v1/responses/resp_1",
         "/debug/turns/x", "/", "/v1", "/openapi.json", "/v1/chat/completions")  # fmt: skip
_HEADERS = (
    "Content-Type", "Content-Encoding", "x-request-id", "x-kvplane-path", "X-Conversation-ID", "X-Session-ID",
    "x-request-timeout", "x-stainless-timeout", "x-data-parallel-rank", "Authorization", "x-api-key",
    "Expect", "Cookie", "Accept-Encoding", "x-envoy-expected-rq-timeout-ms", "session-id",
    "Transfer-Encoding", "Host", "Content-Length", "Connection", "traceparent", "Upgrade", "TE", "X-Odd\x01",
)  # fmt: skip
_VALUES = (
    "", "0", "1", "-1", "gzip", "identity", "chunked", "cold", "pull", "direct", "100-continue", "0.5", "nan",
    "1e400", "close", "keep-alive", "websocket", "x" * 300, "x" * 9000, "é", "a\tb", "application/json",
    "multipart/form-data; boundary=x", "text/plain; charset=utf-16", "bearer x", "\x00",
    "999999999999999999999",
)  # fmt: skip
_REFUSING = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}


class HostilePlane(FakePlane):
    """A control plane whose answers are made up: by default those of an honest one."""

    def __init__(self) -> None:
        super().__init__()
        self.chance: Chance | None = None
        self._fields = World().known()

    def _made(self) -> m.Location:
        assert self.chance is not None
        wire = make(common_pb2.Location.DESCRIPTOR, self.chance, self._fields)
        return convert.location_from_wire(wire)  # type: ignore[arg-type]

    async def _enter(self, call: str, timeout_s: float | None = None) -> None:
        await super()._enter(call, timeout_s)
        if self.chance is not None and self.chance.odds(self.chance.wild / 2):
            errors = (ControlPlaneUnavailableError("x"), ControlPlaneError("x", reason="x"))
            raise self.chance.pick(errors)

    def _known(self, key: m.ConversationKey) -> m.Location | m.MissReason:
        if self.chance is None or self.chance.odds(0.4):
            return super()._known(key)
        if self.chance.odds(0.3):
            return self.chance.pick(list(m.MissReason))
        return self._made()


class RouterTarget(Target):
    """A router that runs for a life; `self.engines` answers what it asks engines."""

    life = 1000

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}
        """More of the router's."""

    async def start(self) -> None:
        self.plane = HostilePlane()
        self.chance: Chance = Chance("start")
        self.sent: list[bytes] = []
        settings = RouterSettings(
            **self.settings,
            port=0,
            plane_address="in-memory:1",
            prefill_urls=(f"http://{P}",),
            decode_urls=(f"http://{D1}", f"http://{D2}"),
            probe_interval_s=1e7,
            poll_interval_s=1e7,
            max_body_bytes=1 << 20,
            admission=AdmissionLimits(max_requests=64),
            health=HealthLimits(consecutive_failures=0, min_requests=10**9),
            explained_turns=100,
        )
        self._stack = ExitStack()
        self._stack.enter_context(connected(self.engines))
        self.router = RouterServer(settings, plane=self.plane)
        await self.router.start()
        runner = self.router._runner
        assert runner is not None
        assert runner.server is not None
        self.server: Callable[[], Any] = runner.server

    async def stop(self) -> None:
        ended = list(self.router._ended)
        admission, bodies = self.router._admission, self.router._bodies
        await asyncio.sleep(2000)  # what was broken off has ended by then
        outstanding = [engine.outstanding for engine in self.router.pool.engines]
        left = [admission.requests, bodies.held_bytes, *outstanding]
        await self.router.stop()
        self._stack.close()
        if ended:
            raise Wrong(f"the router's work ended: {ended}")
        if any(left):
            raise Wrong(f"a request left something behind: {left}")

    def engines(self, host: str, head: bytes, body: bytes) -> Said | None:
        """Answer as an engine that is well."""
        if head == b"CONNECT":
            return Said([])
        path = head.split(b" ", 2)[1].decode("latin1").partition("?")[0]
        if head.startswith(b"GET "):
            return _json({"object": "list", "data": [{"id": "m"}]} if "models" in path else {"version": "1"})
        self.sent.append(body)
        return self.posted(path, body)

    def posted(self, path: str, body: bytes) -> Said:
        if path not in APIS:
            return _json({"ok": 1, "kv_transfer_params": {"remote_host": "x"}})
        if b'"stream":true' in body:
            return _events(events(path, Chance("calm")))
        return _json(reply(path, self.chance))

    def check(self, answer: Answer, *, ours: bool = True) -> str:
        """Return an answer's status; raises Wrong for one that must not be."""
        if any(holds(value, PRIVATE) for value in answer.values()):
            raise Wrong("transfer params reach a client")
        if b"Traceback (most recent" in answer.body or b"site-packages" in answer.body:
            raise Wrong("a traceback reaches a client")
        if ours and answer.status == 500:
            raise Wrong("500")
        for body in self.sent:
            if STEERED.encode() in body and _steers(body):
                raise Wrong("a client's transfer params reach an engine")
        return str(answer.status)

    async def healed(self) -> None:
        """Have engines that were found down be up again."""
        if not all(engine.up for engine in self.router.pool.engines):
            calm, self.calm = getattr(self, "calm", True), True
            await self.router.pool.probe_all()
            self.calm = calm


def _steers(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except ValueError:
        return False
    for holder in (value, value.get("vllm_xargs")) if isinstance(value, dict) else ():
        for name in PRIVATE:
            if isinstance(holder, dict) and STEERED in json.dumps(holder.get(name)):
                return True
    return False


def _json(value: object, status: int = 200) -> Said:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return Said([(0, head.encode() + body)])


def _events(made: list[bytes]) -> Said:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Said([(0, head + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in made) + b"0\r\n\r\n")])


class Clients(RouterTarget):
    """Whatever clients send, to engines that are well."""

    name = "http"
    share = 2.0

    async def once(self, chance: Chance) -> str:
        self.chance = chance
        self.sent.clear()
        raw = self._request(chance)
        if chance.odds(chance.wild / 2):
            raw = chance.spoiled(raw)
        pieces = chance.pieces(raw) if chance.odds(0.3) else [raw]
        self.input = pieces
        leaves = chance.pick((0.0, 0.001, 5.0)) if chance.odds(0.03) else None
        came = await exchange(self.server, pieces, leaves)
        await self.healed()
        return self.check(Answer(came)) if came else "closed"

    def _request(self, chance: Chance) -> bytes:
        kind = chance.below(12)
        if kind == 0:
            path = chance.pick(_GETS)
            if chance.odds(0.2):
                path = "/" + quote(chance.text()[:3000], safe=chance.pick(("", "/?&=%")))
            return _message(chance.pick(("GET", "GET", "HEAD", "OPTIONS", "PUT", "PATCH")), path, b"", chance)
        if kind == 1:
            name = quote(chance.pick(("c1", chance.text()[:2000])), safe="")
            query = chance.pick(("", "?model=m", "?model=&adapter=", "?adapter=%ff", "?model=m&model=x"))
            return _message("DELETE", f"/v1/conversations/{name}{query}", b"", chance)
        path = chance.pick(_PATHS)
        body: Any = request(path if path in APIS else CHAT, chance)
        if path.endswith("/touch"):
            body = {"ttl_s": chance.pick((1, 0, -1, 1e400, "x", None, True, 86_401))}
        if chance.odds(0.1 + chance.wild):
            for _ in range(chance.pick((1, 1, 3))):
                body = spoiled_json(body, chance, FIELDS)
        raw = json.dumps(body, ensure_ascii=chance.odds(0.5)).encode("utf-8", "surrogatepass")
        if chance.odds(chance.wild / 3):
            raw = chance.spoiled(raw)
        if chance.odds(0.02):
            raw = chance.pick((raw.decode("utf-8", "replace").encode("utf-16"), b"", b"[" * 5000, raw * 300))
        if path.startswith("/v1/audio") or chance.odds(0.02):
            raw = _form(raw, chance)
            return _message("POST", path, raw, chance, "multipart/form-data; boundary=x")
        return _message("POST", path, raw, chance)


def _form(raw: bytes, chance: Chance) -> bytes:
    name = chance.pick((b"model", b"file", b"kv_transfer_params", b"vllm_xargs", chance.raw()))
    return (
        b'--x\r\nContent-Disposition: form-data; name="' + name + b'"\r\n\r\nm\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + raw + b"\r\n--x--\r\n"
    )


def _message(method: str, path: str, body: bytes, chance: Chance, kind: str = "application/json") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: r", "Connection: close", f"Content-Type: {kind}"]
    for _ in range(chance.pick((0, 0, 0, 1, 2))):
        name, value = chance.pick(_HEADERS), chance.pick(_VALUES)
        if chance.wild or name not in ("Content-Length", "Transfer-Encoding", "Host", "Connection"):
            lines.append(f"{name}: {value}")
    if chance.odds(0.1):
        body = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in chance.pieces(body) if p) + b"0\r\n\r\n"
        lines.append("Transfer-Encoding: chunked")
    elif body or chance.odds(0.5):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin1", "replace") + b"\r\n\r\n" + body


class HostileEngines(RouterTarget):
    """Requests that are as they should be, to engines and a control plane that answer whatever they like."""

    name = "engines"
    share = 2.0

    calm = True

    async def once(self, chance: Chance) -> str:
        self.chance, self.plane.chance, self.calm = chance, chance, False
        self.sent.clear()
        self.said: list[Any] = []
        path = chance.pick((*APIS, *APIS, *PASSED))
        method = "POST"
        body = request(path if path in APIS else CHAT, chance)
        if chance.odds(0.1):
            method, path = "GET", chance.pick(("/v1/models", "/version", "/v1/responses/resp_1", "/ready"))
        calm = Chance("calm")
        raw = _message(method, path, json.dumps(body).encode() if method == "POST" else b"", calm)
        self.input = (raw, self.said)
        came = await exchange(self.server, [raw], None)
        self.calm = True
        await self.healed()
        return self.check(Answer(came), ours=path in APIS) if came else "closed"

    def engines(self, host: str, head: bytes, body: bytes) -> Said | None:
        if self.calm:
            return super().engines(host, head, body)
        if head == b"CONNECT":
            return None if self.chance.odds(self.chance.wild / 4) else Said([])
        path = head.split(b" ", 2)[1].decode("latin1").partition("?")[0]
        said = self._answer(path, body)
        self.said.append((host, path, said))
        return said

    def _answer(self, path: str, body: bytes) -> Said:
        chance = self.chance
        wild = 0.05 + chance.wild
        streams = b'"stream":true' in body and chance.odds(0.95)
        if streams:
            made = b"".join(events(path, chance))
            made = chance.spoiled(made) if chance.odds(chance.wild) else made
            kind = "text/event-stream"
        else:
            value: Any = reply(path, chance) if path in APIS else {"ok": 1, "kv_transfer_params": {}}
            if chance.odds(wild):
                value = spoiled_json(value, chance, PRIVATE)
            made = json.dumps(value, ensure_ascii=chance.odds(0.5)).encode("utf-8", "surrogatepass")
            if chance.odds(chance.wild / 2):
                made = chance.spoiled(made)
            kind = "application/json"
        status = 200
        if chance.odds(wild / 2):
            status = chance.pick(
                (100, 102, 204, 206, 301, 302, 304, 400, 401, 404, 408, 413, 429, 500, 502, 503, 599)
            )
            if chance.odds(0.5):
                made = json.dumps(spoiled_json(_REFUSING, chance, PRIVATE)).encode("utf-8", "surrogatepass")
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}"]
        if chance.odds(wild / 2):
            lines.append(f"{chance.pick((*_HEADERS, 'Location', 'Retry-After'))}: {chance.pick(_VALUES)}")
        chunked = streams or chance.odds(0.1)
        if chunked:
            made = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in chance.pieces(made) if p)
            made += b"0\r\n\r\n" if not chance.odds(chance.wild / 2) else b""
            lines.append("Transfer-Encoding: chunked")
        elif chance.odds(0.95):
            wrong = chance.pick((1, -1, 100)) if chance.odds(chance.wild / 3) else 0
            lines.append(f"Content-Length: {max(0, len(made) + wrong)}")
        raw = "\r\n".join(lines).encode("latin1", "replace") + b"\r\n\r\n" + made
        if chance.odds(chance.wild / 3):
            raw = chance.spoiled(raw)
        pieces = chance.pieces(raw) if chance.odds(0.5) else [raw]
        slow = chance.odds(wild / 3)
        said = [(chance.pick((0, 0.1, 100, 700)) if slow else 0, piece) for piece in pieces[:300]]
        return Said(said, closes=len(pieces) > 300 or chance.odds(wild / 3))
