"""Fixed and adaptive leases on one trace: the curve, as points and a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvplane.bench.leases.replay import Adaptive, Fixed, Outcome, Policy, Setting, replay
from kvplane.bench.leases.trace import Turn

TTLS_S = (10.0, 20.0, 30.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 360.0, 420.0, 480.0)
"""Fixed leases, as far as they are below the longest."""
SHARES = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99)
"""Shares of the longest lease's savings that adaptive leases are to keep."""
FIXED, ADAPTIVE = "fixed", "adaptive"


@dataclass(frozen=True, slots=True)
class Point:
    """One policy's outcome.

    Attributes:
        kind: "fixed" or "adaptive".
        value: the fixed lease in seconds, or the share of savings to keep; None for the engine's default.
        outcome: of the replay.
        saved_share: tokens saved, of those that the longest fixed lease saves without a budget.
        held_share: block-seconds, of those that it takes.
    """

    kind: str
    value: float | None
    outcome: Outcome
    saved_share: float
    held_share: float

    @property
    def name(self) -> str:
        """What to call it in a table."""
        if self.kind == FIXED:
            return f"fixed {self.value:g} s"
        return "adaptive (default)" if self.value is None else f"adaptive, keep {self.value:.0%}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed: the longest lease, the setting, and the policies' values."""

    max_ttl_s: float = 480.0
    setting: Setting = field(default_factory=Setting)
    shares: tuple[float, ...] = SHARES
    seed: int = 0

    @property
    def ttls_s(self) -> list[float]:
        """Fixed leases, the longest last."""
        return [ttl_s for ttl_s in TTLS_S if ttl_s < self.max_ttl_s] + [self.max_ttl_s]

    @property
    def replays(self) -> int:
        """How often the trace is replayed."""
        return len(self.ttls_s) + len(self.shares) + 1 + (self.setting.budget is not None)


def run(
    turns: Sequence[Turn],
    plan: Plan,
    *,
    begun: Callable[[str], None] = lambda _: None,
    told: Callable[[int], None] = lambda _: None,
) -> list[Point]:
    """Replay a trace against all policies of a plan.

    Args:
        turns: of the trace.
        plan: what to replay.
        begun: called with each policy's name.
        told: called with the number of turns replayed since the last call.
    """
    setting = plan.setting
    unbounded = Setting(setting.block_tokens, setting.ms_per_token)
    base = None
    if setting.budget is not None:
        begun("without a budget")
        base = replay(turns, Fixed(plan.max_ttl_s), unbounded, told)
    done = list[tuple[str, float | None, Outcome]]()
    for kind, value, policy in _policies(plan):
        begun(f"{kind} {value:g}" if value is not None else f"{kind}, as engines do it")
        done.append((kind, value, replay(turns, policy, setting, told)))
    base = base or next(outcome for kind, value, outcome in done if (kind, value) == (FIXED, plan.max_ttl_s))
    return [
        Point(
            kind,
            value,
            outcome,
            outcome.tokens_saved / base.tokens_saved if base.tokens_saved else 0.0,
            outcome.block_seconds / base.block_seconds if base.block_seconds else 0.0,
        )
        for kind, value, outcome in done
    ]


def _policies(plan: Plan) -> Iterator[tuple[str, float | None, Policy]]:
    for ttl_s in plan.ttls_s:
        yield FIXED, ttl_s, Fixed(ttl_s)
    for share in (*plan.shares, None):
        yield (
            ADAPTIVE,
            share,
            Adaptive(
                max_ttl_s=plan.max_ttl_s,
                keep_share=share,
                block_tokens=plan.setting.block_tokens,
                seed=plan.seed,
            ),
        )


def held_share_at(points: Sequence[Point], kind: str, saved_share: float) -> float | None:
    """Return the block-seconds at which a kind's curve saves a share; None if it never does."""
    curve = sorted(((p.saved_share, p.held_share) for p in points if p.kind == kind), key=lambda at: at)
    for before, after in zip([(0.0, 0.0), *curve], curve, strict=False):
        if after[0] >= saved_share > before[0]:
            part = (saved_share - before[0]) / (after[0] - before[0])
            return before[1] + part * (after[1] - before[1])
    return None


def write(path: Path, points: Sequence[Point], plan: Plan, trace: str) -> None:
    """Write all figures as JSON. Raises OSError."""
    path.write_text(json.dumps(document(points, plan, trace), indent=2) + "\n")


def document(points: Sequence[Point], plan: Plan, trace: str) -> dict[str, Any]:
    """Return the run as one JSON object."""
    return {
        "trace": trace,
        "options": {"max_ttl_s": plan.max_ttl_s, **asdict(plan.setting)},
        "results": [
            {
                "kind": point.kind,
                "value": point.value,
                "saved_share": point.saved_share,
                "held_share": point.held_share,
                "hit_rate": point.outcome.hit_rate,
                **asdict(point.outcome),
            }
            for point in points
        ],
    }
