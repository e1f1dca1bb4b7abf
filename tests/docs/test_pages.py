"""What the documents say exists: links and their anchors, commands, options, calls of the API."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from typer.main import get_command

from kvplane.cli.config import ENV_OF_OTHERS, Config
from kvplane.cli.entry import COMMANDS, app, load
from kvplane.connector.config import read_config
from kvplane.v1 import common_pb2, engine_pb2, location_pb2, status_pb2
from tests.docs.pages import ROOT, Page, as_json, pages

each_page = pytest.mark.parametrize("page", pages(), ids=str)

OTHERS = {
    "vLLM": "--kv-transfer-config --enable-prompt-tokens-details --block-size --api-key --shutdown-timeout"
    " --disable-log-stats --no-enable-prefix-caching --served-model-name"
    " --otlp-traces-endpoint",
    "Docker": "--sbom --use --driver",
    "Helm": "--set",
    "etcd, etcdctl": "--auto-compaction-mode --auto-compaction-retention --quota-backend-bytes"
    " --max-request-bytes --max-txn-ops --physical --cluster --prefix --unsafe-no-fsync",
}
"""Options of others' programs that the documents name."""
OWN_PROGRAMS = ("deploy", "tests", "protos")
"""Folders with programs of ours, of which an option is one if it is in their code."""


@each_page
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links():
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{page}: {link}: there is no such file"
        if anchor:
            assert anchor in Page(target).anchors(), f"{page}: {link}: there is no such heading"


def _parse(words: list[str]) -> None:
    """Parse a command line as the program would, and run nothing. Raises for what it does not take."""
    words = ["1" if word in ("N", "SECONDS") else word for word in words]
    ending = ("--help", "--version", "--install-completion", "--show-completion")
    if not words or any(word in ending for word in words):
        words = [word for word in words if word not in ending]
        assert not words or words[0] in COMMANDS or words[0] == "COMMAND"
        return
    command: Any = get_command(app)
    context = command.make_context("kvplane", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        left = [*context._protected_args, *context.args]
        name, command, left = command.resolve_command(context, left)
        context = command.make_context(name, left, parent=context)


def _alternatives(line: str) -> Iterator[list[str]]:
    """`kvplane bench rpc|store` is two lines; dots are no part of any."""
    words = [word for word in line.split()[1:] if word not in ("...", "…")]
    yield from map(list, itertools.product(*(word.split("|") for word in words)))


@each_page
def test_command_lines_parse(page: Page) -> None:
    for words in page.commands("kvplane"):
        try:
            _parse([word for word in words if word not in ("...", "…")])
        except Exception as error:
            raise AssertionError(f"{page}: kvplane {' '.join(words)}: {error}") from error


@each_page
def test_commands_within_sentences_exist(page: Page) -> None:
    for span in page.spans():
        if not span.startswith("kvplane "):
            continue
        for words in _alternatives(span):
            if "COMMAND" in words:
                continue
            command: Any = load(words[0]) if words[0] in COMMANDS else None
            assert command is not None, f"{page}: {span}"
            for word in words[1:]:
                if hasattr(command, "commands") and not word.startswith("-"):
                    assert word in command.commands, f"{page}: {span}"
                    command = command.commands[word]
                elif word.startswith("--"):
                    assert word in _options(command), f"{page}: {span}: {word}"


def _options(command: Any) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for child in getattr(command, "commands", {}).values():
        found |= _options(child)
    return found | {"--help", "--version"}


@pytest.fixture(scope="module")
def known_options() -> set[str]:
    """Options of our commands, of our programs, and of others' that are named above."""
    ours = set[str]().union(*(_options(load(name)) for name in COMMANDS))
    code = [path.read_text() for folder in OWN_PROGRAMS for path in (ROOT / folder).rglob("*.py")]
    ours |= {name for text in code for name in re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", text)}
    ours |= set(re.findall(r"addoption\(\s*\"(--[a-z-]+)\"", "\n".join(code)))
    return ours | {name for names in OTHERS.values() for name in names.split()}


@each_page
def test_options_exist(page: Page, known_options: set[str]) -> None:
    named = set[str]()
    for span in page.spans():
        named |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", span))
    assert named <= known_options, f"{page}: {', '.join(sorted(named - known_options))}"


@each_page
def test_variables_exist(page: Page) -> None:
    known = {f"KVPLANE_{name.upper()}" for name in Config.model_fields}
    known |= ENV_OF_OTHERS
    for name in COMMANDS:
        known |= {p.envvar for p in _parameters(load(name)) if isinstance(p.envvar, str)}
    named = set(re.findall(r"\bKVPLANE_[A-Z_]*[A-Z]\b", page.text))
    assert named <= known, f"{page}: {', '.join(sorted(named - known))}"


def _parameters(command: Any) -> Iterator[Any]:
    yield from command.params
    for child in getattr(command, "commands", {}).values():
        yield from _parameters(child)


def _message(method: str) -> Message:
    """An empty request of a method, by its full name."""
    service, _, name = method.rpartition("/")
    for module in (common_pb2, engine_pb2, location_pb2, status_pb2):
        for descriptor in module.DESCRIPTOR.services_by_name.values():
            if descriptor.full_name == service:
                asked = descriptor.methods_by_name[name].input_type.name
                message: Message = getattr(module, asked)()
                return message
    raise AssertionError(f"there is no {method}")


@each_page
def test_calls_by_grpcurl_are_calls_of_the_api(page: Page) -> None:
    for words in page.commands("grpcurl"):
        method = next((word for word in words if word.startswith("kvplane.v1.") and "/" in word), None)
        if method is None:
            continue
        message = _message(method)
        body = words[words.index("-d") + 1] if "-d" in words else "{}"
        json_format.ParseDict(as_json(body), message)


@each_page
def test_engines_are_configured_with_what_there_is(page: Page) -> None:
    for words in page.commands("vllm"):
        if "--kv-transfer-config" not in words:
            continue
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        with patch("kvplane.connector.config.open_credentials"):  # its files are nobody's
            assert read_config(config["kv_connector_extra_config"], {}).address
