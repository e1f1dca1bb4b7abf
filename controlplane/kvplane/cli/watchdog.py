"""Signs of life to systemd: a unit with `WatchdogSec=` is started again where they do not come.

They are sent by the event loop that serves, so that they stop where it hangs, and go on while the store or
engines are away.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvplane.cli.config import Watchdog

_SIGNS = 3
"""So many fall into the time after which a process that gives none is taken for one that hangs."""


@asynccontextmanager
async def signs_of_life(watchdog: Watchdog | None) -> AsyncIterator[None]:
    """Give them as long as this is open; nothing where nobody waits for any."""
    if watchdog is None:
        yield
        return
    beating = asyncio.create_task(_beat(watchdog), name="watchdog")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beat(watchdog: Watchdog) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.setblocking(False)
        while True:
            with suppress(OSError):  # who does not take one may take the next
                sending.sendto(b"WATCHDOG=1", watchdog.address)
            await asyncio.sleep(watchdog.patience_s / _SIGNS)
