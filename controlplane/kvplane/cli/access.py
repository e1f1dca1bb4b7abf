"""`kvplane access`: tokens for the access file, and a look at what is in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from kvplane.cli.config import toml_line
from kvplane.cli.errors import ConfigError
from kvplane.controlplane.access import AccessFileError, Identity, load_access, token_digest
from kvplane.controlplane.roles import Role, table_rows

access_app = typer.Typer(
    help="Who may call the control plane: tokens, and the access file.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_TOKEN_BYTES = 32


@access_app.command("token")
def token(
    name: Annotated[str, typer.Argument(help="Name of the caller, for the log.")],
    role: Annotated[str, typer.Option(help=f"Its role: {', '.join(Role)}.")],
    out: Annotated[Path, typer.Option(help="File to write the token to; it must not exist.")],
    engine_id: Annotated[
        list[str] | None, typer.Option(help="An engine's: an id it may register; * and ? stand for anything.")
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(help="An engine's: a host or network it may register, or peer: where it calls from."),
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="A tenant it may act for; by default all.")] = None,
) -> None:
    """Make a token: it goes to a file that only you can read, and what names it to standard output.

    Append that to the access file of --access; give the file to the caller (--plane-token-file, or
    kvplane_token_file in an engine's kv_connector_extra_config).
    """
    if role not in tuple(Role):
        raise ConfigError(f"--role {role}: must be one of {', '.join(Role)}")
    for option, given in (("engine-id", engine_id), ("address", address)):
        if (role == Role.ENGINE) != bool(given):
            what = 'an engine needs it; "*" allows any' if role == Role.ENGINE else "is for engines only"
            raise ConfigError(f"--{option}: {what}")
    made = f"kvp_{secrets.token_urlsafe(_TOKEN_BYTES)}"
    lists = {"token_sha256": [token_digest(made)]}
    for key, texts in (("engine_ids", engine_id), ("addresses", address), ("tenants", tenant)):
        if texts:
            lists[key] = texts
    _write_secret(out, made)
    typer.echo("[[identity]]")
    for key, value in {"name": name, "role": role, **lists}.items():
        typer.echo(toml_line(key, value))


def _write_secret(path: Path, secret: str) -> None:
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w") as file:
            file.write(secret + "\n")
    except OSError as error:
        raise ConfigError(f"--out {path}: {(error.strerror or 'cannot be written').lower()}") from None


@access_app.command("check")
def check(file: Annotated[Path, typer.Argument(help="The access file.")]) -> None:
    """Read an access file as the control plane does, and say who may do what."""
    try:
        users = load_access(str(file))
    except AccessFileError as error:
        raise ConfigError(str(error)) from None
    for one in users.identities:
        typer.echo(f"{one.name}: {one.role}, by {_known_by(one)}{_limits(one)}")


@access_app.command("roles")
def roles() -> None:
    """Print which role may call what."""
    for row in table_rows():
        typer.echo(row)


def _known_by(one: Identity) -> str:
    certificates = "certificate " + " or ".join(sorted(one.certificates))
    tokens = "token" if len(one.token_sha256) == 1 else f"{len(one.token_sha256)} tokens"
    return " and ".join([certificates] * bool(one.certificates) + [tokens] * bool(one.token_sha256))


def _limits(one: Identity) -> str:
    parts = [
        f"; {name} {', '.join(texts)}"
        for name, texts in (
            ("engines", one.engine_ids),
            ("at", (*one.addresses, *map(str, one.networks))),
            ("tenants", one.tenants),
        )
        if texts
    ]
    return "".join(parts)
