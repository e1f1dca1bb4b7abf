"""Stores with one defect each, by which the conformance checks are checked: the list and how to get on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvplane.store.base import Compare, Operation
from kvplane.store.memory import MemoryStore

Compares = Sequence[Compare]
Operations = Sequence[Operation]
M = TypeVar("M", bound=type[MemoryStore])


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defective store, and the names of checks that have to notice."""

    store: type[MemoryStore]
    checks: tuple[str, ...]


MUTANTS: list[Mutant] = []


def caught_by(*checks: str) -> Callable[[M], M]:
    """Put a store on the list (decorator)."""

    def register(store: M) -> M:
        MUTANTS.append(Mutant(store, checks))
        return store

    return register
