"""What engines have said that they do not serve: those of whom it is not known what they serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvplane.router.engine import Engine

_KEPT_S = 30.0
"""For how long an engine is not asked again for what it does not serve: adapters come later."""
_MOST_MODELS = 256
_MOST_NAME = 256
"""Names are the clients', so neither many nor long ones are remembered."""


class Lacking:
    """Remembers who has refused which model. `monotonic` reads seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._said: OrderedDict[str, dict[Engine, float]] = OrderedDict()

    def note(self, engine: Engine, model: str) -> None:
        """Remember that an engine says it does not serve a model."""
        if len(model) > _MOST_NAME:
            return
        now = self._monotonic()
        said = self._said.pop(model, {})
        self._said[model] = {e: until for e, until in said.items() if until > now} | {engine: now + _KEPT_S}
        if len(self._said) > _MOST_MODELS:
            self._said.popitem(last=False)

    def fit(self, engines: Iterable[Engine], model: str) -> list[Engine]:
        """Return the engines that serve a model, and those that have not said what they serve or do not."""
        said = self._said.get(model)
        if said is None:
            return [e for e in engines if not e.models or model in e.models]
        now = self._monotonic()
        return [e for e in engines if (model in e.models if e.models else said.get(e, 0.0) <= now)]
