"""One value, handed from one thread to another; neither of them ever waits."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """One thread puts a value, once; another takes it or gives up, once. Exactly one ends up with it.

    Rests on `deque.pop`, which is atomic: who pops the only token decides.
    """

    __slots__ = ("_token", "_value")

    def __init__(self) -> None:
        self._token = deque([None])
        self._value: T | None = None

    @property
    def open(self) -> bool:
        """Whether the value was neither put nor given up."""
        return bool(self._token)

    def put(self, value: T) -> bool:
        """Hand the value over. False: nobody waits for it any more, it is still the caller's."""
        self._value = value  # before the token goes: who finds no token finds the value
        return self._pop()

    def take(self) -> T | None:
        """Return the value, None if it is not there yet."""
        return None if self._token else self._value

    def give_up(self) -> T | None:
        """Wait no longer. Returns the value if it came after all, which is the caller's then."""
        if self._pop():
            return None
        return self._value

    def _pop(self) -> bool:
        try:
            self._token.pop()
        except IndexError:
            return False
        return True
