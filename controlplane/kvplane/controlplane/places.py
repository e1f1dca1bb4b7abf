"""How many streams of a kind a replica serves."""

from __future__ import annotations

from types import TracebackType

from kvplane.controlplane.errors import TooManyStreamsError


class Places:
    """So many places; `with` takes one. Entering raises TooManyStreamsError where none is free."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self.taken = 0
        """How many are."""

    def __enter__(self) -> None:
        if self.taken >= self._most:
            raise TooManyStreamsError(self._what, self._most)
        self.taken += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.taken -= 1
