"""The `kvplane` command: a command's module is found when it is run, so that help comes at once."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import io
import os
import sys
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from kvplane.cli.errors import IN_SECONDS, ConfigError, NotNowError, StartError


class Place(NamedTuple):
    """Where a command is."""

    module: str
    """Of this package."""
    attribute: str
    """A function, or a Typer of which the command is all or, with `part`, a part."""
    help: str
    """First sentence of what its own help says; a test compares them."""
    part: str = ""


COMMANDS = {
    "serve": Place("main", "app", "Run a control plane.", "serve"),
    "route": Place("main", "app", "Run a router in front of prefill and decode engines.", "route"),
    "up": Place("main", "app", "Run router and control plane together: all that one machine needs.", "up"),
    "top": Place("top", "top", "Show live how engines, retention and paths do."),
    "engines": Place("engines", "engines", "List engines: what they are, how they do, and what they hold."),
    "conversations": Place("conversations", "conversations", "List what is retained, and where."),
    "explain": Place(
        "explain",
        "explain",
        "Say how the router served a request: its path, why, what it expected and what came of it.",
    ),
    "doctor": Place(
        "doctor.command", "doctor", "Look for what keeps KV from being reused, and say how to mend it."
    ),
    "end": Place("end", "end", "End a conversation: what is retained for it is freed at once."),
    "drain": Place("drain", "drain", "Take an engine out of use: nothing new is kept on it or read from it."),
    "tenant": Place("tenant", "tenant_app", "Make keys and secrets for the file of --tenants, and check it."),
    "store": Place("store", "store_app", "Check, copy, bring back and empty the store of a control plane."),
    "access": Place("access", "access_app", "Who may call the control plane: tokens, and the access file."),
    "config": Place("main", "app", "Look at the configuration.", "config"),
    "bench": Place(
        "bench",
        "bench_app",
        "Measure what the control plane and its stores cost on this machine, and what leases save.",
    ),
}


def load(name: str) -> Any:
    """Return a command by its name, from its module."""
    place = COMMANDS[name]
    found = getattr(importlib.import_module(f"kvplane.cli.{place.module}"), place.attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        single.command(name)(found)
        return typer.main.get_command(single)
    command: Any = typer.main.get_command(found)
    if place.part:
        command = command.commands[place.part]
    command.name = name
    return command


class Commands(typer.core.TyperGroup):
    """The group of all commands, each imported when it is called."""

    _naming = False

    def list_commands(self, ctx: Any) -> list[str]:
        """See click."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See click. While names are listed, what only has a name and a help."""
        if cmd_name not in COMMANDS:
            return None
        if self._naming:
            return typer.core.TyperCommand(name=cmd_name, help=COMMANDS[cmd_name].help)
        return load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click. A misspelt name is answered with those that are like it."""
        if args and args[0] not in COMMANDS and (near := get_close_matches(args[0], COMMANDS)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean {', '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """See click. A value that cannot be is told in one line, as one of a file is."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if type(error) is not typer.BadParameter:  # what is missing is told with the usage
                raise
            raise ConfigError(_wrong(error)) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See click."""
        self._naming = True
        try:
            super().format_commands(ctx, formatter)
        finally:
            self._naming = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """See click."""
        self._naming = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._naming = False


def _wrong(error: typer.BadParameter) -> str:
    """Return what is wrong with a value that was given for an option or an argument."""
    option: Any = error.param
    name = option.opts[0] if option.param_type_name == "option" else option.name.upper()
    cause: Any = error.__cause__  # pydantic's, which knows the value
    value = f" {cause.errors()[0]['input']}" if hasattr(cause, "errors") else ""
    said = error.message.removeprefix("Value error, ").rstrip(".")
    said = said[:1].lower() + said[1:]
    return f"{name}{value}: {said}{IN_SECONDS if 'econds' in (option.help or '') else ''}"


app = typer.Typer(
    name="kvplane",
    cls=Commands,
    help="Knows which conversation's KV cache is where, for how long, and whether it may be reused.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options short
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"kvplane {importlib.metadata.version('kvplane')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take options that belong to no command."""


def main() -> int:
    """Run the command line; every expected failure is one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the terminal's encoding lacks is escaped.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except (ConfigError, StartError) as error:
        print(f"kvplane: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotNowError) else 2
    except UnicodeEncodeError:
        unreadable = [argument for argument in sys.argv[1:] if not _is_text(argument)]
        if not unreadable:
            raise
        print(f"kvplane: {unreadable[0]!a} is not text in the encoding of this locale", file=sys.stderr)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("kvplane: what it says cannot be written: no space left on device", file=sys.stderr)
        # Else what is left of it would be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        return 0
    return 2


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
