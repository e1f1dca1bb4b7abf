"""How many tokens of its tenant's budget a request is counted as."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvplane.router.app import APIS
from kvplane.router.tenancy.caller import Caller
from kvplane.router.tenancy.meters import Meter
from kvplane.router.tenancy.model import Quota
from tests.router.rig import CHAT


def spent(api: str, body: dict[str, Any]) -> float:
    """Return how many tokens a request is counted as."""
    meter = Meter(Quota(tokens_per_minute=10**9), 1, lambda: 0.0)
    Caller("t", meter=meter).mark(body, 0, APIS[api].limits)
    assert meter._tokens is not None
    return 10**9 - meter._tokens.level(0.0)


@pytest.mark.parametrize(
    ("api", "body", "tokens"),
    [
        (CHAT, {}, 1024),
        (CHAT, {"max_tokens": 400}, 400),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 400}, 400),
        (CHAT, {"max_tokens": 400, "max_completion_tokens": 1}, 400),
        (CHAT, {"max_tokens": "400"}, 400),
        (CHAT, {"max_tokens": 400.0}, 400),
        (CHAT, {"max_tokens": 40, "n": 10}, 400),
        (CHAT, {"max_tokens": 40, "n": "10"}, 400),
        (CHAT, {"max_tokens": 40, "best_of": 10, "n": 2}, 400),
        ("/v1/completions", {"prompt": ["a"] * 10, "max_tokens": 40}, 400),
        ("/v1/completions", {"prompt": [[1, 2]] * 10, "max_tokens": 40}, 400),
        ("/v1/completions", {"prompt": [1] * 10, "max_tokens": 40}, 40),
        ("/v1/responses", {"max_output_tokens": 400, "max_tokens": 1}, 400),
        ("/v1/responses", {"max_tokens": 1}, 1024),
        ("/v1/messages", {"max_tokens": 400, "max_completion_tokens": 1}, 400),
    ],
)
def test_a_reply_counts_as_what_an_engine_may_generate(api: str, body: dict[str, Any], tokens: int) -> None:
    assert spent(api, body) == tokens


@pytest.mark.parametrize("odd", [None, "", "x", "1e999", "nan", "9" * 5000, -5, 0, [], {}, math.inf])
def test_a_limit_that_is_none_counts_as_no_limit(odd: object) -> None:
    assert spent(CHAT, {"max_tokens": odd, "n": odd, "prompt": odd}) == 1024
