from __future__ import annotations

from structlog.testing import capture_logs

from kvplane.controlplane import keys, ledger, records
from kvplane.controlplane.throttle import Throttle
from kvplane.store.base import KeyValue


def test_one_line_a_second_of_each_kind_and_none_is_uncounted() -> None:
    now = 0.0
    throttle = Throttle(lambda: now)
    assert [throttle.due("a") for _ in range(4)] == [0, None, None, None]
    assert throttle.due("b") == 0
    now = 0.99
    assert throttle.due("a") is None
    now = 1.0
    assert throttle.due("a") == 4
    now = 2.0
    assert throttle.due("a") == 0


def test_a_damaged_record_that_is_read_often_is_named_once() -> None:
    ledger._damaged._last.clear()
    item = KeyValue(keys.LOCATIONS + b"x", b"\xff", 1, 0)
    with capture_logs() as logs:
        for _ in range(100):
            assert ledger.understood(item, records.load_location) is None
    assert [line["event"] for line in logs] == ["record_not_understood"]
