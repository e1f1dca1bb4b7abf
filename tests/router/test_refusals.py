"""What is refused, by the router or by an engine: always in the API's shape, and never with a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web

from kvplane.router import openai
from tests.router.rig import CHAT, Rig, chat, rig

MESSAGES = "/v1/messages"


async def exchange(r: Rig, head: str, body: bytes = b"") -> tuple[int, dict[str, str], Any]:
    """Send a request as it is written; returns status, headers and the JSON of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
    lines = f"{head}\r\nHost: r\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(lines.encode() + body)
    said = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    top, _, rest = said.partition(b"\r\n\r\n")
    first, *others = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in others)}
    return int(first.split()[1]), headers, json.loads(rest)


@pytest.mark.parametrize(
    ("head", "status", "allow"),
    [
        ("GET /v1/chat/completions HTTP/1.1", 405, "POST"),
        ("GET /v1/embeddings HTTP/1.1", 405, "POST"),
        ("DELETE /v1/responses/resp_1 HTTP/1.1", 405, "GET,HEAD"),
        ("PUT /v1/conversations/a HTTP/1.1", 405, "DELETE"),
        ("POST /health HTTP/1.1", 405, "GET,HEAD"),
        ("OPTIONS * HTTP/1.1", 404, None),
        ("CONNECT a:443 HTTP/1.1", 404, None),
        ("POST /v1/chat/completions HTTP/1.1\r\nExpect: foo", 417, None),
        ("GET /v1/messages HTTP/1.1", 405, "POST"),
        ("GET /v1/messages/count_tokens HTTP/1.1", 405, "POST"),
        ("POST /v1/messages/batches HTTP/1.1", 404, None),
        ("POST /v1/messages HTTP/1.1\r\nExpect: foo", 417, None),
    ],
)
async def test_what_no_handler_sees_is_refused_in_the_apis_shape(
    head: str, status: int, allow: str | None
) -> None:
    async with rig() as r:
        found, headers, answer = await exchange(r, head)
        assert (found, headers.get("allow")) == (status, allow)
        assert headers["content-type"] == "application/json"
        assert headers["x-request-id"]
        assert answer["error"]["message"]
        assert answer.get("type") == ("error" if MESSAGES in head else None)
        assert ("code" in answer["error"]) == (MESSAGES not in head)


# Engines' errors


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("<html>no</html>", "<html>no</html>"),
        ("", "The engine answered 422 and did not say why."),
        ("[]", "[]"),
        ('{"detail": "no"}', "no"),
        ('{"detail": [{"loc": ["body", "n"]}]}', '[{"loc":["body","n"]}]'),
        ('{"error": "plain"}', "plain"),
        ('{"object": "error", "message": "old"}', "old"),
        ('{"error": {"message": 7}}', "7"),
        ("x" * 5000, "x" * 1000),
        ("[" * 2000 + "]" * 2000, "[" * 1000),
    ],
)
@pytest.mark.parametrize("to", [CHAT, MESSAGES])
async def test_an_engines_refusal_gets_the_apis_shape(said: str, message: str, to: str) -> None:
    async with rig(prefill=0) as r:
        r.d.faults.append(f"422 {said}")
        reply = await r.post(chat("hello"), to=to)
        assert (reply.status, reply.headers["content-type"]) == (422, "application/json")
        error = reply.body.pop("error")
        if to == CHAT:
            assert error == {"message": message, "type": "BadRequestError", "param": None, "code": 422}
        else:
            assert (error, reply.body) == (
                {"type": "invalid_request_error", "message": message},
                {"type": "error"},
            )


async def test_an_engines_error_in_the_apis_shape_stays_as_it_is() -> None:
    async with rig(prefill=0) as r:
        own = {"error": {"message": "no", "type": "odd", "more": 1}}
        r.d.faults.append(f"400 {json.dumps(own)}")
        reply = await r.post(chat("hello"))
        assert (reply.body, reply.headers["content-type"]) == (own, "text/html; charset=utf-8")
        own["type"] = "error"  # type: ignore[assignment]
        r.d.faults.append(f"400 {json.dumps(own)}")
        assert (await r.post(chat("hello"), to=MESSAGES)).body == own


async def test_an_engine_that_lists_very_nested_models_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as r:
        deep = "[" * 960 + "]" * 960
        for engine in (r.p, r.d):
            text = '{"data": [{"id": "fake", "more": ' + deep + "}]}"

            async def answer(request: web.Request, text: str = text) -> web.Response:
                return web.Response(text=text, content_type="application/json")

            monkeypatch.setattr(engine, "_models", answer)
            await engine.stop()
            await engine.start()
        for probed in r.router.pool.engines:
            probed.models_at = 0.0
        await r.router.pool.probe_all()
        async with r.http.get(r.url + "/v1/models") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == 503


# Bodies


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [255, 256, 950, 963, 966, 969, 2000])
@pytest.mark.parametrize("to", [CHAT, MESSAGES, "/tokenize", "/v1/conversations/c/touch"])
async def test_very_nested_json_is_a_400(depth: int, to: str) -> None:
    async with rig(prefill=0) as r:
        # In an object, so that one less is allowed.
        body = {**chat("x"), "kv_transfer_params": 1, "tools": "here"}
        reply = await r.post(json.dumps(body).encode().replace(b'"here"', nested(depth)), to=to)
        # A touch takes nothing but ttl_s, so it refuses this one too, for what it has.
        flat = 400 if to.endswith("/touch") else 200
        assert reply.status == (flat if depth == 255 else 400)
        assert ("nested too deeply" in json.dumps(reply.body)) is (depth != 255)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be"])
def test_brackets_in_strings_do_not_count(encoding: str) -> None:
    text = json.dumps(["]" * 300, "[" * 300, "\\", '"[' * 300, '\\"[', "é[" * 300, {}])
    assert openai.parse_json(text.encode(encoding)) == json.loads(text)
    hidden = f'["]]]]]\\"]]]]]]]", "\\\\", {"[" * 256}{"]" * 256}]'
    with pytest.raises(openai.BadRequestError, match="nested too deeply"):
        openai.parse_json(hidden.encode(encoding))


@pytest.mark.parametrize("encoding", ["bogus", "x-gzip", "gzip, gzip"])
@pytest.mark.parametrize("to", [CHAT, "/tokenize", "/v1/conversations/c/touch"])
async def test_an_unknown_encoding_is_415(encoding: str, to: str) -> None:
    async with rig() as r:
        reply = await r.post(chat("hello"), to=to, headers={"Content-Encoding": encoding})
        assert (reply.status, "Content-Encoding" in reply.body["error"]["message"]) == (415, True)


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_no_encoding_may_be_named(encoding: str) -> None:
    async with rig() as r:
        assert (await r.post(chat("hello"), headers={"Content-Encoding": encoding})).status == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [(f"POST {CHAT}", 400), ("POST /tokenize", 400), ("GET /health", 200), ("GET /nowhere", 404)],
)
async def test_a_body_that_cannot_be_unpacked_is_not_logged_as_a_fault(
    line: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as r:
        found, _, _ = await exchange(r, f"{line} HTTP/1.1\r\nContent-Encoding: gzip", b"no gzip")
        assert found == status
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_who_asks_for_the_root_is_told_what_there_is() -> None:
    async with rig() as r:
        status, _, body = await exchange(r, "GET / HTTP/1.1")
        assert status == 404
        assert "/v1/models" in str(body)
        assert "/ui" in str(body)
        assert "/ui" not in str((await exchange(r, "GET /nowhere HTTP/1.1"))[2])
