"""Lines of those that decide on one record: together, all but one of them would decide in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol


class HasKey(Protocol):
    """A compare or a write."""

    @property
    def key(self) -> bytes:
        """Under which its record lies."""


class _Line:
    __slots__ = ("lock", "members")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.members = 0


class Lines:
    """A line for each record that is contested now. Who finds none contested pays for nothing."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, key: bytes) -> bool:
        return key in self._lines

    async def enter(self, key: bytes) -> None:
        """Wait until all that came before have left; at once where there is nobody."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        line.members += 1
        try:
            await line.lock.acquire()
        except BaseException:
            self._gone(key, line)
            raise

    def leave(self, key: bytes) -> None:
        """Let the next one in."""
        line = self._lines[key]
        line.lock.release()
        self._gone(key, line)

    def _gone(self, key: bytes, line: _Line) -> None:
        line.members -= 1
        if not line.members:
            del self._lines[key]


def contested(compares: Sequence[HasKey], writes: Sequence[HasKey]) -> bytes | None:
    """Return the record that a decision changes as it finds it, None if there is none."""
    compared = {compare.key for compare in compares}
    return next((write.key for write in writes if write.key in compared), None)
