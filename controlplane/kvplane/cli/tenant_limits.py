"""The file of --tenant-limits: read, checked, and read again when it changes."""

from __future__ import annotations

import asyncio
import difflib
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from kvplane.cli.config import ConfigError
from kvplane.controlplane.quotas import Limits, Quotas, TenantLimits
from kvplane.store.clock import Clock

log = structlog.get_logger(__name__)

OPTION = "--tenant-limits"
EVERY_S = 2.0
"""How often the file is looked at."""
_UNLIMITED = "unlimited"
_MAX_BYTES = 8 << 20
_MAX_TENANT_BYTES = 256
_KEYS = {
    "conversations": "conversations",
    "blocks": "blocks",
    "operations_per_second": "operations_per_s",
}


class LimitsFile:
    """The limits in a file. Raises ConfigError, which names file, table and key, if it makes no sense."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self._content = _content(self.file)
        self._cause = ""
        self.current = _parsed(self.file, self._content)
        """What was in it when it was last read and made sense."""

    def changed(self) -> bool:
        """Read it again; tells whether it says something else than before. Blocks.

        What cannot be read, or makes no sense, changes nothing, and is logged once.
        """
        try:
            content = _content(self.file)
            if content == self._content and not self._cause:
                return False
            limits = _parsed(self.file, content)
        except ConfigError as error:
            if str(error) != self._cause:
                self._cause = str(error)
                log.error("tenant_limits_not_reloaded", cause=self._cause)
            return False
        is_other = limits != self.current
        self.current, self._content, self._cause = limits, content, ""
        return is_other


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{OPTION} {file}: {(error.strerror or 'cannot be read').lower()}") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{OPTION} {file}: is larger than {_MAX_BYTES >> 20} MiB")
    return content


def _parsed(file: Path, content: bytes) -> TenantLimits:
    at = f"{OPTION} {file}"
    try:
        tables = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{at}: not TOML: {error}") from None
    for name in tables:
        if name not in ("default", "tenants"):
            raise ConfigError(f"{at}: {name} is unknown; there may be [default], and [tenants.NAME] for each")
    default = _limits(f"{at}: [default]", tables.get("default", {}), Limits())
    tenants = tables.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ConfigError(f"{at}: tenants is no table; write [tenants.NAME]")
    for name in tenants:
        if not 0 < len(name.encode()) <= _MAX_TENANT_BYTES:
            raise ConfigError(f"{at}: [tenants.{name[:40]!r}]: a tenant's name has 1 to 256 bytes")
    named = {name: _limits(f"{at}: [tenants.{name}]", entry, default) for name, entry in tenants.items()}
    return TenantLimits(default, named)


def _limits(at: str, table: Any, default: Limits) -> Limits:
    """Return the limits of one table; what it leaves out is as in `default`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{at} is no table")
    values = {name: getattr(default, name) for name in _KEYS.values()}
    for name, value in table.items():
        if name not in _KEYS:
            near = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
            raise ConfigError(f"{at} {name} is unknown; {hint}")
        values[_KEYS[name]] = _number(f"{at} {name}", name, value)
    return Limits(**values)


def _number(at: str, name: str, value: object) -> float | None:
    if value == _UNLIMITED:
        return None
    if name == "operations_per_second":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.001 <= value <= 1e9:
            raise ConfigError(f'{at}: {value!r} is not a number from 0.001 to 1e9, or "{_UNLIMITED}"')
        return float(value)
    if type(value) is not int or not 0 <= value < 2**62:
        raise ConfigError(f'{at}: {value!r} is not a whole number from 0, or "{_UNLIMITED}"')
    return value


@asynccontextmanager
async def following(limits: LimitsFile | None, clock: Clock, quotas: Quotas | None) -> AsyncIterator[None]:
    """Have what the file says in force, as long as this is open."""
    if limits is None or quotas is None:
        yield
        return
    task = asyncio.create_task(_follow(limits, clock, quotas), name="tenant-limits")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow(limits: LimitsFile, clock: Clock, quotas: Quotas) -> None:
    while True:
        await clock.sleep(EVERY_S)
        if await asyncio.to_thread(limits.changed):
            quotas.set_limits(limits.current)
            log.info("tenant_limits_reloaded", file=str(limits.file), tenants=len(limits.current.tenants))
