"""The order of keys, with chunks small enough to see them split and vanish."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.store import sortedkeys
from kvplane.store.sortedkeys import SortedKeys

KEYS = st.binary(max_size=3)


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sortedkeys, "_CHUNK_KEYS", 3)
        yield


@given(steps=st.lists(KEYS, max_size=150), start=KEYS)
def test_iterates_like_a_sorted_set(steps: list[bytes], start: bytes) -> None:
    keys, model = SortedKeys(), set[bytes]()
    for key in steps:  # each second time, a key goes
        if key in model:
            keys.remove(key)
        else:
            keys.add(key)
        model ^= {key}
    assert [*keys.iterate(b"", inclusive=True)] == sorted(model)
    assert [*keys.iterate(start, inclusive=True)] == sorted(key for key in model if key >= start)
    assert [*keys.iterate(start, inclusive=False)] == sorted(key for key in model if key > start)


@pytest.mark.parametrize("step", [1, -1, 7])
def test_all_added_and_all_removed(step: int) -> None:
    keys = SortedKeys()
    numbers = sorted(range(100), key=lambda number: (number * step) % 101)
    for number in numbers:
        keys.add(b"%03d" % number)
    assert [*keys.iterate(b"", inclusive=True)] == [b"%03d" % number for number in range(100)]
    assert next(keys.iterate(b"041", inclusive=False)) == b"042"
    for number in numbers:
        keys.remove(b"%03d" % number)
    assert not [*keys.iterate(b"", inclusive=True)]
    keys.add(b"again")
    keys.clear()
    assert not [*keys.iterate(b"", inclusive=False)]
