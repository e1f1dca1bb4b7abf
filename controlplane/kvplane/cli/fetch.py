"""What commands for people read over HTTP: JSON, and metrics in Prometheus' text format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

_MOST_BYTES = 4 << 20
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Answer:
    """An HTTP answer. `trouble` says why there is none."""

    def __init__(
        self, trouble: str = "", status: int = 0, text: str = "", body: Any = None, date: str = ""
    ) -> None:
        self.trouble = trouble
        self.status = status
        self.text = text
        self.body = body
        self.date = date


async def fetch_text(session: aiohttp.ClientSession, url: str) -> Answer:
    """Get a URL; what goes wrong is in the answer."""
    import aiohttp

    try:
        async with session.get(url, allow_redirects=False) as response:
            raw = await response.content.read(_MOST_BYTES)
            while len(raw) < _MOST_BYTES and (more := await response.content.read(_MOST_BYTES - len(raw))):
                raw += more
            date = response.headers.get("Date", "")
            return Answer("", response.status, raw.decode("utf-8", "replace"), None, date)
    except TimeoutError:
        return Answer("it does not answer in time")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(" ".join(str(error).split())[:300] or type(error).__name__)


async def fetch_json(session: aiohttp.ClientSession, url: str) -> Answer:
    """Get a URL with its body as JSON says it; None if it is none."""
    answer = await fetch_text(session, url)
    try:
        answer.body = json.loads(answer.text) if answer.text else None
    except ValueError:
        answer.body = None
    return answer


def samples(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Give the labels and the value of each sample of a metric; what cannot be read is left out."""
    for line in text.splitlines():
        if not line.startswith(name):
            continue
        found = _SAMPLE.match(line)
        if found is None or found[1] != name:
            continue
        try:
            yield dict(_LABEL.findall(found[2] or "")), float(found[3])
        except ValueError:
            continue


def total(text: str, name: str) -> float:
    """Return the sum of all samples of a metric."""
    return sum(value for _, value in samples(text, name))


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """Return a metric's sums by one of its labels."""
    found = dict[str, float]()
    for labels, value in samples(text, name):
        key = labels.get(label, "")
        found[key] = found.get(key, 0.0) + value
    return found


def first_labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of a metric's first sample."""
    return next((labels for labels, _ in samples(text, name)), {})
