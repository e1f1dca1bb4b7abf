"""Whose record goes first when there is no room for all: no tenant pays for another's crowd."""

from __future__ import annotations

from collections import OrderedDict

from kvplane.controlplane import keys
from kvplane.store.base import Event


class Crowd:
    """The keys of a kind of record, by tenant, each tenant's in the order in which they were written last.

    The next to go is the oldest of the tenant that has the most; of tenants that have as many, of the one
    that wrote least recently. So none loses one as long as another has more. All methods are O(1).
    """

    def __init__(self) -> None:
        self._by_tenant: dict[bytes, OrderedDict[bytes, None]] = {}
        self._by_count: dict[int, OrderedDict[bytes, None]] = {}  # tenants, least recently written first
        self._most = 0
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def note(self, event: Event) -> None:
        """Follow the mirror: a record was written, or is gone."""
        if event.current is None:
            self.discard(event.key)
        else:
            self.add(event.key)

    def add(self, key: bytes) -> None:
        """Put a key last among its tenant's."""
        tenant = keys.tenant_of(key)
        mine = self._by_tenant.get(tenant)
        if mine is None:
            mine = self._by_tenant[tenant] = OrderedDict()
        before = len(mine)
        mine[key] = None
        mine.move_to_end(key)
        if len(mine) > before:
            self._total += 1
            self._moved(tenant, before, before + 1)
        else:
            self._by_count[before].move_to_end(tenant)

    def discard(self, key: bytes) -> None:
        """Take a key off, if it is there."""
        tenant = keys.tenant_of(key)
        mine = self._by_tenant.get(tenant)
        if mine is None or key not in mine:
            return
        del mine[key]
        self._total -= 1
        self._moved(tenant, len(mine) + 1, len(mine))
        if not mine:
            del self._by_tenant[tenant]

    def take(self) -> bytes:
        """Take off the key that is to go first, and return it. Raises KeyError if there is none."""
        if not self._total:
            raise KeyError("there is none")
        tenant = next(iter(self._by_count[self._most]))
        key = next(iter(self._by_tenant[tenant]))
        self.discard(key)
        return key

    def put_back(self, key: bytes) -> None:
        """Put a key that was taken first among its tenant's again."""
        self.add(key)
        self._by_tenant[keys.tenant_of(key)].move_to_end(key, last=False)

    def _moved(self, tenant: bytes, before: int, count: int) -> None:
        if before:
            alike = self._by_count[before]
            del alike[tenant]
            if not alike:
                del self._by_count[before]
        if count:
            self._by_count.setdefault(count, OrderedDict())[tenant] = None
        if count > self._most or self._most not in self._by_count:
            self._most = count
