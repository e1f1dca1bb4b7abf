"""What the unit files here start: the words of the command line and its environment, as systemd makes them.

Only what these files use of systemd is known: lines that go on, quotation marks, `%i`, `%N`, `%%`, and
`${NAME}` from `Environment=` and `EnvironmentFile=`. Needs nothing but Python, so that it also runs in vLLM's
environment.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class UnitError(ValueError):
    """A unit file says something that cannot be read; the message names the file and what."""


@dataclass(frozen=True, slots=True)
class Start:
    """One engine process, as one unit with one host's settings starts it.

    Attributes:
        layout: the folder's name, such as "2p3d".
        name: of the unit, with its instance, without ".service".
        words: the command line; the first is the program.
        environment: variables that the unit sets.
        settings: the unit's other settings, by name; the last one counts where several have the name.
    """

    layout: str
    name: str
    words: tuple[str, ...]
    environment: dict[str, str]
    settings: dict[str, str]

    def __str__(self) -> str:
        return f"{self.layout}/{self.name}"

    def option(self, name: str) -> str | None:
        """Return the word after an option, None where the option is not given."""
        return self.words[self.words.index(name) + 1] if name in self.words else None

    @property
    def transfer(self) -> dict[str, Any]:
        """The value of --kv-transfer-config."""
        given: dict[str, Any] = json.loads(self.option("--kv-transfer-config") or "{}")
        return given

    @property
    def extra(self) -> dict[str, Any]:
        """What of it is the connector's."""
        found: dict[str, Any] = self.transfer["kv_connector_extra_config"]
        return found


def starts(folder: Path = HERE) -> Iterator[Start]:
    """Return each unit of each folder with each of the hosts' settings beside it.

    Raises:
        UnitError: a unit has no settings beside it, or cannot be read.
    """
    for unit in sorted(folder.glob("*/*.service")):
        stem = unit.stem
        hosts = sorted(unit.parent.glob(f"{stem}*.env" if stem.endswith("@") else f"{stem}.env"))
        if not hosts:
            raise UnitError(f"{unit}: no example of its settings beside it")
        for host in hosts:
            yield read(unit, host)


def read(unit: Path, host: Path) -> Start:
    """Return what a unit starts with a host's settings.

    Raises:
        UnitError: it names a variable or a specifier that is not there, or a line is no setting.
    """
    name = host.stem
    given = list(_settings(unit, name))
    environment = dict[str, str]()
    for key, value in given:
        if key == "Environment":
            environment |= dict(word.split("=", 1) for word in shlex.split(value))
    for line in host.read_text().splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            environment[key] = value
    settings = dict(given)
    words = []
    for word in shlex.split(settings["ExecStart"]):
        words.append(_filled(word, environment, unit))
    return Start(unit.parent.name, name, tuple(words), environment, settings)


def _settings(unit: Path, name: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^[#;].*\n", "", unit.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        if not line.strip() or line.startswith("["):
            continue
        key, found, value = line.partition("=")
        if not found:
            raise UnitError(f"{unit}: {line[:60]!r} is no setting")
        yield key, _specified(value, name, unit)


def _specified(value: str, name: str, unit: Path) -> str:
    known = {"%": "%", "N": name, "i": name.partition("@")[2]}

    def put(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UnitError(f"{unit}: %{match[1]} is not known here")
        return known[match[1]]

    return re.sub(r"%(.)", put, value)


def _filled(word: str, environment: dict[str, str], unit: Path) -> str:
    def put(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise UnitError(f"{unit}: ${{{match[1]}}} is set nowhere")
        return environment[match[1]]

    return re.sub(r"\$\{(\w+)\}", put, word)
