"""Requests and answers of each generation API, without any engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.api import Api
from kvplane.router.app import APIS
from kvplane.router.chat import ChatCompletions, Completions
from kvplane.router.messages import Messages
from kvplane.router.replies import StreamGuard
from kvplane.router.responses import Responses

CHAT, COMPLETIONS, RESPONSES, MESSAGES = ChatCompletions(), Completions(), Responses(), Messages()
EVERY = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


@pytest.mark.parametrize(
    ("api", "body", "leg"),
    [
        (CHAT, {"n": 3, "best_of": 4, "stream_options": {}}, {"n": 1, "max_tokens": 1}),
        (CHAT, {"max_completion_tokens": 500, "min_tokens": 5}, {"max_completion_tokens": 1}),
        (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 1}),
        (RESPONSES, {"max_output_tokens": 500, "store": True}, {"max_output_tokens": 1, "store": False}),
        (
            RESPONSES,
            {"request_id": "resp_1", "max_tool_calls": 2},
            {"max_output_tokens": 1, "max_tool_calls": 2, "store": False},
        ),
        (
            MESSAGES,
            {"max_tokens": 9, "thinking": {"type": "x"}},
            {"max_tokens": 1, "thinking": {"type": "x"}},
        ),
    ],
)
def test_the_prefill_leg_makes_one_token_cases_13_16_17_18_19_21(
    api: Api, body: dict[str, Any], leg: dict[str, Any]
) -> None:
    common = {"model": "m", "stop": ["x"], "tools": [{"type": "function"}], "unknown": 1.0}
    sent = {**common, "stream": True, **body}
    whole = json.loads(json.dumps(sent))
    params = {"a": 1}
    assert api.prefill_body(sent, params) == {**common, "stream": False, "kv_transfer_params": params, **leg}
    assert sent == whole
    assert api.decode_body(sent, params) == {**sent, "kv_transfer_params": params}


@pytest.mark.parametrize(
    ("api", "body", "reason"),
    [
        (CHAT, {}, None),
        (CHAT, {"n": 1, "best_of": 1}, None),
        (CHAT, {"n": True}, None),
        (CHAT, {"n": 2}, "several_choices"),
        (CHAT, {"best_of": 2}, "several_choices"),
        (CHAT, {"use_beam_search": True}, "several_choices"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several_prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "several_prompts"),
        (COMPLETIONS, {"prompt_embeds": ["a"]}, "several_prompts"),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "custom"}]}, None),
        (RESPONSES, {"tools": [{"type": "web_search_preview"}]}, "engine_runs_tools"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "stored_response"),
        (MESSAGES, {"n": 2, "tools": [{"name": "x"}]}, None),
    ],
)
def test_what_cannot_be_split_case_21(api: Api, body: dict[str, Any], reason: str | None) -> None:
    assert api.decode_only_reason(body) == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), x),
)


@EVERY
@given(JSON)
def test_anything_can_be_measured(api: Api, value: Any) -> None:
    for body in (
        {"messages": value, "input": value, "prompt": value, "system": value, "instructions": value},
        {"messages": [value], "input": [value], "tools": value},
        {"messages": [{"role": value, "content": "text"}], "input": [{"type": value, "output": value}]},
        {"messages": [{"role": "user", "content": value}], "input": [{"role": "user", "content": value}]},
    ):
        assert api.prompt_text(body).characters >= 0
        api.decode_only_reason(body)
        api.history(body)
        api.calls_tools({"choices": value, "output": value, "stop_reason": value})
        api.cached_tokens({"usage": value})
        api.prompt_tokens({"usage": value})


@pytest.mark.parametrize("api", [CHAT, RESPONSES])
@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": 9, "other": 1}])
def test_cached_tokens_are_set_or_taken_off_case_23(api: Api, details: Any) -> None:
    usage = {"prompt_tokens_details": details, "input_tokens_details": details}
    answer: dict[str, Any] = {"usage": usage}
    api.set_cached_tokens(answer, 4)
    assert api.cached_tokens(answer) == 4
    api.set_cached_tokens(answer, None)
    assert api.cached_tokens(answer) is None


def test_cached_tokens_of_messages_are_apart_from_the_rest_case_23() -> None:
    usage = {"input_tokens": 1, "cache_read_input_tokens": 99, "cache_creation_input_tokens": 3}
    answer = {"usage": {**usage, "output_tokens": 5}}
    assert MESSAGES.prompt_tokens(answer) == 103
    MESSAGES.set_cached_tokens(answer, 40)
    assert MESSAGES.prompt_tokens(answer) == 103
    assert (MESSAGES.cached_tokens(answer), answer["usage"]["input_tokens"]) == (40, 63)
    MESSAGES.set_cached_tokens(answer, None)
    assert (MESSAGES.cached_tokens(answer), answer["usage"]["input_tokens"]) == (None, 103)


@EVERY
@pytest.mark.parametrize("usage", [None, 5, []])
def test_an_answer_without_usage_stays_so(api: Api, usage: Any) -> None:
    answer = {"usage": usage}
    api.set_cached_tokens(answer, 4)
    assert answer == {"usage": usage}


PRIVATE = {"remote_host": "10.0.0.1", "tp_size": 1}
EVENTS: list[tuple[Api, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"choices": [], "kv_transfer_params": PRIVATE}, {"choices": []}),
    (
        CHAT,
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}},
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
    ),
    (
        RESPONSES,
        {"type": "response.completed", "response": {"id": "r", "ec_transfer_params": PRIVATE, "usage": None}},
        {"type": "response.completed", "response": {"id": "r", "usage": None}},
    ),
    (
        MESSAGES,
        {"type": "message_start", "message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 8}}},
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}},
    ),
    (CHAT, {"choices": [{"delta": {"content": '"kv_transfer_params": 1 cached_tokens'}}]}, {}),
]


@pytest.mark.parametrize(("api", "event", "expected"), EVENTS)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_streams_are_cleaned_wherever_they_are_cut_cases_9_33(
    api: Api, event: dict[str, Any], expected: dict[str, Any], end: bytes
) -> None:
    before = b'event: x\ndata: {"n": 1}' + end + b": ping" + end
    after = b"data: [DONE]" + end
    raw = before + b"data: " + json.dumps(event).encode() + end + after
    for size in (1, 2, 7, 64, len(raw)):
        guard, out = StreamGuard(api, 4), b""
        for start in range(0, len(raw), size):
            out += guard.passed(raw[start : start + size])
        out += guard.rest()
        assert out.startswith(before)
        assert out.endswith(after)
        middle = out[len(before) : -len(after)].strip()
        assert middle.startswith(b"data: ")
        assert json.loads(middle[6:]) == (expected or event)


@given(st.lists(st.binary(max_size=40)))
def test_what_holds_nothing_private_passes_byte_by_byte(pieces: list[bytes]) -> None:
    guard = StreamGuard(CHAT, None)
    assert b"".join(map(guard.passed, pieces)) + guard.rest() == b"".join(pieces)


def test_whole_events_are_not_held_back_case_9() -> None:
    guard = StreamGuard(CHAT, None)
    assert guard.passed(b"data: 1\n\ndata: 2\n\nda") == b"data: 1\n\ndata: 2\n\n"
    assert guard.passed(b"ta: 3\n\n") == b"data: 3\n\n"


def test_an_endless_event_takes_no_endless_memory() -> None:
    guard, sent = StreamGuard(CHAT, None), 0
    for _ in range(20):
        sent += len(guard.passed(b"x" * (1 << 20)))
    assert 20 * (1 << 20) - sent <= 5 << 20
