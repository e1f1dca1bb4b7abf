"""The access file: what it says, who is found by what, and what is wrong with it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvplane.cli.entry import app
from kvplane.cli.errors import ConfigError
from kvplane.controlplane.access import AccessFileError, AccessList, load_access, token_digest
from kvplane.controlplane.callers import host_of_peer
from kvplane.controlplane.roles import Role

DIGEST = token_digest("t")
ENGINE = '[[identity]]\nname = "e"\nrole = "engine"\ncertificates = ["spiffe://x/e"]\n'
VIEWER = '[[identity]]\nname = "v"\nrole = "viewer"\n'


def load(folder: Path, text: str) -> AccessList:
    file = folder / "access.toml"
    file.write_text(text)
    return load_access(str(file))


def test_who_is_found_by_what(tmp_path: Path) -> None:
    users = load(
        tmp_path,
        ENGINE
        + 'engine_ids = "d?"\naddresses = ["10.0.0.0/8", "peer"]\n'
        + VIEWER
        + f'token_sha256 = ["{DIGEST.upper()}"]\n'
        + '[[identity]]\nname = "a"\nrole = "admin"\ncertificates = ["ops.example"]\n'
        + f'token_sha256 = ["{token_digest("u")}"]\n',
    )

    def found(names: list[str], token: str) -> str | None:
        one = users.find(names, token)
        return None if one is None else one.name

    assert found(["spiffe://x/e"], "") == "e"
    assert found(["other", "spiffe://x/e"], "") == "e"
    assert found([], "t") == "v"
    assert found(["spiffe://x/e"], "t") == "v", "a token says who one is"
    assert found(["spiffe://x/e"], "wrong") is None, "and a wrong one that one is nobody"
    assert found(["ops.example"], "u") == "a"
    assert found(["ops.example"], "") is None
    assert found([], "u") is None
    assert found([], "") is None
    assert found(["spiffe://x/e2", "x/e", ""], "") is None


@pytest.mark.parametrize(
    ("addresses", "host", "peer", "allowed"),
    [
        ('"10.0.0.0/8"', "10.1.2.3", "", True),
        ('"10.0.0.0/8"', "11.0.0.1", "10.0.0.1", False),
        ('"fd00::/8"', "[fd00::7]", "", True),
        ('"fd00::/8"', "10.0.0.1", "", False),
        ('"10.0.0.0/8"', "a.example", "", False),
        ('"*.example"', "a.EXAMPLE", "", True),
        ('"*.example"', "a.example.evil", "", False),
        ('"a.b"', "axb", "", False),
        ('"10.0.0.?"', "10.0.0.7", "", True),
        ('"10.0.0.?"', "10.0.0.x", "", False),
        ('"10.0.0.*"', "10.0.0.7", "", True),
        ('"10.0.0.*"', "10.0.0.evil.example", "", False),
        ('"10.0.0.*"', "10.0.0.7:0;169.254.169.254", "", False),
        ('"fd00:*"', "[fd00::7]", "", True),
        ('"fd00:*"', "fd00::evil", "", False),
        ('"10-0-*.example"', "10-0-7.example", "", True),
        ('"*"', "anything", "", True),
        ('"peer"', "10.0.0.7", "10.0.0.7", True),
        ('"peer"', "10.0.0.8", "10.0.0.7", False),
        ('"peer"', "0:0:0:0:0:0:0:7", "::7", True),
        ('"peer"', "localhost", "127.0.0.1", True),
        ('"peer"', "::1", "127.0.0.1", True),
        ('"peer"', "localhost", "10.0.0.7", False),
        ('"peer"', "10.0.0.7", "127.0.0.1", False),
        ('"peer"', "peer", "", False),
    ],
)
def test_whose_address_a_host_is(tmp_path: Path, addresses: str, host: str, peer: str, allowed: bool) -> None:
    users = load(tmp_path, ENGINE + f'engine_ids = "*"\naddresses = [{addresses}]\n')
    assert users.identities[0].has_address(host, peer) is allowed


def test_the_address_that_a_caller_calls_from() -> None:
    assert host_of_peer("ipv4:10.0.0.7:4711") == "10.0.0.7"
    assert host_of_peer("ipv6:%5Bfd00::7%5D:4711") == "fd00::7"
    assert host_of_peer("ipv6:[::ffff:10.0.0.7]:4711") == "10.0.0.7"
    assert host_of_peer("unix:/run/kv.sock") == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names nobody; add a table [[identity]]"),
        ("x = 1", "x is unknown; each caller is a table [[identity]]"),
        ("[identity]", "two brackets"),
        ("[[identity]]\nname", "not TOML"),
        (VIEWER, "identity 1 (v): nobody can be it"),
        (VIEWER + "tokens = []", "tokens is unknown; did you mean"),
        ('[[identity]]\nrole = "viewer"', "identity 1: name is missing"),
        ('[[identity]]\nname = "v"\nrole = "king"', "role must be one of engine, router, viewer, admin"),
        (VIEWER + 'token_sha256 = ["abc"]', "64 hexadecimal digits"),
        (VIEWER + "certificates = [1]", "certificates must be a list of texts"),
        (VIEWER + 'certificates = ["a"]\nengine_ids = ["d"]', "engine_ids is for engines only"),
        (VIEWER + 'certificates = ["a"]\ntenants = []', "tenants is empty"),
        (ENGINE, "an engine needs engine_ids"),
        (ENGINE + 'engine_ids = ["d"]', "an engine needs addresses"),
        (ENGINE + 'engine_ids = ["d"]\naddresses = ["10.0.0.1/8"]', "has host bits set"),
        (ENGINE + 'engine_ids = ["d"]\naddresses = ["d:8200"]', "has a port"),
        ((VIEWER + f'token_sha256 = ["{DIGEST}"]\n') * 2, "two identities are called v"),
        (
            VIEWER
            + f'token_sha256 = ["{DIGEST}"]\n'
            + VIEWER.replace('"v"', '"w"')
            + f'token_sha256 = ["{DIGEST}"]\n',
            "v and w have the same token",
        ),
        (
            VIEWER + 'certificates = ["a"]\n' + VIEWER.replace('"v"', '"w"') + 'certificates = ["a"]\n',
            "v and w are both known by a",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(AccessFileError) as refused:
        load(tmp_path, text)
    assert said in str(refused.value)
    assert str(tmp_path / "access.toml") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_token_is_made_written_and_taken(tmp_path: Path) -> None:
    runner, file, out = CliRunner(), tmp_path / "access.toml", tmp_path / "token"
    made = runner.invoke(
        app,
        [
            *("access", "token", "decode", "--role", "engine", "--engine-id", "d*"),
            *("--address", "peer", "--tenant", "t", "--out"),
            str(out),
        ],
    )
    assert made.exit_code == 0, made.output
    token = out.read_text().strip()
    assert token not in made.output
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    file.write_text(made.output)
    one = load_access(str(file)).find([], token)
    assert one is not None
    assert (one.name, one.role, one.engine_ids, one.addresses, one.tenants) == (
        ("decode", Role.ENGINE, ("d*",), ("peer",), ("t",))
    )
    checked = runner.invoke(app, ["access", "check", str(file)])
    assert checked.output == "decode: engine, by token; engines d*; at peer; tenants t\n"
    again = ["access", "token", "v", "--role", "viewer", "--out", str(out)]
    with pytest.raises(ConfigError, match="file exists"):
        runner.invoke(app, again, catch_exceptions=False)
    assert out.read_text().strip() == token


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--role", "king"), "--role king: must be one of"),
        (("--role", "engine"), "--engine-id: an engine needs it"),
        (("--role", "engine", "--engine-id", "d"), "--address: an engine needs it"),
        (("--role", "viewer", "--address", "peer"), "--address: is for engines only"),
    ],
)
def test_a_token_of_nobody_is_not_made(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    out = tmp_path / "token"
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, ["access", "token", "x", "--out", str(out), *options], catch_exceptions=False)
    assert not out.exists()


def test_a_broken_file_is_said_by_check(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    with pytest.raises(ConfigError, match="no such file"):
        CliRunner().invoke(app, ["access", "check", str(file)], catch_exceptions=False)


def test_the_documented_table_is_the_one_in_force() -> None:
    root = Path(__file__).resolve().parents[2]
    printed = CliRunner().invoke(app, ["access", "roles"]).output.strip()
    assert printed in (root / "SECURITY.md").read_text(), "put what kvplane access roles prints into it"


def test_both_copies_of_the_files_module_are_the_same() -> None:
    """Client and store import nothing of each other; both follow files in the same way."""
    root = Path(__file__).resolve().parents[2]
    first = (root / "connector/kvplane/client/files.py").read_text()
    assert first == (root / "store/kvplane/store/files.py").read_text()
