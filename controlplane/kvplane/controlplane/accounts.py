"""Sums by name, of which a bounded number are shown by name and all others together."""

from __future__ import annotations

from collections.abc import Iterator

OTHER = "other"
"""The label of what has none of its own. A name that is the same shares it."""
_IDLE_S = 3600.0
"""A name that has held nothing for so long gives its label up."""


class Account:
    """What is held, and what came of it. Counts, and sums over time; `now` is in seconds of one clock."""

    __slots__ = ("_block_s", "_since", "blocks", "conversations", "held_blocks", "saved_tokens", "tokens")

    def __init__(self, now: float) -> None:
        self.conversations = 0
        """Retained and claimable, as the next two."""
        self.tokens = 0
        self.blocks = 0
        self.held_blocks = 0
        """Those, and those of open claims."""
        self.saved_tokens = 0
        """Tokens of locations that were read by a claim."""
        self._block_s = 0.0
        self._since = now

    def block_seconds(self, now: float) -> float:
        """Return the sum of blocks held, times the seconds they were, up to now."""
        return self._block_s + self.held_blocks * max(0.0, now - self._since)

    def hold(self, blocks: int, now: float) -> None:
        """Hold so many blocks more from now on, or less."""
        if now > self._since:
            self._block_s += self.held_blocks * (now - self._since)
            self._since = now
        self.held_blocks += blocks

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self.conversations and not self.held_blocks

    def idle_s(self, now: float) -> float:
        """Return for how long nothing has changed, in seconds."""
        return now - self._since


class Row:
    """What is shown of one name."""

    __slots__ = ("block_seconds", "blocks", "conversations", "name", "saved_tokens", "tokens")

    def __init__(self, name: str, account: Account, now: float) -> None:
        self.name = name
        self.conversations = account.conversations
        self.tokens = account.tokens
        self.blocks = account.blocks
        self.saved_tokens = account.saved_tokens
        self.block_seconds = account.block_seconds(now)

    def less(self, part: Row) -> None:
        """Take a part out of it."""
        self.conversations -= part.conversations
        self.tokens -= part.tokens
        self.blocks -= part.blocks
        self.saved_tokens -= part.saved_tokens
        self.block_seconds = max(0.0, self.block_seconds - part.block_seconds)


class Accounts:
    """Accounts by name; at most `shown` of them are shown, as long as they last the same.

    A name that gets a label begins to count there; what it had counted before stays with the others, and what
    it has counted when it gives the label up goes with it. So no sum that is shown ever falls.
    """

    def __init__(self, shown: int, now: float) -> None:
        self._most = shown
        self._all: dict[str, Account] = {}
        self._shown: dict[str, Row] = {}  # with what had been counted before
        self._total = Account(now)
        self._retired_s = 0.0
        self._retired_tokens = 0

    def __len__(self) -> int:
        """Return for how many names there is an account."""
        return len(self._all)

    def of(self, name: str, now: float) -> Account:
        """Return the account of a name."""
        account = self._all.get(name)
        if account is None:
            account = self._all[name] = Account(now)
        if name not in self._shown and len(self._shown) < self._most and name != OTHER:
            before = Row(name, account, now)
            before.conversations = before.tokens = before.blocks = 0  # what is there now is shown at once
            self._shown[name] = before
        return account

    def add(self, name: str, sign: int, tokens: int, blocks: int, now: float) -> None:
        """Have a location of a name more, or with `sign` -1 one less."""
        account = self.of(name, now)
        for each in (account, self._total):
            each.conversations += sign
            each.tokens += sign * tokens
            each.blocks += sign * blocks
            each.hold(sign * blocks, now)
        if account.is_empty and name not in self._shown:
            del self._all[name]

    def hold(self, name: str, blocks: int, now: float) -> None:
        """Hold blocks of a name for a claim, or no longer."""
        account = self.of(name, now)
        account.hold(blocks, now)
        self._total.hold(blocks, now)
        if account.is_empty and name not in self._shown:
            del self._all[name]

    def save(self, name: str, tokens: int, now: float) -> None:
        """Count tokens that a claim has read."""
        self._total.saved_tokens += tokens
        if name in self._shown:
            self.of(name, now).saved_tokens += tokens

    def rows(self, now: float) -> Iterator[Row]:
        """Give what is shown, that of all others last, if there are any. O(shown)."""
        for name in [name for name in self._shown if self._is_idle(name, now)]:
            over = self._displayed(name, now)
            self._retired_s += over.block_seconds
            self._retired_tokens += over.saved_tokens
            del self._shown[name], self._all[name]
        rest = Row(OTHER, self._total, now)
        rest.saved_tokens -= self._retired_tokens
        rest.block_seconds = max(0.0, rest.block_seconds - self._retired_s)
        for name in self._shown:
            row = self._displayed(name, now)
            rest.less(row)
            yield row
        if len(self._all) > len(self._shown) or rest.saved_tokens or rest.block_seconds > 1e-3:
            yield rest

    def _displayed(self, name: str, now: float) -> Row:
        row = Row(name, self._all[name], now)
        row.less(self._shown[name])
        return row

    def _is_idle(self, name: str, now: float) -> bool:
        account = self._all[name]
        return account.is_empty and account.idle_s(now) >= _IDLE_S
