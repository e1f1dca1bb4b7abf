"""What is stored comes back as it was; and values that look alike on both sides really do."""

from __future__ import annotations

import inspect
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvplane.client import model as cm
from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.storage.v1 import records_pb2
from kvplane.v1 import engine_pb2

TEXT = st.text(max_size=30)
COUNT = st.integers(0, 2**31 - 1)
HOLDERS = st.builds(m.Holder, TEXT, st.integers(1, 2**62 - 1), TEXT)
KEYS = st.builds(m.ConversationKey, TEXT, TEXT, TEXT, TEXT)
LOCATIONS = st.builds(
    m.Location,
    key=KEYS,
    holder=HOLDERS,
    turn=COUNT,
    token_count=COUNT,
    block_count=COUNT,
    kv_transfer_params=st.binary(max_size=50),
    fingerprint=st.builds(m.Fingerprint, COUNT, st.binary(max_size=50)),
    deadline_ms=COUNT,
    not_before_ms=COUNT,
    endpoint=TEXT,
    data_parallel_rank=COUNT,
    wanted_until_ms=COUNT,
    unknown=st.just(b""),
)
TURNS = st.builds(m.Turns, COUNT, TEXT, *[COUNT] * 9, st.just(b""))
PROFILES = st.builds(m.EngineProfile, TEXT, TEXT, TEXT, COUNT, COUNT, COUNT, COUNT, TEXT, TEXT)
SETTINGS = st.builds(
    m.EngineSettings, TEXT, TEXT, TEXT, COUNT, st.none() | st.booleans(), TEXT, COUNT, COUNT, TEXT, TEXT
)
SPECS = st.builds(
    m.EngineSpec,
    TEXT,
    st.sampled_from(m.EngineRole),
    PROFILES,
    TEXT,
    COUNT,
    COUNT,
    st.lists(TEXT, max_size=3).map(tuple),
    st.none() | SETTINGS,
)
ENGINES = st.builds(m.Engine, SPECS, COUNT, COUNT, COUNT, TEXT, st.booleans())


@given(LOCATIONS)
def test_locations(value: m.Location) -> None:
    assert records.load_location(records.dump_location(value)) == value


@given(st.builds(m.Claim, TEXT, TEXT, LOCATIONS, COUNT, st.just(b"")))
def test_claims(value: m.Claim) -> None:
    assert records.load_claim(records.dump_claim(value)) == value


@given(ENGINES)
def test_engines(value: m.Engine) -> None:
    assert records.load_engine(records.dump_engine(value)) == value


@given(TURNS)
def test_turns(value: m.Turns) -> None:
    assert records.load_turns(records.dump_turns(value)) == value


@given(HOLDERS, st.sampled_from(m.ReleaseReason), COUNT)
def test_orders_and_their_keys(holder: m.Holder, reason: m.ReleaseReason, deadline_ms: int) -> None:
    order = m.Order(holder, reason, deadline_ms)
    assert records.load_order(holder, records.dump_order(order)) == order
    assert keys.holder_of(keys.order(holder)) == keys.holder_of(keys.holding(holder)) == holder


@given(KEYS, KEYS)
def test_different_conversations_lie_apart(one: m.ConversationKey, other: m.ConversationKey) -> None:
    assert (keys.location(one) == keys.location(other)) == (one == other)
    within = keys.location(one).startswith(keys.tenant_locations(other.tenant_id))
    assert within == (one.tenant_id == other.tenant_id)


def test_members_are_named_alike_everywhere() -> None:
    kinds: list[tuple[tuple[type, ...], tuple[Any, ...]]] = [
        ((m.EngineProfile, cm.EngineProfile), (engine_pb2.EngineProfile, records_pb2.ProfileRecord)),
        ((m.EngineLoad, cm.EngineLoad), (engine_pb2.EngineLoad,)),
        ((m.EngineSettings,), (records_pb2.SettingsRecord,)),
        ((m.Turns,), (records_pb2.TurnRecord,)),
    ]
    for values, messages in kinds:
        names = {tuple(sorted(set(inspect.signature(value).parameters) - {"unknown"})) for value in values}
        names |= {tuple(sorted(message.DESCRIPTOR.fields_by_name)) for message in messages}
        assert len(names) == 1
