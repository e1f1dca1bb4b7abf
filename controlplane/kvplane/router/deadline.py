"""How long a client waits: so long a request is worked on, and no longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvplane.router.openai import BadRequestError

_WHOLE = (("x-request-timeout", 1.0), ("x-envoy-expected-rq-timeout-ms", 0.001))
"""Headers that limit a request as a whole, and their unit in seconds."""
_BEGIN = (("x-stainless-read-timeout", 1.0), ("x-stainless-timeout", 1.0))
"""Headers of OpenAI's and Anthropic's SDKs: so long they wait for an answer to begin."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Seconds from a request's arrival; None without a limit."""

    begin_s: float | None = None
    """Until an answer begins. An answer that is not streamed begins when it is whole."""
    whole_s: float | None = None
    """Until the answer's end."""


def deadline(headers: Mapping[str, str], limit_s: float) -> Deadline:
    """Return the shortest of a router's own limit (0: none) and those a request's headers name.

    Headers that are no positive number are no limit: some clients write "none". See check_timeout.
    """
    whole = _shortest(headers, _WHOLE, limit_s or math.inf)
    begin = _shortest(headers, _BEGIN, whole)
    return Deadline(begin if begin < math.inf else None, whole if whole < math.inf else None)


def check_timeout(headers: Mapping[str, str]) -> None:
    """Refuse an x-request-timeout that is no number, "none" or empty. Raises BadRequestError.

    A client that writes "30s" would take it that a limit is kept. Other headers come from SDKs and proxies.
    """
    value = headers.get("x-request-timeout", "").strip()
    if value.lower() in ("", "none"):
        return
    try:
        float(value)
    except ValueError:
        raise BadRequestError(
            "header x-request-timeout must be a number of seconds, such as 2.5", "x-request-timeout"
        ) from None


def _shortest(headers: Mapping[str, str], names: tuple[tuple[str, float], ...], limit_s: float) -> float:
    for name, unit in names:
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            continue
        if 0 < seconds < limit_s:
            limit_s = seconds
    return limit_s
