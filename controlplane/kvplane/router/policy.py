"""Which way to serve a turn: cold, pull or direct. Pure functions of what is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Path(StrEnum):
    """A way to serve a turn."""

    COLD = "cold"
    """The prefill engine computes the whole prompt."""
    PULL = "pull"
    """The prefill engine pulls what the decode engine holds and computes the rest."""
    DIRECT = "direct"
    """The decode engine that holds the conversation computes the rest itself."""


class PathMode(StrEnum):
    """What is allowed: the cheapest path, or one that is forced."""

    AUTO = "auto"
    COLD = "cold"
    PULL = "pull"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits in tokens and requests; they decide alone while no rates have been learned."""

    direct_max_new_tokens: int = 2048
    """Up to so much new text goes straight to the decode engine."""
    kv_recompute_threshold: int = 64
    """Less than this is recomputed rather than pulled; as the engines' setting of the same name."""
    busy_outstanding: int = 64
    """Requests of ours on a decode engine from which on it gets no prompts to compute."""
    busy_waiting: int = 16
    """The same for requests it reports as waiting."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What has been learned about a pair of engines, in tokens per second; None while unknown."""

    prefill: float | None = None
    """The prefill engine computes."""
    decode_prefill: float | None = None
    """The decode engine computes prompts."""
    transfer: float | None = None
    """The prefill engine reads KV that the decode engine holds."""
    receive: float | None = None
    """The decode engine reads KV that the prefill engine computed, and begins its answer."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The decode engine that holds the conversation, as the router sees it."""

    usable: bool
    """Known, alive, not draining."""
    outstanding: int = 0
    waiting: int = 0
    ahead_tokens: int = 0
    """Prompt tokens of ours that it has still to compute."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """All that a decision depends on. Tokens are estimates."""

    prompt_tokens: int
    held_tokens: int | None = None
    """What the location holds; None without a location."""
    miss: str = "unknown_conversation"
    """Why there is no location."""
    history_changed: bool = False
    """The request does not extend what the conversation's last one said."""
    holder: Holder = Holder(usable=False)
    prefill_available: bool = True
    prefill_verifies: bool = True
    """Some prefill engine checks fingerprints before it reads."""
    prefill_ahead_tokens: int = 0
    """Prompt tokens of ours that the likely prefill engine has still to compute."""
    local_tokens: int = 0
    """Expected to be in the likely prefill engine's own prefix cache."""
    mode: PathMode = PathMode.AUTO
    rates: Rates = Rates()

    @property
    def new_tokens(self) -> int:
        """Tokens that nobody holds yet."""
        if self.held_tokens is None:
            return self.prompt_tokens
        if self.history_changed:
            # Where the change is decides how much is left, and that is seen only by comparing tokens.
            return max(self.prompt_tokens - self.held_tokens, self.prompt_tokens // 2)
        return max(0, self.prompt_tokens - self.held_tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """A path, why, and what it is expected to bring. `costs` are seconds by path where rates are known."""

    path: Path
    reason: str
    new_tokens: int
    reused_tokens: int
    costs: tuple[tuple[Path, float], ...] = ()


def decide(facts: TurnFacts, limits: Thresholds) -> Decision:
    """Choose how to serve a turn."""
    path, reason, costs = _choose(facts, limits)
    reused = 0 if path is Path.COLD else max(0, min(facts.held_tokens or 0, facts.prompt_tokens))
    return Decision(path, reason, facts.new_tokens, reused, costs)


def _choose(facts: TurnFacts, limits: Thresholds) -> tuple[Path, str, tuple[tuple[Path, float], ...]]:
    if facts.mode is PathMode.COLD:
        return Path.COLD, "forced", ()
    if facts.held_tokens is None:
        return Path.COLD, facts.miss, ()
    can_pull = facts.prefill_available and facts.prefill_verifies
    if facts.mode is PathMode.DIRECT:
        return (Path.DIRECT, "forced", ()) if facts.holder.usable else (Path.COLD, "holder_unusable", ())
    if facts.mode is PathMode.PULL:
        if can_pull:
            return Path.PULL, "forced", ()
        return Path.COLD, _no_pull(facts), ()
    if not facts.prefill_available:
        return (
            (Path.DIRECT, "no_prefill_engine", ())
            if facts.holder.usable
            else (Path.COLD, "no_prefill_engine", ())
        )
    busy = facts.holder.outstanding >= limits.busy_outstanding or facts.holder.waiting >= limits.busy_waiting
    costs = estimate_costs(facts)
    by_path = dict(costs)
    if facts.holder.usable and not busy:
        limit = _direct_limit(limits, by_path, can_pull=can_pull)
        if facts.new_tokens <= limit:
            return Path.DIRECT, "new_text_short", costs
        pull_reason = "history_changed" if facts.history_changed else "new_text_long"
    else:
        pull_reason = "decode_busy" if facts.holder.usable else "holder_unusable"
    if not can_pull:
        return Path.COLD, _no_pull(facts), costs
    if facts.held_tokens < limits.kv_recompute_threshold:
        return Path.COLD, "below_threshold", costs
    if facts.local_tokens and facts.held_tokens - facts.local_tokens < limits.kv_recompute_threshold:
        return Path.COLD, "prefill_has_prefix", costs
    if Path.PULL in by_path and by_path[Path.PULL] > by_path[Path.COLD]:
        reason = "prefill_has_prefix" if facts.local_tokens else "pull_not_worth_it"
        return Path.COLD, reason, costs
    return Path.PULL, pull_reason, costs


def _no_pull(facts: TurnFacts) -> str:
    return "prefill_cannot_verify" if facts.prefill_available else "no_prefill_engine"


def _direct_limit(limits: Thresholds, costs: dict[Path, float], *, can_pull: bool) -> int:
    """Return how many new tokens may go direct: the threshold, moved as far as learned costs go apart.

    Estimates know no fixed costs, of which direct has the fewest: a few tokens go direct whatever they say.
    """
    others = [
        costs[path] for path in (Path.COLD, Path.PULL) if path in costs and (can_pull or path is Path.COLD)
    ]
    if Path.DIRECT not in costs or not others:
        return limits.direct_max_new_tokens
    ratio = costs[Path.DIRECT] / max(min(others), 1e-9)
    if ratio <= 1:
        return limits.direct_max_new_tokens * 4
    return limits.direct_max_new_tokens // (4 if ratio <= 2 else 16)


def estimate_costs(facts: TurnFacts) -> tuple[tuple[Path, float], ...]:
    """Return the expected seconds to the first token by path; empty while the rates are unknown."""
    rates, held = facts.rates, facts.held_tokens or 0
    if not rates.prefill or not rates.transfer:
        return ()
    prompt, local = facts.prompt_tokens, min(facts.local_tokens, facts.prompt_tokens)
    receive = rates.receive or rates.transfer
    queue = facts.prefill_ahead_tokens / rates.prefill
    computed = min(facts.new_tokens, prompt - local)
    # What the holder has itself need not be sent to it.
    sent = facts.new_tokens if facts.holder.usable else prompt
    costs = [
        (Path.COLD, queue + (prompt - local) / rates.prefill + prompt / receive),
        (
            Path.PULL,
            queue + max(0, held - local) / rates.transfer + computed / rates.prefill + sent / receive,
        ),
    ]
    if rates.decode_prefill:
        # While it computes a prompt, the streams that run there wait.
        slowed = 1 + (facts.holder.outstanding + facts.holder.waiting) / 4
        tokens = facts.holder.ahead_tokens + facts.new_tokens
        costs.append((Path.DIRECT, tokens / rates.decode_prefill * slowed))
    return tuple(costs)
