"""Random histories on real vLLM; `python -m tests.e2e.histories` runs as many as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from deploy.rig.engines import small_model
from deploy.rig.process import RigError
from deploy.rig.stack import Stack
from tests.e2e.histories import exact_stack, run

pytestmark = pytest.mark.vllm

HISTORIES = 40


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    try:
        model = small_model()
    except RigError as error:
        pytest.fail(str(error), pytrace=False)
    with exact_stack(model, tmp_path_factory.mktemp("histories")) as stack:
        yield stack


def test_random_histories_give_the_tokens_of_recomputing_and_reuse_what_is_equal(exact: Stack) -> None:
    report = asyncio.run(run(exact, HISTORIES, seed=20261130))
    figures = report.summary()
    said = json.dumps(figures, indent=1)
    assert figures["histories_equal"] == HISTORIES, said
    assert figures["histories_reuse_exact"] == HISTORIES, said
    assert figures["tokens_pulled"] == figures["tokens_transferred_by_p_metrics"], said
    assert set(figures["served"]) == {"cold", "pull", "direct"}, said
    assert figures["turns_with_part_reused"] >= HISTORIES // 4, "edits leave prefixes to reuse"
    assert figures["different_replies"] > figures["turns"] * 0.8, "or equal tokens would prove nothing"
