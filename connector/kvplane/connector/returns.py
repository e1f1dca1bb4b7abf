"""How long a finished turn's KV is worth keeping: learned by each engine from when conversations come back.

Pure: no vLLM, no network; time is injected. Belongs to the scheduler thread. An engine

- at the end of each turn that it retains, makes the turn's `Traits` a `lease_class`, asks `ttl_s` for the
  lease, says `retained`, and sends the class along with the announcement;
- at the beginning of each turn whose conversation's last class it is handed (whichever engine held that
  turn, whether or not its KV is still there), says `returned`; each return is to be told to one engine only;
- in a fleet where nobody hands classes on, says `ended` when a retained turn is over, read or not. Both may
  be said: `ended` counts only while returns with a class are too few for a fleet that hands them on;
- asks `worth` for the order in which retained turns are given up, least first.

The signatures that retention relies on:

    ttl_s(tenant_id: str, lease_class: int, *, tokens: int, blocks: int) -> float
    worth(tenant_id: str, lease_class: int, *, idle_s: float, tokens: int, blocks: int) -> float
    retained(tenant_id: str, lease_class: int, *, tokens: int, blocks: int) -> None
    returned(tenant_id: str, lease_class: int, idle_s: float) -> None
    ended(tenant_id: str, lease_class: int, lived_s: float, *, read: bool) -> None

Numbers that cannot be (NaN, below zero) are taken as the nearest that can, classes out of range as class 0;
nothing here raises for what an engine passes in.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvplane.connector.habits import Cohorts, Habits, Passed, bin_edges
from kvplane.connector.lease_class import CLASSES, Traits, lease_class, typical_tokens
from kvplane.connector.price import LOWEST, PRICES, Curve, Savings, steps

__all__ = ["KEEP_SHARE", "Returns", "Traits", "lease_class"]

KEEP_SHARE = 0.95
"""Of what the longest leases for all would save, the share that is kept unless said otherwise."""

_FADE_AFTER = 4000.0
_COLD_TURNS = 200.0
_COLD_RETURNS = 40.0
_GROWN_UP_TURNS = 600.0
_MOST_NUMBER = 1e9


@dataclass(slots=True)
class _Party:
    """What is known of a tenant, or of all together."""

    told: Habits
    seen: Habits
    savings: Savings = field(default_factory=Savings)
    told_returns: float = 0.0
    seen_reads: float = 0.0
    curves: dict[int, tuple[tuple[int, int], Curve]] = field(default_factory=dict)

    @property
    def habits(self) -> Habits:
        """Those that count: from classes handed on, unless reads come without any."""
        return self.told if 2.0 * self.told_returns >= self.seen_reads else self.seen

    @property
    def cold(self) -> bool:
        """Whether too little is known for anything but the longest lease."""
        habits = self.habits
        return habits.turns < _COLD_TURNS and habits.returns < _COLD_RETURNS


class Returns:
    """Learns when conversations come back, and says how long to keep them and which to give up first.

    A call costs about 0.2 ms of CPU in the middle and less than 1 ms nearly always; once in 4,000 turns all
    counts are halved, some milliseconds for a tenant with hundreds of classes. Memory is bounded by
    `max_tenants` and by the number of classes, at some megabytes for a tenant whose turns are of every class.

    Args:
        monotonic: the clock of everything here, in seconds.
        max_ttl_s: the longest lease, and what savings are measured against.
        min_ttl_s: the shortest.
        keep_share: of what the longest leases for all would save, the share (0 to 1) that is to be kept.
        block_tokens: that a full block holds.
        explore: share of turns (0 to 1) that get the longest lease, to find out what shorter ones would hide.
        max_tenants: that are told apart; the least recently seen are forgotten.
        seed: of what is left to chance.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        max_ttl_s: float = 480.0,
        min_ttl_s: float = 20.0,
        keep_share: float = KEEP_SHARE,
        block_tokens: int = 16,
        explore: float = 0.01,
        max_tenants: int = 64,
        seed: int = 0,
    ) -> None:
        _check("max_ttl_s", max_ttl_s, 1.0, 1e7)
        _check("min_ttl_s", min_ttl_s, 0.0, max_ttl_s)
        _check("keep_share", keep_share, 0.0, 1.0)
        _check("explore", explore, 0.0, 1.0)
        _check("block_tokens", block_tokens, 1, _MOST_NUMBER)
        _check("max_tenants", max_tenants, 1, 1_000_000)
        self.max_ttl_s = max_ttl_s
        self.min_ttl_s = min_ttl_s
        self.keep_share = keep_share
        self._monotonic = monotonic
        self._block_tokens = block_tokens
        self._explore = explore
        self._max_tenants = max_tenants
        self._random = Random(seed)
        self._edges = bin_edges(max_ttl_s, min_ttl_s)
        # What nothing is known of may come back at any time: longest leases.
        before = (0.0, *self._edges)
        self._supposed = [
            1.0 - math.exp((start - end) / max_ttl_s) for start, end in zip(before, self._edges, strict=False)
        ]
        self._cohorts = Cohorts(self._edges)
        self._all = self._party(2.0)
        self._tenants: OrderedDict[str, _Party] = OrderedDict()
        self._began: float | None = None  # when the first turn was retained

    @property
    def tenants(self) -> int:
        """How many tenants are told apart now."""
        return len(self._tenants)

    def retained(self, tenant_id: str, lease_class: int, *, tokens: int, blocks: int) -> None:
        """Note a turn that ended and is kept; once for each."""
        now = self._advance()
        if self._began is None:
            self._began = now
        number = _class(lease_class)
        tenant = self._tenant(tenant_id)
        self._cohorts.add(tenant_id, number, now)
        curve = self._curve(tenant, number)
        many, held = _number(tokens, 1.0), _number(blocks, 0.0)
        tenant.savings.foresee(curve, many, steps(self._dearness(many, held)))

    def returned(self, tenant_id: str, lease_class: int, idle_s: float) -> None:
        """Note that a conversation, whose last turn had this class, came back after `idle_s` seconds."""
        now = self._advance()
        number = _class(lease_class)
        idle = _number(idle_s, 0.0)
        tenant = self._tenant(tenant_id)
        for party in (tenant, self._all):
            party.told_returns = _counted(party.told_returns)
        if idle <= self.max_ttl_s:
            tenant.savings.see(self._curve(tenant, number), typical_tokens(number), idle)
        for passed in self._cohorts.back(tenant_id, number, idle, now):
            self._learn(passed)

    def ended(self, tenant_id: str, lease_class: int, lived_s: float, *, read: bool) -> None:
        """Note that a retained turn is over after `lived_s` seconds: read by its next turn, or given up.

        One that was given up says nothing of the time after: it counts up to then only.
        """
        number = _class(lease_class)
        lived = _number(lived_s, 0.0)
        tenant = self._tenant(tenant_id)
        index = bisect_left(self._edges, lived)
        for party in (tenant, self._all):
            if read:
                party.seen_reads = _counted(party.seen_reads)
            habits = party.seen
            # A read ends in a bin; what is given up in one has not gone through it.
            whole = index if read or index >= len(self._edges) or lived < self._edges[index] else index + 1
            for passed in range(min(whole, len(self._edges))):
                habits.count(number, passed, 1.0, 0.0)
            if read and index < len(self._edges):
                habits.count(number, index, 1.0, 1.0)
            habits.completed(1.0, 1.0 if read else 0.0)

    def ttl_s(self, tenant_id: str, lease_class: int, *, tokens: int, blocks: int) -> float:
        """Return the lease to give a turn that ends now, min_ttl_s to max_ttl_s."""
        self._advance()
        tenant = self._tenant(tenant_id)
        explored = self._random.random() < self._explore
        if explored or self._knows_little(tenant):
            return self.max_ttl_s
        curve = self._curve(tenant, _class(lease_class))
        dearness = self._dearness(_number(tokens, 1.0), _number(blocks, 0.0))
        return curve.ttl_s(self.price(tenant_id) * dearness)

    def worth(self, tenant_id: str, lease_class: int, *, idle_s: float, tokens: int, blocks: int) -> float:
        """Return the tokens that a retained turn is expected to save per block-second from now on.

        Args:
            tenant_id: whose it is.
            lease_class: of the turn.
            idle_s: since its end.
            tokens: that its next turn would not have to compute.
            blocks: it holds; those shared with others that stay need not be counted.
        """
        tenant = self._tenants.get(tenant_id, self._all)
        rate = self._curve(tenant, _class(lease_class)).rate(_number(idle_s, 0.0))
        return rate * _number(tokens, 0.0) / max(1.0, _number(blocks, 0.0))

    def price(self, tenant_id: str) -> float:
        """Return the least chance of a return per second for which a full block is held on."""
        tenant = self._tenant(tenant_id)
        if self._knows_little(tenant):
            return LOWEST
        return min(tenant.savings.highest(self.keep_share), PRICES[-1])

    def _knows_little(self, tenant: _Party) -> bool:
        """Tell whether nothing is a reason yet for less than the longest lease.

        So it is until turns are as old as that: before, quick returns have been seen and slow ones cannot
        have been, however many turns there were. A budget is kept by giving up what is worth least.
        """
        began = self._began
        if began is None or self._monotonic() - began < self.max_ttl_s:
            return True
        return tenant.cold and self._all.cold

    def _advance(self) -> float:
        now = self._monotonic()
        for passed in self._cohorts.take(now):
            self._learn(passed)
        return now

    def _learn(self, passed: Passed) -> None:
        last = passed.index == len(self._edges) - 1
        parties = [self._all]
        tenant = self._tenants.get(passed.tenant_id)
        if tenant is not None:
            parties.append(tenant)
        for party in parties:
            party.told.count(passed.lease_class, passed.index, passed.at_risk, passed.back)
            if last or passed.back:
                party.told.completed(passed.at_risk if last else passed.back, passed.back)

    def _curve(self, party: _Party, number: int) -> Curve:
        """Return a class's curve, anew if enough was seen since the last time."""
        version = (party.habits.version, self._all.habits.version)
        known = party.curves.get(number)
        if known is not None and known[0] == version:
            return known[1]
        own = party.habits.chances(number, self._supposed)
        # A young tenant is taken to be like the others; a grown-up one stands for itself.
        share = min(1.0, party.habits.turns / _GROWN_UP_TURNS)
        if share < 1.0 and party is not self._all:
            others = self._all.habits.chances(number, self._supposed)
            own = [share * mine + (1.0 - share) * theirs for mine, theirs in zip(own, others, strict=True)]
        curve = Curve(self._edges, own, self.min_ttl_s)
        party.curves[number] = (version, curve)
        return curve

    def _tenant(self, tenant_id: str) -> _Party:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._tenants[tenant_id] = self._party(1.0)
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant_id)
        return tenant

    def _party(self, factor: float) -> _Party:
        bins = len(self._edges)
        return _Party(Habits(bins, _FADE_AFTER * factor), Habits(bins, _FADE_AFTER * factor))

    def _dearness(self, tokens: float, blocks: float) -> float:
        """Return how many times as many blocks a turn takes as its tokens need."""
        return min(1e3, max(1e-3, blocks * self._block_tokens / tokens))


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: {value!r} is not a number from {low:g} to {high:g}")


def _class(number: int) -> int:
    return number if 0 <= number < CLASSES else 0


def _number(value: float, least: float) -> float:
    """Return a number within bounds; what is none counts as the least."""
    return min(_MOST_NUMBER, value) if value > least else least


def _counted(count: float) -> float:
    """Count one more, forgetting half of it all now and then."""
    return count + 1.0 if count < 1000.0 else (count + 1.0) / 2.0
