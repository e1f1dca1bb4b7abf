"""The command as a whole: quick help, one place for each command, and completion in shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvplane.cli.entry import COMMANDS, app, load

PROGRAM = "import sys; from kvplane.cli.entry import main; sys.exit(main())"
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_begins_as_the_list_says(name: str) -> None:
    command = load(name)
    assert command.name == name
    said = " ".join(str(command.help).split())
    assert said.startswith(COMMANDS[name].help)


def test_help_imports_no_command() -> None:
    """It takes a tenth of a second; with all commands, a whole one."""
    program = (
        "import sys; sys.argv = ['kvplane', '--help']; from kvplane.cli.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'grpc', 'aiohttp', 'pydantic', 'uvloop', 'kvplane.cli.main'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_what_is_no_command_is_said_to_be_none() -> None:
    result = CliRunner().invoke(app, ["drian", "d"])
    assert result.exit_code == 2
    assert "No such command 'drian'. Did you mean 'drain'?" in result.output
    assert "No such command 'xyzzy'." in CliRunner().invoke(app, ["xyzzy"]).output


def program(*arguments: str | bytes, to: str = "", **variables: str) -> tuple[int, str, str]:
    """Run the program, its output captured or in a file."""
    with open(to or os.devnull, "wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=file if to else subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
            check=False,
        )
    return done.returncode, (done.stdout or b"").decode("latin-1"), done.stderr.decode()


def test_what_the_encoding_of_a_terminal_lacks_is_escaped() -> None:
    code, said, told = program("config", "show", PYTHONIOENCODING="latin-1", KVPLANE_TENANT="\u65e5é")
    assert (code, told) == (0, "")
    assert 'tenant = "\\u65e5é"\n' in said


@pytest.mark.parametrize("command", ["drain", "explain"])
def test_an_argument_that_is_no_text_is_named(command: str) -> None:
    code, _, told = program(command, b"\xff", KVPLANE_PLANE="127.0.0.1:1")
    assert (code, told) == (2, "kvplane: '\\udcff' is not text in the encoding of this locale\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_a_full_disk_is_said_to_be_full() -> None:
    code, _, told = program("config", "show", to="/dev/full")
    assert (code, told.count("\n"), "no space left on device" in told) == (2, 1, True)


@pytest.fixture(scope="module")
def kvplane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of the name, as pip installs it, and all shells have to find."""
    path = tmp_path_factory.mktemp("bin") / "kvplane"
    path.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    path.chmod(0o755)
    return path


def completed(kvplane: Path, **variables: str) -> str:
    environment = {**os.environ, "PATH": f"{kvplane.parent}:{os.environ['PATH']}", **variables}
    done = subprocess.run([kvplane], env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.stdout


def test_bash_itself_completes_commands_and_options(kvplane: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = (
        "source <(_KVPLANE_COMPLETE=source_bash kvplane); complete -p kvplane >/dev/null || exit 9\n"
        'function_of() { complete -p kvplane | sed "s/.*-F \\([^ ]*\\).*/\\1/"; }\n'
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); $(function_of) kvplane; '
        'printf "%s\\n" "${COMPREPLY[@]}"; }\n'
        "ask kvplane d; echo; ask kvplane drain --no\n"
    )
    environment = {**os.environ, "PATH": f"{kvplane.parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands, options = done.stdout.split("\n\n")
    assert set(commands.split()) == {"doctor", "drain"}
    assert options.split() == ["--no-wait"]


def test_zsh_is_told_commands_with_their_help(kvplane: Path) -> None:
    source = completed(kvplane, _KVPLANE_COMPLETE="source_zsh")
    assert "#compdef kvplane" in source
    said = completed(kvplane, _KVPLANE_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="kvplane en")
    assert "engines" in said
    assert "List engines" in said
    assert "drain" not in said


def test_fish_is_told_commands_with_their_help(kvplane: Path) -> None:
    source = completed(kvplane, _KVPLANE_COMPLETE="source_fish")
    assert "complete --command kvplane" in source
    said = completed(
        kvplane,
        _KVPLANE_COMPLETE="complete_fish",
        _TYPER_COMPLETE_ARGS="kvplane en",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "engines\tList engines" in said
