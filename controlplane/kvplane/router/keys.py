"""The API keys with which the router asks engines that were started with some."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from kvplane.router.settings import SettingsError, engine_url

log = structlog.get_logger("kvplane.router")

_MOST_BYTES = 1 << 16

Keys = tuple[tuple[str, str], ...]
"""Pairs of the base URL of the only engine that a key is for, "" for any that was named, and the key."""


class KeyFileError(ValueError):
    """The file cannot be used; one line that names flag and remedy, and no key."""


class EngineKeys:
    """Keys from a file, read anew each time they are wanted: keys are exchanged while it runs.

    A line is a key, for the engines that whoever runs the router has named, or `URL KEY`, for that engine
    only. Engines that only registered themselves get no other: anyone could. They are never logged. Without
    a file there are none. `for_requests`: engines get them with clients' requests too, in place of clients'
    own.
    """

    def __init__(self, file: str | None, *, for_requests: bool = False) -> None:
        self._file = file
        self._last: Keys = ()
        self._problem = ""
        self.for_requests = for_requests

    async def read(self) -> Keys:
        """Return what the file says at present. Raises KeyFileError."""
        if self._file is not None:
            self._last = await asyncio.to_thread(_read, self._file)
        return self._last

    async def meant_for(self, url: str, *, named: bool) -> tuple[str, ...]:
        """Return the keys for an engine at present, those it had last where the file cannot be read now.

        `named`: whether it was named by whoever runs the router, and not only by itself. Never raises.
        """
        problem = ""
        try:
            await self.read()
        except KeyFileError as error:
            problem = str(error)
            if problem != self._problem:
                log.warning("engine_api_keys_kept", problem=problem)
        self._problem = problem
        own = tuple(key for origin, key in self._last if origin == url)
        return own or tuple(key for origin, key in self._last if not origin and named)


def _read(file: str) -> Keys:
    flag = f"--engine-api-key-file {file}"
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KeyFileError(f"{flag}: {reason.lower()}") from None
    lines = [line.strip() for line in raw.splitlines()]
    if not any(lines) or len(raw) > _MOST_BYTES:
        raise KeyFileError(f"{flag}: write the engines' API keys into it, one a line")
    return tuple(_pair(line, f"{flag}, line {number}") for number, line in enumerate(lines, 1) if line)


def _pair(line: bytes, where: str) -> tuple[str, str]:
    words = line.split()
    if len(words) > 2 or not all(w.isascii() and w.decode(errors="replace").isprintable() for w in words):
        raise KeyFileError(f"{where}: write KEY, or URL KEY; keys are printable ASCII without spaces")
    if len(words) == 1:
        return "", words[0].decode()
    try:
        return engine_url(words[0].decode(), where), words[1].decode()
    except SettingsError:
        # Not its text: what is in the wrong place may be a key.
        raise KeyFileError(f"{where}: the first of two words is no URL of an engine") from None
