"""The API keys with which the router asks engines that were started with some."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

log = structlog.get_logger("kvplane.router")

_MOST_BYTES = 1 << 16


class KeyFileError(ValueError):
    """The file cannot be used; one line that names flag and remedy, and no key."""


class EngineKeys:
    """Keys from a file, one a line, read anew each time they are wanted: keys are exchanged while it runs.

    They are never logged. Without a file there are none.
    """

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._last: tuple[str, ...] = ()
        self._problem = ""

    async def read(self) -> tuple[str, ...]:
        """Return the keys at present. Raises KeyFileError."""
        if self._file is not None:
            self._last = await asyncio.to_thread(_read, self._file)
        return self._last

    async def current(self) -> tuple[str, ...]:
        """Return the keys at present, those it had last where the file cannot be read now. Never raises."""
        problem = ""
        try:
            await self.read()
        except KeyFileError as error:
            problem = str(error)
            if problem != self._problem:
                log.warning("engine_api_keys_kept", problem=problem)
        self._problem = problem
        return self._last


def _read(file: str) -> tuple[str, ...]:
    flag = f"--engine-api-key-file {file}"
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KeyFileError(f"{flag}: {reason.lower()}") from None
    keys = tuple(key for line in raw.splitlines() if (key := line.strip()))
    if not keys or len(raw) > _MOST_BYTES:
        raise KeyFileError(f"{flag}: write the engines' API keys into it, one a line")
    if not all(key.isascii() and key.decode(errors="replace").isprintable() for key in keys):
        raise KeyFileError(f"{flag}: a key is a line of printable ASCII characters")
    return tuple(key.decode() for key in keys)
