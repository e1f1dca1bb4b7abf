"""`kvplane tenant`: keys and secrets for the file of --tenants."""

from __future__ import annotations

import os
import secrets
import sys
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer

from kvplane.cli.errors import StartError
from kvplane.cli.output import plural
from kvplane.router.reloading import FileProblemError
from kvplane.router.tenancy.reading import read_tenants

tenant_app = typer.Typer(
    help="Make keys and secrets for the file of --tenants, and check it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_PREFIX = "kvp_"
_MOST_BYTES = 4096


def hash_line(key: str) -> str:
    """Return how a key is written into the file."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


@tenant_app.command("key")
def key_command(
    out: Annotated[
        Path | None,
        typer.Option(help="File to write the key to, readable by you only; one that is there stays."),
    ] = None,
) -> None:
    """Make an API key: itself goes to the tenant, its hash into `keys` of the file. It is shown only once."""
    key = _PREFIX + secrets.token_urlsafe(32)
    if out is not None:
        _write_secret(f"--out {out}", out, key)
    else:
        typer.echo(key)
    # So that one can go into a file and the other be read.
    typer.echo(f'keys = ["{hash_line(key)}"]', err=out is None)


def _write_secret(what: str, file: Path, text: str) -> None:
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w") as written:
            written.write(text + "\n")
    except OSError as error:
        raise StartError(f"{what}: {(error.strerror or 'cannot be written').lower()}") from None


@tenant_app.command("hash")
def hash_command() -> None:
    """Read an API key from standard input and print its hash, for keys that were made elsewhere."""
    key = sys.stdin.readline(_MOST_BYTES).strip()
    if not key:
        raise StartError("tenant hash: write the key to standard input, as in `kvplane tenant hash < FILE`")
    typer.echo(hash_line(key))


@tenant_app.command("secret")
def secret_command(
    file: Annotated[Path, typer.Argument(help="Where to; a file that is there stays.")],
) -> None:
    """Make the secret of a deployment, which all its routers need: `secret_file` in the file."""
    _write_secret(f"tenant secret {file}", file, secrets.token_urlsafe(48))
    typer.echo(f'secret_file = "{file}"')


@tenant_app.command("check")
def check_command(file: Annotated[str, typer.Argument(help="A file for --tenants.")]) -> None:
    """Read a file for --tenants and say what is in it, or what is wrong with it."""
    try:
        tenants = read_tenants(file)
    except FileProblemError as error:
        raise StartError(str(error)) from None
    keys = sum(len(tenant.keys) for tenant in tenants.tenants.values())
    tokens = "none" if tenants.jwt is None else f"of {tenants.jwt.issuer}"
    typer.echo(
        f"{plural(len(tenants.tenants), 'tenant')} with {plural(keys, 'key')},"
        f" {plural(len(tenants.operators), 'key')} of operators,"
        f" tokens: {tokens}, prefix caches {'apart' if tenants.cache_salt else 'shared'}"
    )
