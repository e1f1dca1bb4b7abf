"""Bytes that HTTP libraries read and cannot write, and params that no JSON can hold: found by fuzzing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvplane.router import connections, served
from kvplane.router.openai import dump, parse_json, read_object
from kvplane.router.upstream import client_headers
from tests.router.rig import CHAT, long_text, rig, until
from tests.router.stub import WELL, Answer, Stub, front
from tests.router.test_hostile import head, raw


@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
@pytest.mark.parametrize("expected", [b"\xe9", b"a miracle", b"100-continue\xff"])
async def test_an_expectation_that_is_none_is_417_in_the_apis_shape(path: str, expected: bytes) -> None:
    async with rig() as r:
        with capture_logs() as logs:
            body = b'{"messages": []}'
            request = head(f"Content-Length: {len(body)}", path=path)
            said = await raw(
                r, request.replace(b"Host: r\r\n", b"Host: r\r\nExpect: " + expected + b"\r\n"), body
            )
        assert said.startswith(b"HTTP/1.1 417 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == 417
        assert not [line for line in logs if line["log_level"] == "error"]


@pytest.mark.parametrize(
    "raw", [b"\xd3", b"", b"[1]", b"[" * 2000 + b"]" * 2000, b'{"a":' * 900 + b"1" + b"}" * 900]
)
async def test_a_location_whose_params_cannot_be_read_is_not_pulled_and_its_claim_is_given_back(
    raw: bytes,
) -> None:
    assert read_object(raw) == {}
    async with rig() as r:
        await r.say(long_text(300))
        (key,) = r.plane.locations
        r.plane.locations[key] = replace(r.plane.locations[key], kv_transfer_params=raw)
        reply = await r.say("and then?", path="pull")
        assert reply.status == 200
        await until(lambda: r.plane.finished)


async def test_headers_with_control_characters_do_not_reach_clients() -> None:
    kept = {"x-a": "b\tc", "x-é": "é"}
    assert client_headers({**kept, "x-b": "a\x00b", "x-\x01": "c", "x-d": "\x7f"}) == kept


async def test_clients_params_are_dropped_from_requests_about_stored_responses_too() -> None:
    seen = list[object]()

    def answer(body: object) -> Answer:
        seen.append(body)
        return Answer(WELL)

    async with front(Stub(answer)) as f:
        sent = {"kv_transfer_params": {"remote_host": "me"}, "reason": "enough"}
        url = f"http://127.0.0.1:{f.router.port}/v1/responses/resp_1/cancel"
        async with f.http.post(url, json=sent) as response:
            assert response.status == 200
    assert seen == [{"reason": "enough"}]


async def test_what_engines_tell_each_other_is_not_in_a_list_of_models() -> None:
    model = {"id": "m", "kv_transfer_params": {"remote_host": "secret"}}

    class Telling(Stub):
        async def _models(self, request):  # type: ignore[no-untyped-def]
            return web.json_response({"object": "list", "data": [model], "kv_transfer_params": {"a": 1}})

    async with front(Telling(Answer(WELL))) as f:
        for path in ("/v1/models", "/v1/models/m"):
            async with f.http.get(f"http://127.0.0.1:{f.router.port}{path}") as response:
                assert "kv_transfer_params" not in await response.text()


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/models"])
async def test_an_answer_that_is_larger_than_any_is_read_no_further(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.read_answer, "__defaults__", (100_000, b""))
    monkeypatch.setattr(served, "MAX_LIST_BYTES", 100_000)
    huge = json.dumps(WELL | {"filler": "x" * 2_000_000}).encode()

    class Large(Stub):
        async def _models(self, request: web.Request) -> web.StreamResponse:
            return web.Response(body=huge if self.listed else b'{"data": [{"id": "fake"}]}')

    async with front(stub := Large(Answer(huge))) as f:
        stub.listed = 1
        if path == "/v1/models":
            async with f.http.get(f"http://127.0.0.1:{f.router.port}{path}") as response:
                assert response.status == 503
            return
        status, _, body = await f.raw(path)
        assert status == 502
        assert b"filler" not in body


@pytest.mark.parametrize(
    "text",
    [
        '{"a":NaN,"b":[-Infinity,Infinity]}',
        "[1e999,-1e999,1e-999,0.1,-0.0]",
        '{"halves":"\\ud800 \\udfff","whole":"\\ud83d\\ude00"}',
        "[18446744073709551616,-9223372036854775809,18446744073709551615]",
        '{"z":{"":null,"a":true},"é":["\\u0000\\u2028"]}',
        "[" * 256 + "]" * 256,
    ],
)
def test_what_json_holds_is_passed_on_as_it_is(text: str) -> None:
    value = parse_json(text.encode("utf-8"))
    assert repr(json.loads(dump(value))) == repr(json.loads(text))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_any_json_is_passed_on_as_it_is(value: object) -> None:
    text = json.dumps(value)
    assert repr(json.loads(dump(parse_json(text.encode())))) == repr(json.loads(text))
