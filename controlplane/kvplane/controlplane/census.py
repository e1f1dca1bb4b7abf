"""The engines on record, as metrics show them: read off the mirror as they change."""

from __future__ import annotations

from collections import Counter

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.mirror import Mirror
from kvplane.store.base import Event


class EngineCensus:
    """Live engines and their loads as last reported, of the whole fleet."""

    def __init__(self, mirror: Mirror) -> None:
        self.engines: dict[str, m.Engine] = {}
        """By engine id."""
        self.gone = 0
        """Times the record of an engine went: it was deregistered, or its lease ended."""
        self._loads: dict[str, tuple[int, m.EngineLoad]] = {}
        mirror.listen(keys.ENGINES, self._on_engine)
        mirror.listen(keys.LOADS, self._on_load)

    def load(self, engine: m.Engine) -> m.EngineLoad | None:
        """Return an engine's load, None if its incarnation has reported none."""
        engine_epoch, load = self._loads.get(engine.spec.engine_id, (0, None))
        return load if engine_epoch == engine.engine_epoch else None

    def by_state(self) -> dict[tuple[str, str], int]:
        """Count engines by role and state: draining, else attached, unary or silent."""
        counts: Counter[tuple[str, str]] = Counter()
        for engine in self.engines.values():
            state = "draining" if engine.draining else engine.contact.name.lower()
            counts[engine.spec.role.name.lower(), state] += 1
        return dict(counts)

    def _on_engine(self, event: Event) -> None:
        engine_id = keys.engine_id_of(event.key)
        if event.current is None:
            self.gone += 1
            self.engines.pop(engine_id, None)
        else:
            self.engines[engine_id] = records.load_engine(event.current.value)

    def _on_load(self, event: Event) -> None:
        engine_id = event.key.removeprefix(keys.LOADS).decode()
        if event.current is None:
            self._loads.pop(engine_id, None)
        else:
            self._loads[engine_id] = records.load_load(event.current.value)
