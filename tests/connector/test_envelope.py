from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.client.model import ConversationKey, Fingerprint
from kvplane.connector.envelope import Envelope, Promise, is_id, read_envelope, read_promise, salted_id

GOOD = {
    "tenant_id": "t",
    "model": "m",
    "adapter": "",
    "conversation_id": "c",
    "turn": 3,
    "endpoint": "http://d:8200",
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_reads_an_envelope() -> None:
    key = ConversationKey("t", "m", "c")
    assert read_envelope({"kvplane": GOOD}) == Envelope(key, 3, "http://d:8200")
    assert read_envelope({"kvplane": {**GOOD, "adapter": "lora", "more": 1}}) == Envelope(
        ConversationKey("t", "m", "c", "lora"), 3, "http://d:8200"
    )


@pytest.mark.parametrize("params", [None, {}, {"kvplane": None}, {"kvplane": []}, {"kvplane": "x"}, [], "x"])
def test_no_envelope(params: Any) -> None:
    assert read_envelope(params) is None
    assert read_promise(params) is None


MALFORMED: list[tuple[str, object]] = [
    *(
        (name, value)
        for name in ("tenant_id", "model", "conversation_id")
        for value in ("", None, 7, "x" * 257)
    ),
    ("conversation_id", []),
    ("conversation_id", "\ud800"),
    ("conversation_id", "é" * 129),
    *(("adapter", value) for value in (None, 7, "x" * 257)),
    *(("turn", value) for value in (0, -1, None, "3", 3.0, True, 2**63)),
    *(("endpoint", value) for value in (None, 7, "x" * 3000)),
]


@pytest.mark.parametrize(("name", "value"), MALFORMED)
def test_malformed_is_as_not_there(name: str, value: object) -> None:
    assert read_envelope({"kvplane": {**GOOD, name: value}}) is None


def test_reads_a_promise() -> None:
    body = {"fingerprint": {"chunk_tokens": 64, "chain": "00ff" * 4}, "token_count": 64}
    assert read_promise({"kvplane": body}) == Promise(Fingerprint(64, bytes.fromhex("00ff" * 4)), 64)


@pytest.mark.parametrize(
    "body",
    [
        {"fingerprint": None, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 64}, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 0, "chain": ""}, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 1 << 17, "chain": ""}, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 64, "chain": "zz"}, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 64, "chain": b"00"}, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 64, "chain": "00" * (1 << 20) + "00"}, "token_count": 64},
        {"fingerprint": {"chunk_tokens": 64, "chain": "00"}, "token_count": 0},
        {"fingerprint": {"chunk_tokens": 64, "chain": "00"}, "token_count": 64.0},
    ],
)
def test_malformed_promises_are_as_not_there(body: object) -> None:
    assert read_promise({"kvplane": body}) is None


@given(json_values)
def test_nothing_that_json_can_say_is_an_error(value: object) -> None:
    for params in ({"kvplane": value}, {"kvplane": {**GOOD, "tenant_id": value}}):
        read_envelope(params)
        read_promise(params)
    read_promise({"kvplane": {"fingerprint": value, "token_count": 1}})
    read_promise({"kvplane": {"fingerprint": {"chunk_tokens": 1, "chain": value}, "token_count": value}})


def test_what_helps_to_learn_is_read() -> None:
    read = read_envelope({"kvplane": {**GOOD, "turn_index": 4, "idle_s": 12, "lease_class": 1023}})
    assert read is not None
    assert (read.turn_index, read.idle_s, read.lease_class) == (4, 12.0, 1023)
    read = read_envelope({"kvplane": {**GOOD, "turn_index": 1, "idle_s": 0.0, "lease_class": 0}})
    assert read is not None
    assert (read.turn_index, read.idle_s, read.lease_class) == (1, 0.0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("turn_index", value) for value in (0, -1, "1", 1.0, True, None, 2**63)),
        *(("idle_s", value) for value in (-0.1, "1", True, None, float("nan"), float("inf"), 10**400)),
        *(("lease_class", value) for value in (-1, 1024, "1", 1.0, True, None)),
    ],
)
def test_what_only_helps_to_learn_is_left_out_where_malformed(name: str, value: object) -> None:
    assert read_envelope({"kvplane": {**GOOD, name: value}}) == read_envelope({"kvplane": GOOD})


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(is_id), st.text(min_size=1))
def test_a_salted_id_is_an_id(conversation_id: str, salt: str) -> None:
    salted = salted_id(conversation_id, salt)
    assert is_id(salted)
    assert salted == salted_id(conversation_id, salt)
    assert len(salted.rpartition("#")[2]) == 32


def test_salted_ids_are_as_different_as_what_they_are_made_of() -> None:
    ids = ["a", "ab", "b", "é" * 128, "é" * 127 + "ab", "x" * 256, "x" * 255 + "y"]
    made = {salted_id(name, salt) for name in ids for salt in ("s", "t", "bs", "\ud800")}
    assert len(made) == 4 * len(ids)
    assert salted_id("a", "s").startswith("a#")
