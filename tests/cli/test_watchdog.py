"""Signs of life to systemd: from the event loop, as often as they are waited for, and only where they are."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvplane.cli.config import Watchdog, watchdog
from kvplane.cli.watchdog import signs_of_life

GIVEN = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}


def test_who_waits_is_told_by_systemd() -> None:
    assert watchdog(GIVEN, 7) == Watchdog("/run/notify", 60.0)
    assert watchdog({**GIVEN, "NOTIFY_SOCKET": "@x"}, 7) == Watchdog("\0x", 60.0)


@pytest.mark.parametrize(
    "change", [{"NOTIFY_SOCKET": ""}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_PID": "8"}]
)
def test_nobody_waits(change: dict[str, str]) -> None:
    """A router's workers have their parent's environment, and are not what the unit is about."""
    assert watchdog({**GIVEN, **change}, 7) is None


async def test_signs_come_until_it_ends(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.setblocking(False)
        async with signs_of_life(Watchdog(address, 0.03)), asyncio.timeout(10):
            for _ in range(3):
                assert await loop.sock_recv(systemd, 64) == b"WATCHDOG=1"
        while True:  # what came meanwhile
            try:
                systemd.recv(64)
            except BlockingIOError:
                break
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "watchdog"]


async def test_a_socket_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    async with signs_of_life(Watchdog(str(tmp_path / "none"), 0.01)):
        await asyncio.sleep(0.05)
        assert [task for task in asyncio.all_tasks() if task.get_name() == "watchdog"]
    async with signs_of_life(None):
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "watchdog"]
