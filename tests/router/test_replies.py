"""Answers of engines that are none, or hold what is not for clients."""

from __future__ import annotations

import copy
import gzip
import json
import re
from typing import Any

import aiohttp
import pytest

from kvplane.router.chat import ChatCompletions
from kvplane.router.health import HealthLimits
from kvplane.router.replies import StreamGuard, UnreadableEventError
from tests.fakes import dialects
from tests.router.rig import CHAT, long_text, rig
from tests.router.stub import WELL, Answer, Stub, front

ADDRESS = {"remote_host": "10.0.0.1"}
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
BOOM = b'{"error": {"message": "boom", "code": 500}}\n\n'
OF_ENGINES = ("kv_transfer_params", "10.0.0.1", "u005f")


def private(raw: bytes) -> bool:
    return any(mark.encode() in raw for mark in OF_ENGINES)


# What is no answer


@pytest.mark.parametrize("body", [b"<html>proxy</html>", b"", {"error": {"message": "boom"}}])
async def test_an_engine_whose_answers_are_none_is_ejected(body: Any) -> None:
    bad, well = Stub(Answer(body)), Stub(Answer())
    async with front(bad, well, health=HealthLimits(consecutive_failures=3, ejection_s=60)) as f:
        for _ in range(20):
            assert (await f.post()).status == 200
        assert bad.asked == 3
        assert any(f"{bad.url} fails requests" in problem for problem in (await f.ready())["problems"])


@pytest.mark.parametrize("to", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b": ping\n\n",
        b": ping\n\ndata: " + BOOM,
        b"\ndata: " + BOOM,
        b"\r\n: ping\r\n\r\ndata: " + BOOM.replace(b"\n", b"\r\n"),
        b"data:" + BOOM,
        b'data: {"error"',
        b'data: { "error": 1}\n\n',
        b"event:error\ndata:{}\n\n",
        b"data: [DONE]\n\n",
    ],
)
async def test_nothing_or_an_error_before_the_first_token_is_never_a_200(to: str, stream: bytes) -> None:
    bad = Stub(Answer(stream, events=True))
    async with front(bad) as f:
        assert (await f.post(to, stream=True)).status == 502
        assert bad.asked == 2


async def test_comments_before_the_first_token_and_errors_that_are_none_are_no_error() -> None:
    stream = b': ping\n\ndata: {"error": null, "choices": []}\n\n' + PIECE
    async with front(Stub(Answer(stream, events=True))) as f:
        assert (await f.raw(stream=True))[::2] == (200, stream)


@pytest.mark.parametrize("to", [CHAT, "/tokenize"])
@pytest.mark.parametrize("status", [301, 307, 308])
async def test_clients_are_not_sent_to_engines(to: str, status: int) -> None:
    answer = Answer(b"", status, [("Location", "http://10.0.0.1/inner")])
    async with front(Stub(answer)) as f:
        status, headers, raw = await f.raw(to)
        assert status == 502
        assert "location" not in dict(headers)
        assert not private(raw)


@pytest.mark.parametrize("tokens", [-7, 10**400], ids=["negative", "huge"])
async def test_counts_that_cannot_be_are_no_error(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": tokens}}
    params = {"remote_engine_id": "p", "kvplane": {"local_tokens": tokens, "reused_tokens": tokens}}
    odd = Stub(Answer({**WELL, "usage": usage, "kv_transfer_params": params}))
    async with front(Stub(Answer()), prefill=(odd,)) as f:
        assert [(await f.post(conversation="c")).status for _ in range(2)] == [200, 200]
    reply = dialects.Reply
    async with rig() as r:
        await r.say(long_text(100))
        monkeypatch.setattr(dialects, "Reply", lambda *a, **more: reply(*a, **{**more, "cached": tokens}))
        answer = await r.say("next")
        assert (answer.path, answer.reused in ("0", str(1 << 32))) == ("direct", True)


# What is not for clients


async def test_headers_of_an_engine_that_are_for_itself_stay_there() -> None:
    headers = [
        ("X-Kvplane-Path", "lie"),
        ("X-KVPLANE-TURN", "99"),
        ("Location", "http://10.0.0.1/"),
        ("Set-Cookie", "a=b"),
        ("Set-Cookie", "c=d"),
        ("X-Engine", "yes"),
    ]
    async with front(Stub(Answer(headers=headers))) as f:
        for to in (CHAT, "/tokenize"):
            _, sent, _ = await f.raw(to)
            names = [name for name, _ in sent]
            assert not {"location", "set-cookie", "x-kvplane-turn"} & set(names)
            assert ("x-engine", "yes") in sent
            assert [value for name, value in sent if name == "x-kvplane-path"] in ([], ["cold"])


NESTED = [{**WELL["choices"][0], "kv_transfer_params": ADDRESS}]
NESTED[0]["message"] = {"role": "assistant", "content": "a", "ec_transfer_params": ADDRESS}


@pytest.mark.parametrize("to", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("status", [200, 400, 404, 503])
async def test_params_reach_no_client_however_deep_they_are(to: str, status: int) -> None:
    body = {**WELL, "error": {"message": "m"}, "choices": NESTED, "kv_transfer_params": ADDRESS}
    if status != 200:
        del body["choices"]
    for written in (json.dumps(body), json.dumps(body).replace("kv_", r"kv\u005f")):
        async with front(Stub(Answer(written.encode(), status))) as f:
            got, _, raw = await f.raw(to)
            assert got == status
            assert not private(raw)
            assert json.loads(raw)


@pytest.mark.parametrize("to", [CHAT, "/tokenize"])
@pytest.mark.parametrize("events", [False, True])
async def test_what_is_packed_is_no_answer(to: str, events: bool) -> None:
    packed = gzip.compress(PIECE + b'data: {"kv_transfer_params": {"h": "10.0.0.1"}}\n\n')
    async with front(Stub(Answer(packed, 200, [("Content-Encoding", "gzip")], events))) as f:
        status, headers, raw = await f.raw(to, stream=events)
        assert (status, "content-encoding" in dict(headers)) == (502, False)
        assert packed[:10] not in raw


EVENTS = [
    b'{"choices": [{"kv_transfer_params": {"remote_host": "10.0.0.1"}}]}',
    rb'{"choices": [], "kv\u005ftransfer_params": {"remote_host": "10.0.0.1"}}',
    b'{"choices": [],\ndata: "kv_transfer_params": {"remote_host": "10.0.0.1"}}',
    b'{"choices": [], "kv_transfer_params": {"remote_host": "10.0.0.1"}',
    b'{"a":' + b"[" * 9000 + b"]" * 9000 + b', "kv_transfer_params": {"remote_host": "10.0.0.1"}}',
]


@pytest.mark.parametrize("event", EVENTS, ids=range(len(EVENTS)))
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_params_in_streams_reach_no_client_however_they_are_written(
    event: bytes, end: bytes, size: int
) -> None:
    raw = (PIECE + b"id: 7\ndata: " + event + b"\n\n" + PIECE).replace(b"\n", end)
    guard = StreamGuard(ChatCompletions())
    out = b"".join(guard.passed(raw[at : at + size]) for at in range(0, len(raw), size)) + guard.rest()
    piece = PIECE.replace(b"\n", end)
    assert out.startswith(piece)
    assert out.endswith(piece)
    assert b"id: 7" in out
    assert not private(out)


def test_text_that_names_params_passes_as_it_is() -> None:
    said = rb'data: {"choices": [{"delta": {"content": "\"kv_transfer_params\": \u0061"}}]}' + b"\n\n"
    guard = StreamGuard(ChatCompletions())
    assert guard.passed(said) == said


LONG = b'data: {"choices": [{"delta": {"content": "' + b"a" * (5 << 20) + b'"}}]'


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1 << 18, 1000_003, 1 << 24])
def test_a_long_event_passes_if_there_is_nothing_in_it(end: bytes, size: int) -> None:
    guard, raw = StreamGuard(ChatCompletions()), PIECE + LONG + b"}" + end + PIECE
    out = b"".join(guard.passed(raw[at : at + size]) for at in range(0, len(raw), size)) + guard.rest()
    assert out == raw
    after = b'data: {"kv_transfer_params": {"remote_host": "10.0.0.1"}}' + end
    assert not private(guard.passed(after))


@pytest.mark.parametrize("name", [b"kv_transfer_params", rb"kv\u005ftransfer_params"])
async def test_a_long_event_that_holds_params_ends_its_stream(name: bytes) -> None:
    raw = LONG + b', "' + name + b'": {"remote_host": "10.0.0.1"}}\n\n'
    begun = StreamGuard(ChatCompletions())
    before = begun.passed(raw[: 9 << 19])
    assert not re.search(rb"transfer_p|u005f", before)
    for cut in range(len(LONG) - 2, len(LONG) + 30):
        guard, passed = copy.deepcopy(begun), [before[-100:]]
        with pytest.raises(UnreadableEventError):
            passed += [guard.passed(raw[9 << 19 : cut]), guard.passed(raw[cut:])]
        assert not re.search(rb"transfer_p|u005f", b"".join(passed))
    async with front(Stub(Answer(raw, events=True))) as f:
        for to in (CHAT, "/tokenize"):
            with pytest.raises(aiohttp.ClientPayloadError):
                await f.raw(to, stream=True)


@pytest.mark.parametrize("events", [False, True])
async def test_what_is_nested_so_that_it_can_be_read_but_not_written_is_no_fault(events: bool) -> None:
    stub = Stub(Answer())
    async with front(stub) as f:
        for depth in range(940, 1000):
            deep = b'{"kv_transfer_params": {"h": "10.0.0.1"}, "x": ' + b"[" * depth + b"]" * depth + b"}"
            stub.answer = Answer(b"data: " + deep + b"\n\n" if events else deep, events=events)
            status, _, raw = await f.raw("/tokenize")
            assert (status, private(raw)) == (200, False), depth
