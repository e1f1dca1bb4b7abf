"""Python's cyclic garbage collector, kept from stopping a process that holds millions of records."""

from __future__ import annotations

import gc

_YOUNG = 10_000
_MIDDLE = 20
_NEVER = 1_000_000_000


def spare_the_old() -> None:
    """Have the collector look at young objects only, from now on; once per process, at its start.

    Records are in no cycles and go by their reference counts. A full collection finds nothing among them, and
    walking over a million takes the better part of a second in which nobody is answered.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
