"""How many streams of a kind a replica serves, and how many of them for one caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvplane.controlplane.callers import CURRENT
from kvplane.controlplane.errors import TooManyStreamsError

_TIMES_FREE = 4


class Places:
    """So many places. Where callers are told apart, each leaves some for the others.

    A caller gets one more only as long as it then has at most four times what is free: one alone gets four
    fifths of all, and whoever comes next finds a place.
    """

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._has: dict[str, int] = {}
        self.taken = 0
        """How many are."""

    @contextmanager
    def take(self) -> Iterator[None]:
        """Take a place for the caller of this RPC. Raises TooManyStreamsError where there is none for it."""
        caller = CURRENT.get()
        name = caller.identity.name if caller is not None else ""
        free, has = self._most - self.taken - 1, self._has.get(name, 0) + 1
        if free < 0 or (name and 1 < has > _TIMES_FREE * free):
            raise TooManyStreamsError(self._what, self._most, caller=name if free >= 0 else "")
        self.taken += 1
        self._has[name] = has
        try:
            yield
        finally:
            self.taken -= 1
            self._has[name] -= 1
            if not self._has[name]:
                del self._has[name]
