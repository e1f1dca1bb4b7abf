"""The pages that are made from code: that they are fresh, and lack nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

from deploy.reference import drawings, limits, options
from kvplane.controlplane.errors import refusals
from kvplane.controlplane.roles import TABLE
from kvplane.v1 import common_pb2, engine_pb2, location_pb2, status_pb2
from tests.docs.pages import ROOT

API = (ROOT / "deploy" / "API.md").read_text()


def test_the_option_reference_is_fresh() -> None:
    assert options.page() == options.TARGET.read_text(), "run 'make generate'"


def test_the_table_of_limits_is_fresh() -> None:
    assert limits.page() == limits.TARGET.read_text(), "run 'make generate'"


def test_the_api_reference_has_everything() -> None:
    """That its comments are fresh, too, is for `make lint`, which has a compiler."""
    for module in (common_pb2, engine_pb2, location_pb2, status_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert f"\n## {service.name}\n" in API
            for method in service.methods:
                assert f"\n### {method.name}\n" in API
        for message in module.DESCRIPTOR.message_types_by_name.values():
            section = _section(message.name)
            for field in message.fields:
                assert f"| `{field.name}` | {field.number} |" in section
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            section = _section(enum.name)
            for value in enum.values:
                assert f"| `{value.name}` | {value.number} |" in section


def _section(name: str) -> str:
    found = re.search(rf"^### {name}\n(.*?)(?=^##)", API + "\n##", re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def test_the_api_reference_has_every_reason_and_every_role() -> None:
    for reason, (code, _) in refusals().items():
        assert f"| `{reason}` | `{code.name}` |" in API
    for method in TABLE:
        assert f"`{method.rpartition('/')[2]}`" in API


def test_every_call_has_an_example_or_is_a_stream_of_engines() -> None:
    for module in (engine_pb2, location_pb2, status_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                name = f"{service.full_name}/{method.name}"
                assert name in API or method.name in ("AttachEngine", "RenewLocations"), name


def test_the_generator_answers_for_itself() -> None:
    command = [sys.executable, str(ROOT / "protos" / "reference.py"), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--check" in answer.stdout


def test_the_pictures_are_fresh() -> None:
    assert drawings.stale() == [], "run 'make generate'"


def test_the_pictures_are_xml_with_words_for_those_who_cannot_see_them() -> None:
    for path in (ROOT / "deploy" / "pictures").glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        told = [root.findtext(f"{{http://www.w3.org/2000/svg}}{name}") for name in ("title", "desc")]
        assert all(told), path.name
        assert "prefers-color-scheme: dark" in path.read_text()
