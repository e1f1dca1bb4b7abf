"""Decode engines that announce nothing: everything is answered, and nothing is ever reused."""

from __future__ import annotations

import structlog

from kvplane.client.model import EngineRole
from kvplane.router.pool import EnginePool

log = structlog.get_logger("kvplane.router")

REMEDY = (
    "start it with kvplane's connector (kv_connector KVPlaneConnector, kv_connector_module_path"
    " kvplane.connector.plugin) and kvplane_address naming this control plane"
)


_LOOKS = 3
"""An engine that has just started may register after it has been probed."""


class Silence:
    """Compares the decode engines that are used with those that are registered."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._seen: str | None = None
        self._times = 0

    @property
    def problem(self) -> str | None:
        """What is wrong, with the remedy; None if each engine that is used has registered."""
        return self._seen if self._times >= _LOOKS else None

    def look(self) -> None:
        """Look again, after the registry has been read; warns once of each new state of things."""
        found = self._compare()
        self._times = self._times + 1 if found == self._seen else 1
        self._seen = found
        if found is not None and self._times == _LOOKS:
            log.warning("engines_announce_nothing", problem=found)

    def _compare(self) -> str | None:
        # An engine may register without saying where it is; then it is one of those that nobody knows.
        silent = [e.url for e in self._pool.engines if e.decode and e.up and not e.engine_ids]
        unplaced = sum(
            not entry.spec.endpoint and entry.spec.role is not EngineRole.PREFILL
            for entry in self._pool.registered
        )
        if len(silent) <= unplaced:
            return None
        some = "" if not unplaced else f"{len(silent) - unplaced} of "
        return f"no announcements from {some}{', '.join(silent)}: nothing there is reused; {REMEDY}"
