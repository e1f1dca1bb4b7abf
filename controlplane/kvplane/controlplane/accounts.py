"""Sums by name, of which a bounded number are shown by name and all others together."""

from __future__ import annotations

from collections.abc import Iterator

OTHER = "other"
"""The label of what has none of its own. A name that is the same shares it."""
_IDLE_S = 3600.0
"""A name that has held nothing for so long gives its label up."""


class Account:
    """What is held, and what came of it. Counts, and sums over time; `now` is in seconds of one clock."""

    __slots__ = (
        "block_s",
        "blocks",
        "conversations",
        "held_blocks",
        "is_shown",
        "saved_tokens",
        "since",
        "tokens",
    )

    def __init__(self, now: float, *, is_shown: bool) -> None:
        self.is_shown = is_shown
        """Whether it has a label of its own."""
        self.conversations = 0
        """Retained and claimable, as the next two."""
        self.tokens = 0
        self.blocks = 0
        self.held_blocks = 0
        """Those, and those of open claims."""
        self.saved_tokens = 0
        """Tokens of locations that were read by a claim."""
        self.block_s = 0.0
        """Blocks held, times the seconds they were, up to `since`."""
        self.since = now
        """When something changed last."""

    def block_seconds(self, now: float) -> float:
        """Return the sum of blocks held, times the seconds they were, up to now."""
        return self.block_s + self.held_blocks * max(0.0, now - self.since)

    def change(self, conversations: int, tokens: int, blocks: int, held: int, now: float) -> None:
        """Have so much more of each from now on, or less."""
        if now > self.since:
            self.block_s += self.held_blocks * (now - self.since)
            self.since = now
        self.held_blocks += held
        self.conversations += conversations
        self.tokens += tokens
        self.blocks += blocks

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self.conversations and not self.held_blocks


class Accounts:
    """Accounts by name; at most `shown` of them are shown by name, as long as they last the same.

    A name that gets a label begins to count there, with what it holds now; what it has counted before stays
    with the others. So no sum that is shown ever falls.
    """

    def __init__(self, shown: int, now: float) -> None:
        self._most = shown
        self._all: dict[str, Account] = {}
        self._shown: dict[str, Account] = {}
        self._others = Account(now, is_shown=True)
        self._has_others = False

    def __len__(self) -> int:
        """Return for how many names there is an account."""
        return len(self._all)

    def _of(self, name: str, now: float) -> Account:
        """Return the account of a name, which gets a label if one is to be had."""
        account = self._all.get(name)
        if account is None:
            account = self._all[name] = Account(now, is_shown=False)
        if not account.is_shown and len(self._shown) < self._most and name != OTHER:
            self._others.change(
                -account.conversations, -account.tokens, -account.blocks, -account.held_blocks, now
            )
            account.is_shown, account.block_s, account.since = True, 0.0, now
            self._shown[name] = account
        return account

    def add(self, name: str, sign: int, tokens: int, blocks: int, now: float) -> None:
        """Have a location of a name more, or with `sign` -1 one less."""
        account = self._shown.get(name)
        if account is None:
            self._change(name, sign, sign * tokens, sign * blocks, sign * blocks, now)
            return
        # As Account.change: this is done for each claim and announcement, and calls take most of the time.
        if now > account.since:
            account.block_s += account.held_blocks * (now - account.since)
            account.since = now
        blocks *= sign
        account.held_blocks += blocks
        account.conversations += sign
        account.tokens += sign * tokens
        account.blocks += blocks

    def hold(self, name: str, blocks: int, now: float) -> None:
        """Hold blocks of a name for a claim, or no longer."""
        account = self._shown.get(name)
        if account is None:
            self._change(name, 0, 0, 0, blocks, now)
            return
        if now > account.since:
            account.block_s += account.held_blocks * (now - account.since)
            account.since = now
        account.held_blocks += blocks

    def _change(self, name: str, conversations: int, tokens: int, blocks: int, held: int, now: float) -> None:
        account = self._of(name, now)
        account.change(conversations, tokens, blocks, held, now)
        if not account.is_shown:
            self._has_others = True
            self._others.change(conversations, tokens, blocks, held, now)
            if account.is_empty:
                del self._all[name]

    def save(self, name: str, tokens: int) -> None:
        """Count tokens that a claim has read."""
        account = self._shown.get(name)
        if account is None:
            self._has_others, account = True, self._others
        account.saved_tokens += tokens

    def rows(self, now: float) -> Iterator[tuple[str, Account]]:
        """Give what is shown, that of all others last, if there ever were any. O(shown)."""
        for name, account in list(self._shown.items()):
            if account.is_empty and now - account.since >= _IDLE_S:
                del self._shown[name], self._all[name]
        yield from self._shown.items()
        if self._has_others:
            yield OTHER, self._others
