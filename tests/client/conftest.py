"""For tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    """As everywhere, but for the outbox: its lock is held for microseconds, and shared between threads."""
    with blockbuster_ctx() as blockbuster:
        _allow_outbox(blockbuster)
        yield


def _allow_outbox(blockbuster: BlockBuster) -> None:
    names = {"announce", "withdraw", "renew", "freed", "ordered", "withdrawn", "set_load", "withdrawing"}
    for lock in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
        blockbuster.functions[lock].can_block_in("client/outbox.py", names | {"restart", "lost", "take"})
