"""Values that are made of files, and made anew when those change, while the router runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger("kvplane.router")

LOOK_EVERY_S = 1.0
"""How often files are looked at."""
_MOST_BYTES = 1 << 22

T = TypeVar("T")
_State = tuple[tuple[int, ...] | None, ...]


class FileProblemError(ValueError):
    """A file cannot be used: one line that names it and the remedy, and nothing secret of what is in it."""


def read_file(path: str, flag: str) -> bytes:
    """Return what is in a file of at most 4 MiB. Raises FileProblemError, which names `flag`. Blocks."""
    try:
        with open(path, "rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileProblemError(f"{flag} {path}: {reason.lower()}") from None
    if len(raw) > _MOST_BYTES:
        raise FileProblemError(f"{flag} {path}: larger than {_MOST_BYTES} bytes")
    return raw


def _state(paths: Sequence[str]) -> _State:
    """Return what tells one content of files from another; None for one that is not there."""
    found = list[tuple[int, ...] | None]()
    for path in paths:
        try:
            seen = os.stat(path)
        except (OSError, ValueError):
            found.append(None)
        else:
            # Also its mode: a file that could not be read may be readable now.
            found.append((seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino, seen.st_dev))
    return tuple(found)


class Reloaded(Generic[T]):
    """What `build` makes of the files that `paths` names for it, made anew when they change.

    `build` raises FileProblemError where they are of no use; what was there before then stays. It and `paths`
    run on a thread. `on_change` is called, in the event loop, with each new value.
    """

    def __init__(
        self,
        what: str,
        build: Callable[[], T],
        paths: Callable[[T], Sequence[str]],
        *,
        on_change: Callable[[T], None] = lambda value: None,
    ) -> None:
        self._what = what
        self._build = build
        self._paths_of = paths
        self._on_change = on_change
        self.paths: tuple[str, ...] = ()
        """The files, once started."""
        self._used: _State = ()
        self._seen: _State = ()

    async def start(self) -> T:
        """Make the first value. Raises FileProblemError."""
        value, self.paths, self._used = await asyncio.to_thread(self._made)
        self._seen = self._used
        self._on_change(value)
        return value

    def _made(self) -> tuple[T, tuple[str, ...], _State]:
        # The state from before: what is exchanged while it is read counts as a change.
        before = _state(self.paths)
        value = self._build()
        paths = tuple(self._paths_of(value))
        return value, paths, before if paths == self.paths else _state(paths)

    async def look(self) -> bool:
        """Look once; tells whether there is a new value. Never raises.

        Files count as changed when two looks have found them alike: several are exchanged one after another.
        """
        state = await asyncio.to_thread(_state, self.paths)
        settled, self._seen = state == self._seen, state
        if state == self._used or not settled:
            return False
        self._used = state
        try:
            value, self.paths, self._used = await asyncio.to_thread(self._made)
        except FileProblemError as error:
            log.error("files_kept", what=self._what, problem=str(error), effect="what was read before stays")
            return False
        self._seen = self._used
        self._on_change(value)
        log.info("files_reloaded", what=self._what)
        return True

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()
