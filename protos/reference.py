"""Write the API reference, deploy/API.md, from the protos and their comments, or check that it is fresh.

usage: reference.py [--check]

What the protos do not say is beside this file: `reference_text.py`. Errors come from the control plane's
one table, roles from its other.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import reference_text
from generate import ROOT, toolchain
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

from kvplane.client.errors import from_status
from kvplane.controlplane.errors import refusals
from kvplane.controlplane.roles import table_rows

TARGET = ROOT.parent / "deploy" / "API.md"
SERVICES = ("LocationService", "EngineService", "StatusService")
"""In this order: what routers and people call first comes first."""
_PACKAGE = ".kvplane.v1."
_FIELD = FieldDescriptorProto
_SCALARS = {
    _FIELD.TYPE_STRING: "string",
    _FIELD.TYPE_BYTES: "bytes",
    _FIELD.TYPE_BOOL: "bool",
    _FIELD.TYPE_INT32: "int32",
    _FIELD.TYPE_INT64: "int64",
    _FIELD.TYPE_DOUBLE: "double",
}
# Numbers of the members of FileDescriptorProto and so on, of which paths of comments are made.
_MESSAGES, _ENUMS, _SERVICES, _INNER = 4, 5, 6, 2


class Comments:
    """The comments of one file, by the path of what they are about."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._texts = {
            tuple(place.path): " ".join(place.leading_comments.split())
            for place in file.source_code_info.location
        }

    def of(self, *path: int) -> str:
        """Return the comment, on one line. Raises KeyError where there is none: buf lint wants one."""
        return self._texts[path]


def compiled() -> list[FileDescriptorProto]:
    """Return the API's files with their comments, compiled by the pinned toolchain."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kvplane" / "v1").glob("*.proto"))
    python = toolchain()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "set"
        command = [str(python), "-m", "grpc_tools.protoc", f"-I{ROOT}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *sources], check=True, cwd=ROOT)
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def linked(comment: str, names: Sequence[str]) -> str:
    """Return a comment with every name of the API in it as a link, and what Markdown would eat escaped."""
    escaped = re.sub(r"([|<>*])", r"\\\1", comment)
    found = re.compile(rf"(?<![\w.`\[])({'|'.join(sorted(names, key=len, reverse=True))})(?![\w`])")
    return found.sub(lambda match: f"[{match[1]}](#{match[1].lower()})", escaped)


class Reference:
    """The page, built of the compiled files."""

    def __init__(self, files: Sequence[FileDescriptorProto]) -> None:
        self._files = [(file, Comments(file)) for file in files]
        self._names = [
            thing.name
            for file in files
            for things in (file.message_type, file.enum_type, file.service)
            for thing in things
        ] + [method.name for file in files for service in file.service for method in service.method]
        doubles = {name for name in self._names if self._names.count(name) > 1}
        if doubles:
            raise ValueError(f"two things of one name would share an anchor: {', '.join(sorted(doubles))}")

    def page(self) -> str:
        """Return the page as Markdown."""
        parts = [reference_text.INTRODUCTION, *self._contents(), reference_text.CALLS, *errors()]
        parts += ["## Who may call what", "", reference_text.ROLES, "", *table_rows(), ""]
        parts += [*self._services(), "## Messages", "", *self._messages(), "## Enums", "", *self._enums()]
        return "\n".join(parts).rstrip() + "\n"

    def _contents(self) -> Iterator[str]:
        yield from ("| service | calls |", "|---|---|")
        for service, _, _ in self._ordered():
            calls = ", ".join(f"[{method.name}](#{method.name.lower()})" for method in service.method)
            yield f"| [{service.name}](#{service.name.lower()}) | {calls} |"
        yield ""

    def _ordered(self) -> list[tuple[ServiceDescriptorProto, Comments, int]]:
        found = [
            (service, comments, at)
            for file, comments in self._files
            for at, service in enumerate(file.service)
        ]
        return sorted(found, key=lambda entry: SERVICES.index(entry[0].name))

    def _services(self) -> Iterator[str]:
        for service, comments, at in self._ordered():
            yield from (f"## {service.name}", "", self._told(comments.of(_SERVICES, at)), "")
            for number, method in enumerate(service.method):
                yield from self._method(method, comments.of(_SERVICES, at, _INNER, number))
            yield from (f"### {service.name} by grpcurl", "", reference_text.EXAMPLES[service.name], "")

    def _method(self, method: MethodDescriptorProto, comment: str) -> Iterator[str]:
        yield from (f"### {method.name}", "")
        asked = self._shown(method.input_type, stream=method.client_streaming)
        answered = self._shown(method.output_type, stream=method.server_streaming)
        yield from (f"{asked} → {answered}", "")
        said, _, refused = comment.partition("Errors: ")
        yield from (self._told(said.strip()), "")
        if refused:
            yield from (f"Errors: {self._told(refused)}", "")

    def _shown(self, full: str, *, stream: bool) -> str:
        name = full.removeprefix(_PACKAGE)
        return f"{'stream of ' if stream else ''}[{name}](#{name.lower()})"

    def _messages(self) -> Iterator[str]:
        entries = [
            (message, comments, at)
            for file, comments in self._files
            for at, message in enumerate(file.message_type)
        ]
        for message, comments, at in sorted(entries, key=lambda entry: entry[0].name):
            yield from (f"### {message.name}", "", self._told(comments.of(_MESSAGES, at)), "")
            yield from self._fields(message, comments, at)

    def _fields(self, message: DescriptorProto, comments: Comments, at: int) -> Iterator[str]:
        if not message.field:
            yield from ("It has no fields.", "")
            return
        yield from ("| field | no. | type | meaning |", "|---|---|---|---|")
        for number, field in enumerate(message.field):
            meaning = self._told(comments.of(_MESSAGES, at, _INNER, number))
            if field.HasField("oneof_index") and not field.proto3_optional:
                meaning += f" *(one of `{message.oneof_decl[field.oneof_index].name}`)*"
            shown = self._map(message, field) or self._type(field)
            yield f"| `{field.name}` | {field.number} | {shown} | {meaning} |"
        yield ""

    def _map(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        """Return the type of a map's field, "" if it is none: to the compiler it is a list of entries."""
        for entry in message.nested_type:
            if entry.options.map_entry and field.type_name == f"{_PACKAGE}{message.name}.{entry.name}":
                return f"map of {self._type(entry.field[0])} to {self._type(entry.field[1])}"
        return ""

    def _type(self, field: FieldDescriptorProto) -> str:
        if field.type_name.startswith(_PACKAGE):
            shown = self._shown(field.type_name, stream=False)
        else:
            shown = field.type_name.rpartition(".")[2] or _SCALARS[field.type]
        if field.label == _FIELD.LABEL_REPEATED:
            return f"list of {shown}"
        return f"{shown}, optional" if field.proto3_optional else shown

    def _enums(self) -> Iterator[str]:
        entries = [
            (enum, comments, at) for file, comments in self._files for at, enum in enumerate(file.enum_type)
        ]
        for enum, comments, at in sorted(entries, key=lambda entry: entry[0].name):
            yield from (f"### {enum.name}", "", self._told(comments.of(_ENUMS, at)), "")
            yield from self._values(enum, comments, at)

    def _values(self, enum: EnumDescriptorProto, comments: Comments, at: int) -> Iterator[str]:
        yield from ("| value | no. | meaning |", "|---|---|---|")
        for number, value in enumerate(enum.value):
            meaning = self._told(comments.of(_ENUMS, at, _INNER, number))
            yield f"| `{value.name}` | {value.number} | {meaning} |"
        yield ""

    def _told(self, comment: str) -> str:
        return linked(comment, self._names)


def errors() -> Iterator[str]:
    """Yield the section on errors, from the control plane's one table of them."""
    yield from ("## Errors", "", reference_text.ERRORS, "")
    yield from ("| reason | gRPC status | meaning | the Python client raises |", "|---|---|---|---|")
    for reason, (code, meanings) in sorted(refusals().items()):
        raised = type(from_status(code.value[0], "", reason)).__name__
        yield f"| `{reason}` | `{code.name}` | {' Or: '.join(meanings)} | `{raised}` |"
    yield ""


def main() -> int:
    """Run as a program; 1 means that the committed page is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    arguments = parser.parse_args()
    page = Reference(compiled()).page()
    if arguments.check:
        if not TARGET.exists() or TARGET.read_text() != page:
            print("stale: deploy/API.md; run 'make generate'", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(page)
    print("wrote deploy/API.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
