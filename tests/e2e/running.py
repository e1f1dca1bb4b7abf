"""One stack of real engines at a time, kept as long as the tests that come next ask for the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")


class Running:
    """What runs now. A machine with two cores has room for one stack, and a start takes half a minute."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._made: object = None
        self._stops = ExitStack()

    def get(self, key: Hashable, start: Callable[[ExitStack], T]) -> T:
        """Return what runs under `key`; else stop what runs and call `start`, with where to leave its end.

        What it starts later, while others use it, may be left there, too.
        """
        if self._key != key:
            self.stop()
            try:
                self._made = start(self._stops)
            except BaseException:
                self._stops.close()
                raise
            self._key = key
        return self._made  # type: ignore[return-value]  # made by this key's `start`

    def stop(self) -> None:
        """Stop what runs, if anything does."""
        self._key = self._made = None
        self._stops.close()
