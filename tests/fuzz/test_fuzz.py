"""A short hunt with each target: of a fixed seed, and of one that is the test run's own (and printed)."""

from __future__ import annotations

import asyncio
import random

import pytest
import structlog

from tests.fuzz.chance import Chance
from tests.fuzz.core import Finding, Hunt, Target, Wrong, named
from tests.fuzz.registry import TARGETS

INPUTS = 4000
"""Of all targets together, from either seed."""
_WHOLE = sum(kind.share for kind in TARGETS.values())


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """In place of that of all tests: here the loop's time is not the clock's, and files are inputs."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name: str) -> None:
    kind = TARGETS[name]
    found = list[Finding]()
    for seed in (1, random.randrange(10**9)):
        hunt = Hunt(kind, seed, found.append)
        hunt.run(0, max(20, round(INPUTS * kind.share / _WHOLE)))
        print(f"{name}: seed {seed}: {named(hunt.report.statuses)}")
    assert not found, "\n".join(
        f"{f.seed} {f.number}: {f.problem}\n{f.detail}\n{f.input!r}"[:3000] for f in found
    )


class Broken(Target):
    """A target in which everything that can be found happens."""

    name = "broken"

    async def once(self, chance: Chance) -> str:
        kind = chance.below(5)
        if kind == 0:
            raise ZeroDivisionError
        if kind == 1:
            raise Wrong("an invariant")
        if kind == 2:
            await asyncio.Event().wait()
        if kind == 3:
            try:
                raise ValueError
            except ValueError:
                structlog.get_logger().exception("it_failed")
        if kind == 4:

            async def fail() -> None:
                raise LookupError

            task = asyncio.ensure_future(fail())
            await asyncio.sleep(1)
            del task
        return "done"


def test_what_must_not_happen_is_found() -> None:
    found = list[Finding]()
    Hunt(Broken, 1, found.append).run(0, 60)
    problems = sorted(finding.problem.partition(" at ")[0] for finding in found)
    assert problems == [
        "Wrong: an invariant",
        "ZeroDivisionError",
        "hangs",
        "logged it_failed: ValueError",
        "loop: Task exception was never retrieved LookupError",
    ]
    assert all(finding.number < 60 for finding in found)
