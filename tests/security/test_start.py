"""What programs say of files that guard them or let them in, before anything starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvplane.cli import run
from kvplane.cli.config import Config
from kvplane.cli.errors import ConfigError
from kvplane.cli.run import Program
from tests.cli import people
from tests.security.authority import Authority

ABSENT = "/absent.pem"
MISSING = f"{ABSENT}: no such file or directory"


def wrong_files(issued: Authority) -> list[tuple[Program, dict[str, Any], str]]:
    folder = issued.folder
    ca, cert, key = issued.ca, str(folder / "server.pem"), str(folder / "server.key")
    served, shown = {"grpc_tls_cert": cert, "grpc_tls_key": key}, {"plane": "127.0.0.1:1", "plane_ca": ca}
    other = str(folder / "router.key")
    mismatch = f"{other}: is not the key of the certificate {cert}"
    return [
        (run.serve, {"grpc_tls_cert": ABSENT, "grpc_tls_key": key}, f"--grpc-tls-cert {MISSING}"),
        (run.serve, {"grpc_tls_cert": cert, "grpc_tls_key": ABSENT}, f"--grpc-tls-key {MISSING}"),
        (run.serve, {**served, "grpc_tls_key": other}, f"--grpc-tls-key {mismatch}"),
        (run.serve, {**served, "grpc_tls_cert": ca, "grpc_tls_key": ca}, f"--grpc-tls-key {ca}, {ca}: cert"),
        (run.serve, {**served, "grpc_client_ca": ABSENT}, f"--grpc-client-ca {MISSING}"),
        (run.serve, {"access": ABSENT}, f"--access {MISSING}"),
        (run.serve, {"access": cert}, f"--access {cert}: not TOML"),
        (run.route, {**shown, "plane_ca": ABSENT}, f"--plane-ca {MISSING}"),
        (run.route, {**shown, "plane_cert": cert, "plane_key": other}, f"--plane-key {mismatch}"),
        (run.route, {**shown, "plane_token_file": ABSENT}, f"--plane-token-file {MISSING}"),
        (run.up, {**served, "plane_ca": ABSENT}, f"--plane-ca {MISSING}"),
    ]


async def test_a_file_that_cannot_be_used_is_all_that_is_said_and_with_its_option(issued: Authority) -> None:
    for program, options, said in wrong_files(issued):
        config = Config(**options, grpc_port=0, port=0, metrics_port=0)
        with capture_logs() as logs, pytest.raises(ConfigError) as raised:
            await program(config, asyncio.Event())
        assert str(raised.value).startswith(said)
        assert logs == []


async def test_commands_name_the_option_of_a_file_too(issued: Authority) -> None:
    assert (await people.run("engines", "--plane-ca", ABSENT)).error == f"--plane-ca {MISSING}"
    done = await people.run("engines", "--plane-token-file", ABSENT)
    assert done.error == f"--plane-token-file {MISSING}"
    done = await people.run("engines", "--plane-cert", issued.ca)
    assert done.error == "--plane-key: missing beside cert; a certificate and its key belong together"
