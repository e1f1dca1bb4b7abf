"""The file of --tenant-limits: what it may say, and that changes take hold without a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvplane.cli.config import ConfigError
from kvplane.cli.tenant_limits import EVERY_S, LimitsFile, following
from kvplane.controlplane import model as m
from kvplane.controlplane.quotas import Limits, TenantLimits
from kvplane.controlplane.server import ControlPlane
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from tests.cli.test_commands import refused

GOOD = """
[default]
conversations = 1000
blocks = 200_000
operations_per_second = 50

[tenants.acme]
conversations = 5000
operations_per_second = "unlimited"

[tenants."team b"]
blocks = 0
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    return file


def test_tenants_have_what_their_table_says_and_else_the_defaults(tmp_path: Path) -> None:
    limits = LimitsFile(str(written(tmp_path, GOOD))).current
    assert limits.of("anybody") == Limits(1000, 200_000, 50.0)
    assert limits.of("acme") == Limits(5000, 200_000, None)
    assert limits.of("team b") == Limits(1000, 0, 50.0)


def test_an_empty_file_limits_nobody(tmp_path: Path) -> None:
    assert LimitsFile(str(written(tmp_path, ""))).current == TenantLimits()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[default", "not TOML: "),
        ("\x00", "not TOML: "),
        ("[defaults]", "defaults is unknown; there may be [default], and [tenants.NAME] for each"),
        ("conversations = 5", "conversations is unknown; there may be [default]"),
        ("default = 5", "[default] is no table"),
        ("tenants = 5", "tenants is no table; write [tenants.NAME]"),
        ("[tenants]\nacme = 5", "[tenants.acme] is no table"),
        ("[tenants.'']\nblocks = 5", "a tenant's name has 1 to 256 bytes"),
        (f"[tenants.{'x' * 257}]", "a tenant's name has 1 to 256 bytes"),
        ("[tenants.acme]\nblock = 5", "[tenants.acme] block is unknown; did you mean blocks?"),
        ("[tenants.acme]\nxyz = 5", "xyz is unknown; known are conversations, blocks, operations_per_second"),
        ("[default]\nblocks = -1", '[default] blocks: -1 is not a whole number from 0, or "unlimited"'),
        ("[default]\nblocks = 1.5", "[default] blocks: 1.5 is not a whole number"),
        ("[default]\nblocks = true", "[default] blocks: True is not a whole number"),
        ("[default]\nconversations = '7'", "[default] conversations: '7' is not a whole number"),
        ("[default]\nblocks = 99999999999999999999", "is not a whole number"),
        ("[default]\noperations_per_second = 0", "0 is not a number from 0.001 to 1e9"),
        ("[default]\noperations_per_second = nan", "nan is not a number from 0.001"),
        ("[default]\noperations_per_second = true", "True is not a number from 0.001"),
        ("[default]\nblocks = [[[1]]]", "[default] blocks: [[[1]]] is not"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        LimitsFile(str(file))
    assert str(raised.value).startswith(f"--tenant-limits {file}: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_far_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml: no such file or directory"):
        LimitsFile(str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match="is a directory"):
        LimitsFile(str(tmp_path))
    with pytest.raises(ConfigError, match="is larger than 8 MiB"):
        LimitsFile(str(written(tmp_path, "#" * (8 * 2**20 + 1))))


async def test_a_command_with_a_bad_file_does_not_start(tmp_path: Path) -> None:
    file = await asyncio.to_thread(written, tmp_path, "[default]\nblok = 1")
    said = await refused("serve", "--grpc-port", "0", "--tenant-limits", str(file))
    assert said.endswith(f"--tenant-limits {file}: [default] blok is unknown; did you mean blocks?")


async def test_changes_take_hold_and_nonsense_does_not(tmp_path: Path) -> None:
    file = await asyncio.to_thread(written, tmp_path, GOOD)
    limits, clock = await asyncio.to_thread(LimitsFile, str(file)), ManualClock()
    async with MemoryStore(clock) as store:
        quotas = ControlPlane(store, clock, m.Settings(), limits.current).quotas
        assert quotas is not None
        with capture_logs() as lines:
            async with following(limits, clock, quotas):
                await look(clock)
                assert lines == []
                await asyncio.to_thread(file.write_text, "[default]\nblocks = 7")
                await look(clock)
                assert quotas.limits == TenantLimits(Limits(blocks=7))
                for text in ("[default]\nblocks = -7", "[default", "[default]\nblocks = -7"):
                    await asyncio.to_thread(file.write_text, text)
                    await look(clock)
                    await look(clock)
                    assert quotas.limits == TenantLimits(Limits(blocks=7))
                await asyncio.to_thread(file.unlink)
                await look(clock)
                assert quotas.limits == TenantLimits(Limits(blocks=7))
                await asyncio.to_thread(file.write_text, "[default]\nblocks = 8")
                await look(clock)
                assert quotas.limits == TenantLimits(Limits(blocks=8))
            await asyncio.to_thread(file.write_text, "")
            await look(clock)
            assert quotas.limits == TenantLimits(Limits(blocks=8))
        events = [line["event"] for line in lines]
        assert events == [
            "tenant_limits_reloaded",
            *["tenant_limits_not_reloaded"] * 4,
            "tenant_limits_reloaded",
        ]


async def look(clock: ManualClock) -> None:
    """Let the file be looked at once; that is done on a thread."""
    await clock.advance(EVERY_S)
    for _ in range(3):
        await asyncio.get_running_loop().run_in_executor(None, int)
        await settle()
