"""What tenants may take of something that all of them need. No I/O."""

from __future__ import annotations

_TIMES_FREE = 4


class Shares:
    """How much each tenant has of something there is `total` of; 0 sets no bound.

    A tenant may take more only as long as it then has at most four times what is left for the others: one
    alone gets four fifths, two get four ninths each, and those who come next find something. The tenant ""
    stands for all where there are no tenants; it may take everything.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._has: dict[str, int] = {}
        self.taken = 0
        """By all together."""

    def may_take(self, tenant: str, amount: int = 1) -> bool:
        """Tell whether a tenant may take more."""
        if not self._total:
            return True
        left = self._total - self.taken - amount
        if left < 0:
            return False
        has = self._has.get(tenant, 0)
        return not tenant or not has or has + amount <= _TIMES_FREE * left

    def take(self, tenant: str, amount: int = 1) -> None:
        """Note that a tenant has taken something."""
        self.taken += amount
        self._has[tenant] = self._has.get(tenant, 0) + amount

    def give(self, tenant: str, amount: int = 1) -> None:
        """Note that it has given it back."""
        self.taken -= amount
        left = self._has.get(tenant, 0) - amount
        if left > 0:
            self._has[tenant] = left
        else:
            self._has.pop(tenant, None)
