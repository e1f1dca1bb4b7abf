"""What each tenant may retain, and which of its own conversations go when it retains more.

Retained are conversations whose location is on record and unclaimed. They are counted as the mirror brings
them, so each replica counts what all have written, as far as it has heard of it: what others announced within
the staleness bound may come on top, until the next announcement or sweep. Every displacement is a transaction
of its own that compares what it ends; two replicas that choose the same conversation end it once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from kvplane.controlplane import eager, keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import DomainError
from kvplane.controlplane.ledger import Ledger, understood
from kvplane.controlplane.releases import Releases
from kvplane.controlplane.throttle import Throttle
from kvplane.store.base import Event, KeyValue
from kvplane.store.errors import StoreError

log = structlog.get_logger(__name__)

_ROUNDS = 4
"""How often the excess of a tenant is looked at in a row; the rest is for the next announcement or sweep."""
_AT_ONCE = 64
"""Conversations that are displaced concurrently."""
_PASSED_OVER = 64
"""Of the oldest, conversations in use that are passed over for younger ones that are not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one tenant may have. None: no limit.

    Attributes:
        conversations: retained at a time.
        blocks: of all of them together, each conversation's counted for itself.
        operations_per_s: begin-turns, lookups, claims and touches, on each replica.
    """

    conversations: int | None = None
    blocks: int | None = None
    operations_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of all tenants: `default` is for those that `tenants` does not name."""

    default: Limits = Limits()
    tenants: Mapping[str, Limits] = field(default_factory=dict)

    def of(self, tenant_id: str) -> Limits:
        """Return a tenant's limits."""
        return self.tenants.get(tenant_id, self.default)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant retains, as last known, and what it may."""

    tenant_id: str
    conversations: int
    blocks: int
    limits: Limits


class _Tenant:
    """What is retained for one tenant: keys of locations, the longest unchanged first, and their blocks."""

    __slots__ = ("blocks", "is_ordered", "is_trimmed", "limits", "locations", "tenant_id")

    def __init__(self, tenant_id: str, limits: Limits) -> None:
        self.tenant_id = tenant_id
        self.limits = limits
        self.locations: OrderedDict[bytes, None] = OrderedDict()
        self.blocks = 0
        self.is_ordered = True
        self.is_trimmed = False

    def is_over(self, *, fewer: int = 0, fewer_blocks: int = 0) -> bool:
        """Whether it has more than it may, were there so many fewer."""
        most, most_blocks = self.limits.conversations, self.limits.blocks
        return (most is not None and len(self.locations) - fewer > most) or (
            most_blocks is not None and self.blocks - fewer_blocks > most_blocks
        )


class Quotas:
    """Counts what tenants retain, and keeps it within their limits."""

    def __init__(self, ledger: Ledger, releases: Releases, limits: TenantLimits) -> None:
        self._ledger = ledger
        self._releases = releases
        self._limits = limits
        self._tenants: dict[bytes, _Tenant] = {}
        self._over: dict[bytes, None] = {}
        self._logged = Throttle()
        self.displaced = 0
        """Conversations given up for their tenants' quotas, by this replica."""
        self.refused = 0
        """Announcements refused since they alone were larger than their tenants' quotas."""
        ledger.mirror.listen(keys.LOCATIONS, self._on_location)

    @property
    def limits(self) -> TenantLimits:
        """The limits in force."""
        return self._limits

    def set_limits(self, limits: TenantLimits) -> None:
        """Put other limits in force; what is above them now goes with the next sweep. O(tenants)."""
        self._limits = limits
        self._over.clear()
        for part, tenant in self._tenants.items():
            tenant.limits = limits.of(tenant.tenant_id)
            if tenant.is_over():
                self._over[part] = None

    def rate_of(self, tenant_id: str) -> float | None:
        """Return how many operations a second a tenant may ask for on this replica; None: any number."""
        return self._limits.of(tenant_id).operations_per_s

    def usage(self) -> Iterator[Usage]:
        """Give what each tenant retains that retains anything."""
        for tenant in self._tenants.values():
            yield Usage(tenant.tenant_id, len(tenant.locations), tenant.blocks, tenant.limits)

    def refusal(self, value: m.Announcement) -> str:
        """Return why an announcement can never be kept, "" if it can: it alone is more than the quota."""
        limits = self._limits.of(value.key.tenant_id)
        if limits.conversations == 0:
            return "quota: the tenant may retain no conversations"
        if limits.blocks is not None and value.block_count > limits.blocks:
            return f"quota: {value.block_count} blocks, of {limits.blocks} that the tenant may retain"
        return ""

    def over(self) -> list[bytes]:
        """Return which tenants retain more than they may, as parts of keys."""
        return list(self._over)

    async def after_announcement(self, location_key: bytes) -> None:
        """Keep the tenant of what was just announced within its limits, at the cost of its own oldest.

        Raises nothing: what cannot be displaced now is for the next announcement, or sweep.
        """
        part = keys.tenant_of(location_key)
        if part not in self._over:
            return
        try:
            await self.trim(part)
        except (StoreError, DomainError) as error:
            unlogged = self._logged.due("postponed")
            if unlogged is not None:
                log.warning("quota_postponed", cause=str(error), unlogged=unlogged)

    async def trim(self, part: bytes) -> None:
        """Displace conversations of a tenant until it has no more than it may.

        One at a time for each tenant: whoever comes meanwhile goes on. Raises StoreError, DomainError.
        """
        tenant = self._tenants.get(part)
        if tenant is None or tenant.is_trimmed:
            return
        tenant.is_trimmed, before = True, self.displaced
        try:
            for _ in range(_ROUNDS):
                victims = self._victims(tenant)
                if not victims:
                    break
                await eager.gather([self._displace(victim) for victim in victims], self._ledger.start)
        finally:
            tenant.is_trimmed = False
            if not tenant.locations:
                self._tenants.pop(part, None)
        if self.displaced > before and (unlogged := self._logged.due("displaced")) is not None:
            log.info(
                "quota_exceeded",
                tenant_id=tenant.tenant_id,
                displaced=self.displaced - before,
                conversations=len(tenant.locations),
                blocks=tenant.blocks,
                unlogged=unlogged,
            )

    async def _displace(self, location: m.Location) -> None:
        if await self._releases.displace(location):
            self.displaced += 1

    def _victims(self, tenant: _Tenant) -> list[m.Location]:
        """Return what has to go, of the oldest: those in use later, the newest only if it is all there is."""
        if not tenant.is_ordered:
            self._order(tenant)
        victims, blocks = list[m.Location](), 0
        later = list[m.Location]()
        now = self._ledger.clock.now_ms()
        newest = next(reversed(tenant.locations), None)
        for key in tenant.locations:
            if len(victims) == _AT_ONCE or not tenant.is_over(fewer=len(victims), fewer_blocks=blocks):
                return victims
            location = self._ledger.location_at(key).value
            if location is None:
                continue
            if len(later) < _PASSED_OVER and (key == newest or self._is_in_use(key, location, now)):
                later.append(location)
                continue
            victims.append(location)
            blocks += location.block_count
        for location in later:
            if len(victims) == _AT_ONCE or not tenant.is_over(fewer=len(victims), fewer_blocks=blocks):
                break
            victims.append(location)
            blocks += location.block_count
        return victims

    def _is_in_use(self, location_key: bytes, location: m.Location, now: int) -> bool:
        """Tell whether a conversation's next turn runs, or somebody asked for it to be kept."""
        turns = self._ledger.turns_at(keys.turns_of(location_key)).value
        return location.wanted_until_ms > now or (turns is not None and turns.is_in_flight(now))

    def _order(self, tenant: _Tenant) -> None:
        """Order what was read by key: turns' numbers follow the time. O(locations), once after a start."""
        turns = dict[bytes, int]()
        for key in tenant.locations:
            turns[key] = _size(self._ledger.mirror.get(key))[0]
        tenant.locations = OrderedDict.fromkeys(sorted(tenant.locations, key=turns.__getitem__))
        tenant.is_ordered = True

    def _on_location(self, event: Event) -> None:
        part = keys.tenant_of(event.key)
        tenant = self._tenants.get(part)
        if tenant is None:
            if event.current is None:
                return
            tenant_id = keys.tenant_id_of(event.key)
            tenant = self._tenants[part] = _Tenant(tenant_id, self._limits.of(tenant_id))
        turn_before, blocks_before = _size(event.previous)
        turn, blocks = _size(event.current)
        tenant.blocks += blocks - blocks_before
        if event.current is None:
            tenant.locations.pop(event.key, None)
            if not tenant.locations and not tenant.is_trimmed:
                del self._tenants[part]
        else:
            tenant.locations[event.key] = None
            if turn != turn_before:
                tenant.locations.move_to_end(event.key)
            if not self._ledger.mirror.listed.is_set():
                tenant.is_ordered = False
        if tenant.is_over():
            self._over[part] = None
        else:
            self._over.pop(part, None)


def _size(item: KeyValue | None) -> tuple[int, int]:
    """Return the turn and the blocks of a stored location; of one that is damaged or not there, zeros."""
    return (0, 0) if item is None else understood(item, records.location_turn) or (0, 0)
