"""Whose retained blocks are given up first, among those that may be.

First what leaves its tenant its fair share, then what leaves at least half of it; within that, what is worth
least. A tenant up to its share gives up nothing, since another has more than its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from random import Random
from typing import Generic, Protocol, TypeVar

from kvplane.connector.fairness import FairShares

SAMPLE = 64
_OF_SAMPLE = 4


class Candidate(Protocol):
    """What may be given up. `slot` is kept here: its place among its tenant's, -1 for none."""

    tenant: str
    slot: int


C = TypeVar("C", bound=Candidate)

Value = Callable[[C], "tuple[bool, bool, float, int]"]
"""(goes last of all, goes late, worth, tie): what is least goes first."""


class Victims(Generic[C]):
    """The candidates, by tenant.

    Victims are the four that are least of a sample of 64, then of the next, so that each costs 16 values
    however many there are; of up to 64 they are the least of all, in order.

    Args:
        shares: of the tenants, kept by the owner.
        value: of a candidate.
        alone: how many blocks come free without a candidate.
    """

    def __init__(self, shares: FairShares, value: Value[C], alone: Callable[[C], int]) -> None:
        self._shares = shares
        self._value = value
        self._alone = alone
        self._random = Random(0)
        self._of: dict[str, list[C]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, candidate: C) -> None:
        """Add one."""
        mine = self._of.setdefault(candidate.tenant, [])
        candidate.slot = len(mine)
        mine.append(candidate)
        self._count += 1

    def discard(self, candidate: C) -> None:
        """Take one off, if it is there: the last one takes its slot."""
        if candidate.slot < 0:
            return
        mine = self._of[candidate.tenant]
        last = mine.pop()
        if last is not candidate:
            mine[candidate.slot] = last
            last.slot = candidate.slot
        candidate.slot = -1
        self._count -= 1
        if not mine:
            del self._of[candidate.tenant]

    def in_order(self, room: float) -> Iterator[C]:
        """Yield victims until `room` blocks are left or nothing is; each is to be taken off before the next.

        The room is what shares are of. O(tenants) besides, for a few victims at a time.
        """
        while self._count:
            first: int | None = None
            for candidate in self._least(room):
                rank = self._rank(candidate, room)
                if first is not None and rank > first:
                    break  # its tenant has come down meanwhile: others are to be looked at first
                first = rank if first is None else first
                yield candidate

    def _rank(self, candidate: C, room: float) -> int:
        """Return how late a candidate goes for its tenant's sake; see `_standing`."""
        return self._standing(candidate.tenant, self._alone(candidate), room) if self._shares.several else 0

    def _standing(self, tenant: str, loss: float, room: float) -> int:
        """Return how hard a tenant would be hit by a loss of so many blocks.

        0: it is left its share. 1: at least half of it. 2: less, as where there are more tenants than there
        is room for conversations, and each one's only one is more than its share. 3: it has no more than its
        share.
        """
        used, share = self._shares.used(tenant), self._shares.share(tenant, room)
        if used <= share:
            return 3
        left = used - loss
        return 0 if left >= share else 1 if left >= share / 2 else 2

    def _least(self, room: float) -> list[C]:
        """Return a few that are least, in order: of a sample, or if there are few, all."""
        lists = self._lists(room)
        count = sum(map(len, lists))

        def order(candidate: C) -> tuple[int, tuple[bool, bool, float, int]]:
            return self._rank(candidate, room), self._value(candidate)

        if count > SAMPLE:
            sample = [(order(candidate), candidate) for candidate in self._sample(lists)]
            sample.sort(key=itemgetter(0))
            rank = sample[0][0][0]
            some = [
                candidate
                for (its, (last, late, _, _)), candidate in sample[:_OF_SAMPLE]
                if its == rank and not last and not late
            ]
            if some:
                return some
        return sorted((candidate for some in lists for candidate in some), key=order)

    def _lists(self, room: float) -> Sequence[list[C]]:
        """Return the candidates of those tenants that are hit least by the loss of one of usual size."""
        if not self._shares.several or len(self._of) == 1:
            return list(self._of.values())
        ranks = {
            tenant: self._standing(tenant, self._shares.used(tenant) / len(mine), room)
            for tenant, mine in self._of.items()
        }
        least = min(ranks.values())
        return [mine for tenant, mine in self._of.items() if ranks[tenant] == least]

    def _sample(self, lists: Sequence[list[C]]) -> list[C]:
        if len(lists) == 1:
            return self._random.sample(lists[0], SAMPLE)
        ends = list(accumulate(map(len, lists)))
        drawn = dict[int, C]()
        for some in self._random.choices(lists, cum_weights=ends, k=SAMPLE):
            candidate = self._random.choice(some)
            drawn[id(candidate)] = candidate
        return list(drawn.values())
