"""The protos as published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvplane.storage.v1 import records_pb2
from kvplane.v1 import common_pb2, engine_pb2, location_pb2, status_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_enums_begin_with_a_value_that_means_nothing() -> None:
    for module in (common_pb2, engine_pb2, location_pb2, status_pb2):
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values[0].name.endswith("_UNSPECIFIED")


def test_what_is_stored_never_goes_on_the_wire() -> None:
    stored = set(records_pb2.DESCRIPTOR.message_types_by_name)
    for module in (common_pb2, engine_pb2, location_pb2, status_pb2):
        assert not stored & set(module.DESCRIPTOR.message_types_by_name)
        assert not any("storage" in dependency.name for dependency in module.DESCRIPTOR.dependencies)


def test_unknown_fields_of_a_stored_record_survive_a_rewrite() -> None:
    newer = records_pb2.LocationRecord(engine_id="d").SerializeToString() + b"\x9a\x06\x03new"
    assert b"new" in records_pb2.LocationRecord.FromString(newer).SerializeToString()


def test_generated_code_is_what_the_protos_say() -> None:
    """The whole check regenerates and is part of `make lint`; here, that its command answers for itself."""
    answer = subprocess.run(
        [sys.executable, ROOT / "protos" / "generate.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--check" in answer.stdout
