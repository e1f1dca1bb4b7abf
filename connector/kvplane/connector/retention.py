"""How much KV a decode engine keeps for later turns, and whose goes first.

Pure bookkeeping: no vLLM, no network, time injected. The life of what is kept:

    RETAINED -> WITHDRAWING -> FREEING -> gone
                     |            ^
                     +-> CLAIMED -+    (a reader holds it: until read, ordered, or its claim must be over)

Nothing is freed early without an agreement: the control plane said that nobody can read it any more, or
nobody was ever told of it, or the engine has been out of contact for so long that whatever was known of it
is forgotten and whoever was reading is done.

So blocks asked back come after an answer of the control plane and a step or two. Not to let requests wait
that long, so much is asked back ahead as new requests lately took in a moment; nothing is retained while one
waits all the same; and a running one that runs short waits a step for agreed blocks instead of being
preempted. With the control plane out of reach what is retained stays for its lease and one claim timeout at
most, and nothing is added to it if blocks are short.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kvplane.connector.demand import Demand
from kvplane.connector.fairness import FairShares
from kvplane.connector.shares import DistinctBlocks, SoleBlocks
from kvplane.connector.victims import Victims

_ASK_AGAIN_MARGIN_S = 5.0
_TICK_S = 0.25
_PRESSED_S = 2.0
_FREES_SOON_S = 1.0

Worth = Callable[[str, int], float]
"""Value of keeping a request that holds so many blocks alone; what is worth least goes first."""


class State(Enum):
    """Where a retained request stands."""

    RETAINED = auto()
    WITHDRAWING = auto()
    CLAIMED = auto()
    FREEING = auto()


@dataclass(slots=True)
class Entry:
    """One retained request. `blocks` are distinct; `until` is when a CLAIMED one is looked at again.

    `number` grows with each, `slot` is its place among its tenant's to choose victims from, -1 for none.
    """

    request_id: str
    owner: Hashable
    blocks: tuple[int, ...]
    number: int
    tenant: str = ""
    state: State = State.RETAINED
    slot: int = -1
    until: float = 0.0
    agreed: bool = False
    hold_until: float = 0.0


class Retention:
    """The budget. Belongs to the scheduler thread.

    Decisions are left in `take_withdrawals` and `take_frees`, for the caller to carry out. Costs are
    O(blocks of the request) for a change of state and O(1) for a step without any. Victims are those worth
    least of who holds more than its fair share; see Victims.

    Args:
        total_blocks: of the engine's pool.
        fraction: largest share of it to keep.
        floor: share of it below which free blocks make kept ones go.
        monotonic: the clock of everything here.
        lease_ttl_s: after which the control plane forgets an engine it does not hear of.
        claim_timeout_s: after which a reader is done.
        worth: of a request; None: the older, the less.
    """

    def __init__(
        self,
        total_blocks: int,
        *,
        fraction: float = 0.5,
        floor: float = 0.1,
        monotonic: Callable[[], float],
        lease_ttl_s: float = 10.0,
        claim_timeout_s: float = 30.0,
        worth: Worth | None = None,
    ) -> None:
        self.budget = int(total_blocks * fraction)
        """Distinct blocks that may stay."""
        self.floor = int(total_blocks * floor)
        """Free blocks that should be left."""
        # What is on its way out still takes room for a moment; beyond this nothing more comes in.
        self.ceiling = min(self.budget + self.budget // 2, max(self.budget, total_blocks - self.floor))
        """Distinct blocks that may be held for a moment, with those that are on their way out."""
        self.lease_ttl_s = lease_ttl_s
        self.claim_timeout_s = claim_timeout_s
        self.worth = worth
        """May be set before anything is retained."""
        self.demand = Demand(monotonic)
        """What new requests take; so much is kept free ahead of need, up to a quarter of the pool."""
        self._most_demand = total_blocks // 4
        self._monotonic = monotonic
        self._numbers = itertools.count()
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # oldest first
        self._by_owner: dict[Hashable, str] = {}
        self._superseded: OrderedDict[str, None] = OrderedDict()
        self._leaving: dict[str, Entry] = {}
        self._busy: Counter[Hashable] = Counter()
        self._held = DistinctBlocks()  # by any entry
        self._kept = DistinctBlocks()  # by entries that are to stay
        self._staying = SoleBlocks()  # by those, and by entries that a reader holds
        self.shares = FairShares(self._by_tenant, monotonic)
        """Of the budget, by tenant. Its weights may be set before anything is retained."""
        # Victims to choose from: to stay, and the newest of their owner.
        self._choice: Victims[Entry] = Victims(self.shares, self._value, self._alone)
        self._spare: Hashable = None
        self._request_waits = False
        self._pressed_until = -1.0
        self._frees_by = -1.0
        self._withdrawals: list[str] = []
        self._frees: list[str] = []
        self._next_tick = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def held_blocks(self) -> int:
        """Distinct blocks held, those on their way out included."""
        return len(self._held)

    @property
    def kept_blocks(self) -> int:
        """Distinct blocks that are to stay; what counts against the budget."""
        return len(self._kept)

    def request_ids(self) -> list[str]:
        """Return all retained requests, oldest first."""
        return list(self._entries)

    def state(self, request_id: str) -> State | None:
        """Return where a request stands, None if it is not retained."""
        entry = self._entries.get(request_id)
        return entry.state if entry is not None else None

    @property
    def pressed(self) -> bool:
        """Whether blocks had to be asked back for want of room in the last two seconds."""
        return self._monotonic() < self._pressed_until

    @property
    def frees_soon(self) -> bool:
        """Whether blocks come free within a step or two: they are agreed on, and the worker is told."""
        return self._monotonic() < self._frees_by and any(
            entry.state is State.FREEING for entry in self._leaving.values()
        )

    def busy(self, owner: Hashable, running: bool) -> None:
        """Note that a request of an owner came or went: while one is here, the owner's entry goes last."""
        self._busy[owner] += 1 if running else -1
        if self._busy[owner] <= 0:
            del self._busy[owner]

    def is_busy(self, request_id: str) -> bool:
        """Whether a request of the same owner waits or runs."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.owner in self._busy

    def is_within_share(self, request_id: str) -> bool:
        """Whether a request's tenant holds no more than its fair share while others want room, too."""
        entry = self._entries.get(request_id)
        return (
            entry is not None and self.shares.several and not self.shares.is_above(entry.tenant, self.budget)
        )

    def refusal(self, blocks: Iterable[int], tenant: str = "") -> str:
        """Return why a tenant's blocks cannot be retained, "" if they can."""
        self.shares.want(tenant)
        distinct = set(blocks)
        if not distinct:
            return "no_blocks"
        if self._request_waits:  # without retention it would have these blocks now
            return "request_waits"
        if len(distinct) > self.budget:
            return "larger_than_budget"
        held = len(self._held) + self._held.new(distinct)
        if held > self.ceiling:
            return "over_budget"
        # Half of what may be held for a moment is for those who have less than their share.
        is_late = self.shares.several and held > (self.budget + self.ceiling) // 2
        if is_late and self.shares.is_above(tenant, self.budget, more=len(distinct)):
            return "over_share"
        return ""

    def retain(self, request_id: str, owner: Hashable, blocks: Iterable[int], tenant: str = "") -> None:
        """Keep a request's blocks. What no longer fits is withdrawn: superseded, then worth least.

        Of tenants with more than their share first: it may be this very request.
        """
        entry = Entry(request_id, owner, tuple(set(blocks)), next(self._numbers), tenant)
        self.shares.add(tenant, entry.blocks)
        self._entries[request_id] = entry
        self._held.add(entry.blocks)
        self._kept.add(entry.blocks)
        self._staying.add(entry.number, entry.blocks)
        older = self._entries.get(self._by_owner.get(owner, ""))
        if older is not None and older.state is State.RETAINED:
            self._superseded[older.request_id] = None
            self._choice.discard(older)
        self._by_owner[owner] = request_id
        self._choice.add(entry)
        if len(self._kept) > self.budget:
            self._pressed_until = self._monotonic() + _PRESSED_S
            for victim in self._victims(self.budget, spare=owner):
                self._withdraw(victim)
                if len(self._kept) <= self.budget:
                    break

    def relieve(self, free_blocks: int, *, wanted_blocks: int = 0, spare: Hashable = None) -> None:
        """Withdraw for want of free blocks: below the floor, below what new requests are expected to take,
        or for a request that cannot be scheduled.

        Args:
            free_blocks: in the pool now.
            wanted_blocks: that the waiting request needs, 0 if none waits.
            spare: owner whose entry goes last: the conversation that waits.
        """
        coming = len(self._held) - len(self._staying)
        ahead = min(self._most_demand, self.demand.expected())
        self._request_waits = wanted_blocks > free_blocks
        missing = max(self.floor, ahead, wanted_blocks) - free_blocks - coming
        if wanted_blocks and coming == 0 and free_blocks < 2 * wanted_blocks + self.floor:
            missing = max(missing, 1)  # our sum is an estimate; the request does wait
        if missing <= 0 or not len(self._kept):
            return
        self._pressed_until = self._monotonic() + _PRESSED_S
        for victim in self._victims(max(0, len(self._kept) - missing), spare):
            missing -= self._withdraw(victim)
            if missing <= 0:
                return

    def withdraw(self, request_id: str) -> None:
        """Ask a request's blocks back, if they are to stay."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.state is State.RETAINED:
            self._withdraw(entry)

    def withdraw_all(self) -> None:
        """Ask everything back."""
        for request_id in self.request_ids():
            self.withdraw(request_id)

    def claimed(self, request_id: str) -> None:
        """Note that a reader holds a request: it goes by being read."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.state is State.RETAINED:
            self._claim(entry, self._monotonic() + self.claim_timeout_s + _ASK_AGAIN_MARGIN_S)

    def withdrawn(self, request_id: str, *, claimed: bool) -> None:
        """Note the answer to a withdrawal: a reader holds it, or nobody can read it any more."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state is not State.WITHDRAWING:
            return
        if claimed:
            self._claim(entry, self._monotonic() + self.claim_timeout_s + _ASK_AGAIN_MARGIN_S)
        else:
            self._agree(entry)

    def release(self, request_id: str, *, linger_s: float = 0.0) -> None:
        """Note that nobody can read a request's blocks any more: an order, a refusal, or never announced.

        Args:
            request_id: whose blocks they are.
            linger_s: for so long a reader that was too late may still be at it.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.state is not State.FREEING and not entry.agreed:
            if linger_s:
                entry.hold_until = max(entry.hold_until, self._monotonic() + linger_s)
            self._agree(entry)

    def hold(self) -> None:
        """Free nothing early for one claim timeout: the record of who reads what is lost.

        What was agreed on before has no reader that could have begun since, so it is not held for longer: it
        would never go, were a new incarnation begun again and again.
        """
        until = self._monotonic() + self.claim_timeout_s
        for entry in self._entries.values():
            if not entry.agreed:
                entry.hold_until = until

    def freed(self, request_id: str) -> bool:
        """Note that a request's blocks are free; False if it was not retained."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self._leave(entry)
        self._held.remove(entry.blocks)
        self._leaving.pop(request_id, None)
        if self._by_owner.get(entry.owner) == request_id:
            del self._by_owner[entry.owner]
        return True

    def tick(self, last_contact: float | None) -> None:
        """Look after what waits for an answer; call it at every step, it works a few times a second.

        Args:
            last_contact: when the control plane was last in contact, None if never.
        """
        now = self._monotonic()
        if not self._leaving or now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        forgotten = last_contact is None or now - last_contact > self.lease_ttl_s + self.claim_timeout_s
        for entry in list(self._leaving.values()):
            if entry.state is State.FREEING:
                continue
            due = entry.state is State.CLAIMED and now >= entry.until
            if forgotten or (due and entry.agreed):
                self._agree(entry)
            elif due:
                self._withdraw(entry)

    def take_withdrawals(self) -> list[str]:
        """Return the requests to withdraw that were decided on since the last call."""
        taken, self._withdrawals = self._withdrawals, []
        return taken

    def take_frees(self) -> list[str]:
        """Return the requests to free that were decided on since the last call."""
        taken, self._frees = self._frees, []
        return taken

    def _victims(self, room: int, spare: Hashable = None) -> Iterator[Entry]:
        """Yield what may be withdrawn, least valuable first; each must be withdrawn before the next is asked.

        Conversations that have a request here go late: what they hold is used by it, and with `spare` last.
        Who has more than its share of `room` goes before who has not, whatever is used.
        """
        self._spare = spare
        while self._superseded:
            yield self._entries[next(iter(self._superseded))]
        yield from self._choice.in_order(room)

    def _value(self, entry: Entry) -> tuple[bool, bool, float, int]:
        """Return what is least for what goes first."""
        alone = self._alone(entry)
        worth = self.worth(entry.request_id, alone) if self.worth is not None else 0.0
        is_spared = self._spare is not None and entry.owner == self._spare
        return is_spared, entry.owner in self._busy, worth if alone else math.inf, entry.number

    def _alone(self, entry: Entry) -> int:
        return self._staying.alone(entry.number)

    def _by_tenant(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for entry in self._entries.values():
            if entry.state is State.RETAINED:
                yield entry.tenant, entry.blocks

    def _withdraw(self, entry: Entry) -> int:
        """Ask for an entry's blocks back; returns how many blocks that will give."""
        self._withdrawals.append(entry.request_id)
        return self._move(entry, State.WITHDRAWING)

    def _claim(self, entry: Entry, until: float) -> None:
        entry.until = until
        self._move(entry, State.CLAIMED)

    def _agree(self, entry: Entry) -> None:
        entry.agreed = True
        if self._monotonic() < entry.hold_until:
            self._claim(entry, entry.hold_until)
        else:
            self._move(entry, State.FREEING)
            self._frees.append(entry.request_id)
            self._frees_by = self._monotonic() + _FREES_SOON_S

    def _move(self, entry: Entry, state: State) -> int:
        """Change an entry's state; returns how many blocks nobody stays on any more."""
        gone = self._leave(entry)
        entry.state = state
        if state is State.CLAIMED:
            self._staying.add(entry.number, entry.blocks)
        self._leaving[entry.request_id] = entry
        return gone

    def _leave(self, entry: Entry) -> int:
        if entry.state is State.RETAINED:
            self._kept.remove(entry.blocks)
            self.shares.remove(entry.tenant, entry.blocks)
            self._superseded.pop(entry.request_id, None)
            self._choice.discard(entry)
        if entry.state in (State.RETAINED, State.CLAIMED):
            return self._staying.remove(entry.number, entry.blocks)
        return 0
