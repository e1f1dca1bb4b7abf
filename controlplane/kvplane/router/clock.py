"""The time of day, for what others have dated. The only module of the router that reads it."""

from __future__ import annotations

import time


def wall_s() -> float:
    """Return seconds since the Unix epoch."""
    return time.time()
