"""Which metrics have moved, told from the pages that show them."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values(page: str) -> Values:
    """Return a page's samples, by name of the family and labels."""
    found: Values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = (("sample", sample.name), *sorted(sample.labels.items()))
            if not sample.name.endswith("_created"):
                found[_full(family.name, family.type), labels] = sample.value
    return found


def _full(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


class Watcher:
    """Compares each page with the first."""

    def __init__(self, first: str) -> None:
        self._first = values(first)
        self.moved: set[str] = set()
        """Names of metrics of which a sample was another than at first, or than 0 where there was none."""

    def look(self, page: str) -> None:
        """Take in one more page."""
        for at, value in values(page).items():
            if not _same(value, self._first.get(at, 0.0)):
                self.moved.add(at[0])


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
