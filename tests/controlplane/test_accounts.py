"""What engines and tenants hold, and what it costs, adds up; and no sum that is shown ever falls."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvplane.controlplane.accounts import OTHER, Accounts


class Row(NamedTuple):
    conversations: int
    tokens: int
    blocks: int
    saved_tokens: int
    block_seconds: float


def shown(accounts: Accounts, now: float) -> dict[str, Row]:
    return {
        name: Row(
            account.conversations,
            account.tokens,
            account.blocks,
            account.saved_tokens,
            account.block_seconds(now),
        )
        for name, account in accounts.rows(now)
    }


def test_nothing_held_costs_nothing() -> None:
    accounts = Accounts(2, 0.0)
    assert shown(accounts, 100.0) == {}


def test_block_seconds_are_blocks_times_seconds_to_the_moment_they_are_asked_for() -> None:
    accounts = Accounts(2, 0.0)
    accounts.add("d", 1, 100, 4, 10.0)
    assert shown(accounts, 10.0)["d"].block_seconds == 0.0
    assert shown(accounts, 12.5)["d"].block_seconds == 10.0
    accounts.add("d", -1, 100, 4, 15.0)
    row = shown(accounts, 1000.0)["d"]
    assert (row.block_seconds, row.conversations, row.tokens, row.blocks) == (20.0, 0, 0, 0)


def test_a_claim_is_held_but_not_retained() -> None:
    accounts = Accounts(2, 0.0)
    accounts.hold("d", 4, 0.0)
    row = shown(accounts, 2.0)["d"]
    assert (row.block_seconds, row.blocks, row.conversations) == (8.0, 0, 0)


def test_who_has_no_label_is_among_the_others() -> None:
    accounts = Accounts(1, 0.0)
    accounts.add("a", 1, 10, 1, 0.0)
    accounts.add("b", 1, 20, 2, 0.0)
    accounts.add("c", 1, 30, 3, 0.0)
    rows = shown(accounts, 1.0)
    assert set(rows) == {"a", OTHER}
    assert (rows[OTHER].conversations, rows[OTHER].tokens, rows[OTHER].blocks) == (2, 50, 5)
    assert rows[OTHER].block_seconds == 5.0


def test_one_that_is_called_like_the_others_is_one_of_them() -> None:
    accounts = Accounts(3, 0.0)
    accounts.add(OTHER, 1, 10, 1, 0.0)
    assert shown(accounts, 1.0)[OTHER].tokens == 10


def test_a_label_is_given_up_after_an_hour_of_holding_nothing() -> None:
    accounts = Accounts(1, 0.0)
    accounts.add("a", 1, 10, 1, 0.0)
    accounts.add("a", -1, 10, 1, 10.0)
    assert set(shown(accounts, 3609.9)) == {"a"}
    assert shown(accounts, 3610.0) == {}
    accounts.add("b", 1, 20, 2, 3611.0)
    assert set(shown(accounts, 3612.0)) == {"b"}


def test_a_label_that_is_free_goes_to_who_holds_something_with_what_it_holds() -> None:
    accounts = Accounts(1, 0.0)
    accounts.add("a", 1, 10, 1, 0.0)
    accounts.add("b", 1, 20, 2, 0.0)
    accounts.add("a", -1, 10, 1, 0.0)
    shown(accounts, 4000.0)
    accounts.hold("b", 3, 4000.0)
    rows = shown(accounts, 4001.0)
    assert (rows["b"].blocks, rows["b"].block_seconds) == (2, 5.0)
    assert (rows[OTHER].blocks, rows[OTHER].block_seconds) == (0, 8000.0)


def test_accounts_without_a_label_last_as_long_as_they_hold_something() -> None:
    accounts = Accounts(1, 0.0)
    accounts.add("a", 1, 1, 1, 0.0)
    for number in range(100):
        accounts.add(f"b{number}", 1, 1, 1, 0.0)
    assert len(accounts) == 101
    for number in range(100):
        accounts.add(f"b{number}", -1, 1, 1, 1.0)
    assert len(accounts) == 1


step = st.tuples(
    st.sampled_from(["a", "b", "c", "d", OTHER]),
    st.sampled_from(["add", "remove", "save", "wait", "long"]),
    st.integers(0, 5),
)


@given(st.lists(step, max_size=60), st.integers(0, 3))
def test_sums_never_fall_and_add_up_to_all(steps: list[tuple[str, str, int]], labels: int) -> None:
    accounts, now = Accounts(labels, 0.0), 0.0
    held: dict[str, list[int]] = defaultdict(list)
    block_seconds = saved = 0.0
    before: dict[str, Row] = {}
    for name, what, number in steps:
        if what == "add":
            held[name].append(number)
            accounts.add(name, 1, number * 16, number, now)
        elif what == "remove" and held[name]:
            number = held[name].pop()
            accounts.add(name, -1, number * 16, number, now)
        elif what == "save":
            saved += number
            accounts.save(name, number)
        elif what in ("wait", "long"):
            seconds = number * (1000.0 if what == "long" else 1.0)
            block_seconds += seconds * sum(sum(blocks) for blocks in held.values())
            now += seconds
        rows = shown(accounts, now)
        assert len(rows) <= labels + 1
        assert sum(row.conversations for row in rows.values()) == sum(map(len, held.values()))
        assert sum(row.blocks for row in rows.values()) == sum(map(sum, held.values()))
        assert all(row.blocks >= 0 and row.conversations >= 0 for row in rows.values())
        assert sum(row.saved_tokens for row in rows.values()) <= saved
        assert sum(row.block_seconds for row in rows.values()) <= block_seconds + 1e-3
        for label in rows.keys() & before.keys():
            assert rows[label].block_seconds >= before[label].block_seconds - 1e-6
            assert rows[label].saved_tokens >= before[label].saved_tokens
        before = rows
