from __future__ import annotations

from kvplane.client.sparing import LINES, PER_S, Sparing


def test_the_first_lines_go_through_and_the_rest_is_counted() -> None:
    now = 0.0
    sparing = Sparing(lambda: now)
    assert [sparing.fields("a") for _ in range(LINES)] == [{}] * LINES
    assert [sparing.fields("a") for _ in range(7)] == [None] * 7
    assert sparing.fields("b") == {}
    now = PER_S
    assert sparing.fields("a") == {"left_out": 7}
    assert sparing.fields("a") == {}


def test_any_hour_has_at_most_so_many() -> None:
    now, written = 0.0, list[float]()
    sparing = Sparing(lambda: now)
    for _ in range(40_000):
        now += 0.5
        if sparing.fields("a") is not None:
            written.append(now)
    assert len(written) <= LINES * (20_000 / PER_S + 1)
    assert all(later - first >= PER_S for first, later in zip(written, written[LINES:], strict=False))
