from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane.connector.groups import CacheLayout, Group

groups = st.builds(Group, st.sampled_from([1, 4, 16])) | st.one_of(
    st.builds(Group, st.sampled_from([4, 16]), window=st.integers(1, 100)),
    st.builds(Group, st.sampled_from([4, 16]), chunk=st.integers(1, 100)),
)


def attended(group: Group, tokens: int) -> set[int]:
    """Return the blocks with tokens that the token at place `tokens` attends to, besides itself."""
    first = 0
    if group.window:
        first = max(0, tokens - (group.window - 1))
    elif group.chunk:
        first = tokens // group.chunk * group.chunk
    return {token // group.block_size for token in range(first, tokens)}


def table(group: Group, tokens: int) -> list[int]:
    """Return a sequence's blocks, 1-based ids by place, with what is never attended to again freed."""
    last = -(-tokens // group.block_size)
    lowest = group.start(tokens)
    return [0 if place < lowest else place + 1 for place in range(last)]


@given(groups, st.integers(1, 300), st.data())
def test_exactly_the_blocks_that_are_still_attended_to(group: Group, held: int, data: st.DataObject) -> None:
    kept = group.kept(table(group, held), held)
    assert kept is not None
    tokens = data.draw(st.integers(1, held))
    needed = attended(group, tokens)
    there = {block - 1 for block in table(group, held) if block}
    places = list(range(group.start(tokens), group.end(tokens)))
    assert needed <= set(places)
    cut = group.cut(kept, held, tokens)
    if set(places) <= there:
        assert cut == [place + 1 for place in places]
    else:
        assert cut is None


@given(groups, st.integers(1, 300), st.integers(0, 40))
def test_blocks_of_steps_in_flight_are_left_out(group: Group, settled: int, ahead: int) -> None:
    running = table(group, settled) + [999] * (group.end(settled + ahead) - group.end(settled))
    assert group.kept(running, settled) == group.kept(table(group, settled), settled)


@given(groups, st.integers(1, 300))
def test_what_was_freed_too_early_is_not_kept(group: Group, held: int) -> None:
    blocks = table(group, held)
    for place in attended(group, held):
        assert group.kept([*blocks[:place], 0, *blocks[place + 1 :]], held) is None


def test_fewer_blocks_than_tokens_are_not_kept() -> None:
    assert Group(16).kept([1, 2], 33) is None
    assert Group(16, window=8).kept([0, 2], 33) is None


def test_a_list_that_is_too_long_or_too_short_is_not_cut() -> None:
    assert Group(16).cut([1, 2, 3], 32, 16) is None
    assert Group(16).cut([1], 32, 16) is None


def test_at_the_end_of_a_chunk_nothing_is_needed() -> None:
    group = Group(16, chunk=64)
    assert group.kept([0, 0, 0, 0], 64) == []
    assert group.cut([], 64, 64) == []
    assert group.cut([5], 70, 64) == []
    assert group.cut([5], 70, 60) is None


def test_several_groups_are_all_there_or_none() -> None:
    layout = CacheLayout((Group(16), Group(16, window=16)))
    assert layout.kept([[1, 2, 3], [0, 5, 6]], 40) == [[1, 2, 3], [5, 6]]
    assert layout.kept([[1, 2, 3], [0, 0, 6]], 40) is None
    assert layout.cut([[1, 2, 3], [5, 6]], 40, 32) == [[1, 2], [5]]
    assert layout.cut([[1, 2, 3], [5, 6]], 40, 16) is None
    assert (layout.blocks_for(40), layout.block_size) == (5, 16)
