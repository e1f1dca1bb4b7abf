"""Write the option reference, deploy/OPTIONS.md, from the commands themselves, or check that it is fresh.

usage: python -m deploy.reference.options [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from kvplane.cli.config import ENV_OF_OTHERS, Config
from kvplane.cli.entry import COMMANDS, load

TARGET = Path(__file__).resolve().parents[1] / "OPTIONS.md"
VARIABLES = {
    "KVPLANE_CONFIG": "the file that `--config` names",
    "KVPLANE_ADDRESS": "of engines: `kvplane_address` ([CONNECTOR.md](CONNECTOR.md#options))",
    "KVPLANE_ENDPOINT": "of engines: `kvplane_endpoint`",
    "KVPLANE_ROUTER": "of commands for people: `--router`",
    "KVPLANE_HTTP_CA": "of commands for people: `--http-ca`",
    "KVPLANE_VLLM_VENV": "of `make` and the rig: where vLLM is, or is to be installed",
    "KVPLANE_ETCD": "of the tests: the etcd to run",
}
"""What is read that is no option of a server."""
SERVERS = ("serve", "route", "up")
"""Commands whose options are those of `Config`: they share one table."""
INTRODUCTION = """# Options of all commands

Made from the commands by `python -m deploy.reference.options`; `make lint` checks that it is fresh. In a
terminal, `kvplane COMMAND --help` says the same.

## Servers

`kvplane serve` runs a control plane, `kvplane route` a router, `kvplane up` both in one process. Each of
their options can be given in three ways, of which the first that is there counts:

1. as a flag: `--grpc-port 50052`
2. as an environment variable: `KVPLANE_GRPC_PORT=50052`; lists with commas between
3. in a TOML file, named by `--config FILE` or `KVPLANE_CONFIG`: `grpc_port = 50052`; one flat file for all
   commands

`kvplane config show` prints what is in force, as such a file. Unknown names are refused, with the nearest
known one. Times are in seconds. Secrets are given by file only. A flag that takes a list is repeated.

The variable is `KVPLANE_` and the option's name in capitals with underscores; the key in the file is the name
with underscores. `--config` is an option of all three.
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION, *_servers(), *_others()]
    return "\n".join(lines).rstrip() + "\n"


def _servers() -> Iterator[str]:
    of = {name: {option for p in load(name).params for option in p.opts} for name in SERVERS}
    yield from ("| option | values | default | commands | meaning |", "|---|---|---|---|---|")
    for name, field in Config.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        commands = ", ".join(command for command in SERVERS if flag in of[command])
        shown = f"`{flag}`, `--no-{flag[2:]}`" if field.annotation is bool else f"`{flag}`"
        meaning = _cell(field.description or "")
        yield f"| {shown} | {_values(field)} | {_default(field.default)} | {commands} | {meaning} |"
    yield ""
    yield from (
        "Beside the options' own and these a server takes no `KVPLANE_` variable: it does not start then.",
        "",
    )
    yield from ("| variable | meaning |", "|---|---|")
    for variable in sorted(ENV_OF_OTHERS):
        yield f"| `{variable}` | {VARIABLES[variable]} |"
    yield ""


def _values(field: FieldInfo) -> str:
    """Return what values an option takes, for people."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    kinds = {member for member in (get_args(kind) or (kind,)) if member is not type(None)}
    if kind is bool:
        return "yes or no"
    if get_origin(kind) is tuple:
        return "list"
    if kinds & {int, float}:
        whole = "whole number" if int in kinds else "number"
        return f"{whole}{_bounds(field)}"
    return "text"


def _bounds(field: FieldInfo) -> str:
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    found = [
        f"{words[name]} {value:,}"
        for name in words
        for limit in field.metadata
        if (value := getattr(limit, name, None)) is not None
    ]
    return f", {' '.join(found)}" if found else ""


def _default(value: object) -> str:
    if value in (None, (), ""):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(f"`{member}`" for member in value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _others() -> Iterator[str]:
    for name in COMMANDS:
        if name not in SERVERS:
            yield from _command(load(name), f"kvplane {name}")


def _command(command: Any, path: str) -> Iterator[str]:
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from _command(child, f"{path} {name}")
    if children:
        return
    yield from (f"## {path}", "", _cell(" ".join((command.help or "").split())), "")
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    shown = [parameter for parameter in shown if parameter.name != "help"]
    if not shown:
        yield from ("It has no options.", "")
        return
    yield from ("| option | default | variable | meaning |", "|---|---|---|---|")
    for parameter in shown:
        yield _row(parameter)
    yield ""


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{parameter.name.upper()}`" + ("" if parameter.required else ", may be left out")
        default = "none" if parameter.required or parameter.default is None else _default(parameter.default)
    else:
        name = ", ".join(f"`{spelling}`" for spelling in (*parameter.opts, *parameter.secondary_opts))
        default = "required" if parameter.required else _default(_plain(parameter.default))
    variable = f"`{parameter.envvar}`" if isinstance(parameter.envvar, str) else ""
    return f"| {name} | {default} | {variable} | {_cell(parameter.help or '')} |"


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else getattr(value, "value", value)


def _cell(text: str) -> str:
    for character in "|*<>":
        text = text.replace(character, f"\\{character}")
    return text


def main() -> int:
    """Run as a program; 1 means that the committed page is stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    arguments = parser.parse_args()
    fresh = page()
    if arguments.check:
        if not TARGET.exists() or TARGET.read_text() != fresh:
            print("stale: deploy/OPTIONS.md; run 'make generate'", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(fresh)
    print("wrote deploy/OPTIONS.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
