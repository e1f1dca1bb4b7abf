from __future__ import annotations

import threading

from kvplane.client.slot import Slot


def test_what_is_put_is_taken() -> None:
    slot = Slot[str]()
    assert slot.open
    assert slot.take() is None
    assert slot.put("value")
    assert not slot.open
    assert slot.take() == "value"
    assert slot.give_up() == "value"


def test_what_is_given_up_stays_with_the_putter() -> None:
    slot = Slot[str]()
    assert slot.give_up() is None
    assert not slot.open
    assert not slot.put("value")


def test_exactly_one_thread_ends_up_with_the_value() -> None:
    for _ in range(300):
        slot, start, put = Slot[int](), threading.Barrier(2), list[bool]()

        def putting(slot: Slot[int] = slot, start: threading.Barrier = start, put: list[bool] = put) -> None:
            start.wait(10)
            put.append(slot.put(7))

        thread = threading.Thread(target=putting)
        thread.start()
        start.wait(10)
        given = slot.give_up()
        thread.join(10)
        assert put == [given == 7]
