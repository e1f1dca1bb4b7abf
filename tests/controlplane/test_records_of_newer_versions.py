"""Fields that only a newer version knows survive when this one rewrites a record."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvplane.controlplane import model as m
from kvplane.controlplane import records
from kvplane.storage.v1 import records_pb2
from tests.controlplane.test_records import COUNT, ENGINES, HOLDERS, LOCATIONS, TEXT, TURNS

FIELD = descriptor_pb2.FieldDescriptorProto


def newer_messages() -> dict[str, Any]:
    """Build the records as a version to come might define them: all have three fields more."""
    file = descriptor_pb2.FileDescriptorProto()
    records_pb2.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        message.field.add(name="new_number", number=100, type=FIELD.TYPE_INT64, label=FIELD.LABEL_OPTIONAL)
        message.field.add(name="new_texts", number=101, type=FIELD.TYPE_STRING, label=FIELD.LABEL_REPEATED)
        message.field.add(
            name="new_record",
            number=2000,
            type=FIELD.TYPE_MESSAGE,
            type_name=".kvplane.storage.v1.EpochRecord",
            label=FIELD.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [f"kvplane.storage.v1.{message.name}" for message in file.message_type]
    return {
        name.rsplit(".", 1)[1]: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        for name in names
    }


NEWER = newer_messages()
ADDED = st.fixed_dictionaries(
    {
        "new_number": st.integers(-(2**63), 2**63 - 1),
        "new_texts": st.lists(TEXT, max_size=3),
        "epoch": st.none() | st.integers(0, 2**40),
    }
)


def add(record: Any, added: dict[str, Any]) -> None:
    record.new_number = added["new_number"]
    record.new_texts.extend(added["new_texts"])
    if added["epoch"] is not None:
        record.new_record.engine_epoch = added["epoch"]


@given(LOCATIONS, ADDED)
def test_of_a_location_that_is_renewed(value: m.Location, added: dict[str, Any]) -> None:
    newer = NEWER["LocationRecord"].FromString(records.dump_location(value))
    add(newer, added)
    loaded = records.load_location(newer.SerializeToString())
    assert replace(loaded, unknown=b"") == value
    renewed = records.dump_location(replace(loaded, deadline_ms=77))
    newer.deadline_ms = 77
    assert NEWER["LocationRecord"].FromString(renewed) == newer


@given(st.builds(m.Claim, TEXT, TEXT, LOCATIONS, COUNT, st.just(b"")), ADDED, ADDED)
def test_of_a_claim_and_of_what_it_claims(
    value: m.Claim, added: dict[str, Any], to_location: dict[str, Any]
) -> None:
    newer = NEWER["ClaimRecord"].FromString(records.dump_claim(value))
    add(newer, added)
    add(newer.location, to_location)
    loaded = records.load_claim(newer.SerializeToString())
    renewed = records.dump_claim(replace(loaded, deadline_ms=77))
    newer.deadline_ms = 77
    assert NEWER["ClaimRecord"].FromString(renewed) == newer


@given(LOCATIONS, ADDED)
def test_of_a_location_that_is_claimed(value: m.Location, added: dict[str, Any]) -> None:
    newer = NEWER["LocationRecord"].FromString(records.dump_location(value))
    add(newer, added)
    location = records.load_location(newer.SerializeToString())
    claim = NEWER["ClaimRecord"].FromString(records.dump_claim(m.Claim("c", "o", location, 1)))
    assert claim.location == newer


@given(ENGINES, ADDED, ADDED, ADDED)
def test_of_an_engine_that_drains(
    value: m.Engine, added: dict[str, Any], to_profile: dict[str, Any], to_settings: dict[str, Any]
) -> None:
    newer = NEWER["EngineRecord"].FromString(records.dump_engine(value))
    add(newer, added)
    add(newer.profile, to_profile)
    if newer.HasField("settings"):
        add(newer.settings, to_settings)
    loaded = records.load_engine(newer.SerializeToString())
    assert dataclasses.replace(loaded, unknown=b"") == value
    drained = records.dump_engine(dataclasses.replace(loaded, draining=True))
    newer.draining = True
    assert NEWER["EngineRecord"].FromString(drained) == newer


@given(TURNS, ADDED)
def test_of_turns_that_go_on(value: m.Turns, added: dict[str, Any]) -> None:
    newer = NEWER["TurnRecord"].FromString(records.dump_turns(value))
    add(newer, added)
    loaded = records.load_turns(newer.SerializeToString())
    assert replace(loaded, unknown=b"") == value
    begun = records.dump_turns(replace(loaded, latest_turn=5, request_id="r"))
    newer.latest_turn, newer.request_id = 5, "r"
    assert NEWER["TurnRecord"].FromString(begun) == newer


@given(HOLDERS, COUNT, ADDED)
def test_records_that_are_never_written_back_are_read(
    holder: m.Holder, count: int, added: dict[str, Any]
) -> None:
    holding = NEWER["HoldingRecord"].FromString(records.dump_holding(claim_id="c"))
    order = NEWER["OrderRecord"].FromString(
        records.dump_order(m.Order(holder, m.ReleaseReason.EXPIRED, count))
    )
    epoch = NEWER["EpochRecord"].FromString(records.dump_epoch(count))
    for record in (holding, order, epoch):
        add(record, added)
    assert records.load_holding(holding.SerializeToString()) == (b"", "c")
    assert records.load_order(holder, order.SerializeToString()).deadline_ms == count
    assert records.load_epoch(epoch.SerializeToString()) == count


@pytest.mark.parametrize("kind", [m.Location, m.Claim, m.Engine, m.Turns])
def test_values_made_anew_have_nothing_unknown_and_it_comes_last(kind: type) -> None:
    last = list(inspect.signature(kind).parameters.values())[-1]
    assert (last.name, last.default) == ("unknown", b"")


def test_an_order_with_a_reason_of_a_newer_version_is_an_order() -> None:
    order = records_pb2.OrderRecord(reason=max(m.ReleaseReason) + 1, deadline_ms=5).SerializeToString()
    holder = m.Holder("d", 1, "r")
    assert records.load_order(holder, order) == m.Order(holder, m.ReleaseReason.REFUSED, 5)
