from __future__ import annotations

import pytest

from kvplane.client.model import (
    Announcement,
    ConversationKey,
    EngineLoad,
    Fingerprint,
    ReleaseOutcome,
    RequestId,
)
from kvplane.client.outbox import MAX_BATCH, Outbox
from kvplane.client.session import _to_wire
from kvplane.controlplane.decoding import MAX_REQUEST_BYTES


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def announcement(name: str, params: bytes = b"{}") -> Announcement:
    key = ConversationKey("t", "m", name)
    return Announcement(key, RequestId(name), 1, 64, 2, params, Fingerprint(64, b"12345678"), 0.0)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def outbox(time: Time) -> Outbox:
    return Outbox(monotonic=time, margin_s=5.0, limit=4)


def ids(*names: str) -> list[RequestId]:
    return [RequestId(name) for name in names]


def test_empty_outbox_gives_an_empty_batch(outbox: Outbox) -> None:
    batch, expired = outbox.take()
    assert not batch.announcements
    assert not expired
    assert not outbox.urgent


def test_announced_life_is_what_is_left_when_sent_less_the_margin(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    time.now += 100
    (sent,) = outbox.take()[0].announcements
    assert sent.ttl_s == pytest.approx(375)
    assert not sent.reannounced


def test_exactly_at_the_margin_it_is_dropped_and_said_so(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 5)
    batch, expired = outbox.take()
    assert not batch.announcements
    assert expired == ids("a")
    assert len(outbox) == 0


def test_oldest_unsent_announcements_go_when_too_many_wait(outbox: Outbox, time: Time) -> None:
    dropped = [
        gone for name in "abcdef" for gone in outbox.announce(announcement(name), expires_at=time.now + 480)
    ]
    assert dropped == ids("a", "b")
    assert outbox.dropped == 2
    assert [sent.request_id for sent in outbox.take()[0].announcements] == ids("c", "d", "e", "f")


def test_sent_announcements_are_never_dropped_for_new_ones(outbox: Outbox, time: Time) -> None:
    for name in "abcd":
        outbox.announce(announcement(name), expires_at=time.now + 480)
    outbox.take()
    outbox.restart()  # all four wait to be announced again
    assert outbox.announce(announcement("e"), expires_at=time.now + 480) == []
    assert len(outbox) == 5


def test_withdrawing_what_was_never_sent_asks_nobody(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    assert outbox.withdraw(RequestId("a")) is False
    batch, _ = outbox.take()
    assert not batch.announcements
    assert not batch.withdrawals


def test_withdrawing_what_was_sent_asks(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    outbox.take()
    assert outbox.withdraw(RequestId("a")) is True
    assert outbox.take()[0].withdrawals == ids("a")
    assert outbox.withdrawing
    assert outbox.withdrawn(RequestId("a"), ReleaseOutcome.RELEASED)
    assert not outbox.withdrawing
    assert not outbox.withdrawn(RequestId("a"), ReleaseOutcome.RELEASED)  # said once


def test_withdrawing_the_unknown_asks_nobody(outbox: Outbox) -> None:
    assert outbox.withdraw(RequestId("a")) is False


def test_a_new_stream_announces_again_and_asks_again(outbox: Outbox, time: Time) -> None:
    for name in "abcd":
        outbox.announce(announcement(name), expires_at=time.now + 480)
    outbox.take()
    for name in "bc":
        outbox.withdraw(RequestId(name))
    outbox.take()
    outbox.withdrawn(RequestId("c"), ReleaseOutcome.CLAIMED)
    outbox.ordered(RequestId("d"))
    time.now += 80
    outbox.restart()
    batch, _ = outbox.take()
    (again,) = batch.announcements
    assert again.request_id == "a"
    assert again.ttl_s == pytest.approx(395)
    assert again.reannounced
    assert batch.withdrawals == ids("b", "c")


def test_freed_is_said_only_of_what_was_sent(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    outbox.take()
    outbox.announce(announcement("b"), expires_at=time.now + 480)
    for name in "abx":
        outbox.freed(RequestId(name))
    batch, _ = outbox.take()
    assert batch.freed == ids("a")
    assert not batch.announcements
    assert len(outbox) == 0


def test_freed_is_said_again_if_its_message_was_lost(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    outbox.take()
    outbox.freed(RequestId("a"))
    batch, _ = outbox.take()
    outbox.lost([batch])
    outbox.restart()
    assert outbox.take()[0].freed == ids("a")


def test_an_order_is_passed_on_once_and_answered_if_nothing_is_held(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    outbox.take()
    assert outbox.ordered(RequestId("a")) is True
    assert outbox.ordered(RequestId("a")) is False
    assert outbox.ordered(RequestId("unknown")) is False
    assert outbox.take()[0].freed == ids("unknown")


def test_a_renewal_to_a_new_deadline(outbox: Outbox, time: Time) -> None:
    assert not outbox.renew(RequestId("a"), expires_at=time.now + 100)
    outbox.announce(announcement("a"), expires_at=time.now + 60)
    assert outbox.renew(RequestId("a"), expires_at=time.now + 100)  # goes with the announcement
    (sent,) = outbox.take()[0].announcements
    assert sent.ttl_s == pytest.approx(95)
    assert outbox.renew(RequestId("a"), expires_at=time.now + 300)
    assert outbox.take()[0].renewals == {"a": pytest.approx(295)}
    assert outbox.take()[0].renewals == {}


def test_a_renewal_lost_with_its_stream_comes_with_the_next_announcement(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 60)
    outbox.take()
    outbox.renew(RequestId("a"), expires_at=time.now + 300)
    lost, _ = outbox.take()
    assert lost.renewals
    outbox.restart()
    outbox.lost([lost])
    (again,) = outbox.take()[0].announcements
    assert again.reannounced
    assert again.ttl_s == pytest.approx(295)


def test_what_is_not_to_stay_is_not_renewed(outbox: Outbox, time: Time) -> None:
    for name in ("withdrawn", "ended", "freed"):
        outbox.announce(announcement(name), expires_at=time.now + 60)
    outbox.take()
    outbox.withdraw(RequestId("withdrawn"))
    outbox.ordered(RequestId("ended"))
    outbox.freed(RequestId("freed"))
    for name in ("withdrawn", "ended", "freed"):
        assert not outbox.renew(RequestId(name), expires_at=time.now + 300)
    assert outbox.take()[0].renewals == {}


def test_renewals_carry_the_true_life(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("a"), expires_at=time.now + 480)
    outbox.renew(RequestId("a"))  # not sent yet: nothing to correct
    outbox.take()
    time.now += 10
    outbox.renew(RequestId("a"))
    outbox.renew(RequestId("unknown"))
    assert outbox.take()[0].renewals == {"a": pytest.approx(465)}


def test_only_a_changed_load_is_sent(outbox: Outbox) -> None:
    assert not outbox.load_due
    outbox.set_load(EngineLoad(1, 2, 3, 4, 5))
    assert outbox.take()[0].load == EngineLoad(1, 2, 3, 4, 5)
    outbox.set_load(EngineLoad(1, 2, 3, 4, 5))
    assert not outbox.load_due
    outbox.restart()
    assert outbox.load_due


def test_a_load_that_changes_soon_after_one_was_sent_is_sent_later(outbox: Outbox, time: Time) -> None:
    """Or the control plane, which writes one a second at most, would keep the older one for good."""
    outbox.set_load(EngineLoad(1))
    outbox.take()
    time.now += 0.9
    outbox.set_load(EngineLoad(2))
    assert not outbox.load_due
    assert outbox.take()[0].load is None
    time.now += 0.2
    assert outbox.load_due
    assert outbox.take()[0].load == EngineLoad(2)


def test_batches_are_bounded_in_number_and_bytes(time: Time) -> None:
    outbox = Outbox(monotonic=time, limit=10_000)
    for number in range(MAX_BATCH + 1):
        outbox.announce(announcement(str(number)), expires_at=time.now + 480)
    assert len(outbox.take()[0].announcements) == MAX_BATCH
    assert len(outbox.take()[0].announcements) == 1
    for number in range(8):
        outbox.announce(announcement(f"big{number}", bytes(1 << 20)), expires_at=time.now + 480)
    assert len(outbox.take()[0].announcements) == 2


def test_the_largest_message_is_one_that_the_control_plane_takes(time: Time) -> None:
    """Ids as long as may be, announcements up to the bound and one of the largest more, all else full."""
    outbox = Outbox(monotonic=time, limit=10_000)
    names = [RequestId(f"{number:0256}") for number in range(MAX_BATCH)]
    key = ConversationKey("\u00e9" * 128, "m" * 256, "c" * 256, "a" * 256)
    for name, params in zip(names, [*[100] * 400, 1_299_992], strict=False):
        print_ = Fingerprint(64, b"12345678")
        whole = Announcement(
            key, name, 1 << 40, 1 << 30, 1 << 30, bytes(params), print_, 0.0, "http://" + "h" * 2041
        )
        outbox.announce(whole, expires_at=time.now + 480)
    batch, _ = outbox.take()
    assert len(batch.announcements) == 401
    batch.withdrawals, batch.freed, batch.renewals = names, names, dict.fromkeys(names, 480.123)
    batch.load = EngineLoad(1)
    assert 3_500_000 < _to_wire(1 << 40, batch, sent_at_ms=1 << 40).ByteSize() < MAX_REQUEST_BYTES


def test_reports_of_freed_blocks_are_bounded(time: Time) -> None:
    outbox = Outbox(monotonic=time, limit=1)
    for number in range(100):
        outbox.ordered(RequestId(str(number)))
    assert len(outbox.take()[0].freed) == 8


def test_announcements_sent_before_do_not_count_against_those_that_wait(outbox: Outbox, time: Time) -> None:
    """With more conversations retained than the limit, and the control plane away."""
    for number in range(10):
        outbox.announce(announcement(f"old{number}"), expires_at=time.now + 480)
        outbox.take()
    outbox.restart()
    dropped = [
        gone
        for number in range(6)
        for gone in outbox.announce(announcement(f"new{number}"), expires_at=time.now + 480)
    ]
    assert dropped == ids("new0", "new1")
    sent = [sent.request_id for sent in outbox.take()[0].announcements]
    assert sent == ids(*(f"old{n}" for n in range(10)), "new2", "new3", "new4", "new5")


def test_what_is_condemned_is_asked_back_and_never_announced_again(outbox: Outbox, time: Time) -> None:
    outbox.announce(announcement("sent"), expires_at=time.now + 480)
    outbox.take()
    outbox.announce(announcement("unsent"), expires_at=time.now + 480)
    outbox.renew(RequestId("sent"), expires_at=time.now + 600)
    assert outbox.condemn() == ids("unsent")
    batch, _ = outbox.take()
    assert (batch.announcements, batch.withdrawals, batch.renewals) == ([], ids("sent"), {})
    outbox.restart()  # the next incarnation
    batch, _ = outbox.take()
    assert (batch.announcements, batch.withdrawals) == ([], ids("sent"))
    outbox.announce(announcement("new"), expires_at=time.now + 480)
    assert [sent.request_id for sent in outbox.take()[0].announcements] == ["new"]


def test_nothing_to_condemn(outbox: Outbox) -> None:
    assert outbox.condemn() == []
    assert not outbox.urgent


def test_what_a_reader_holds_or_has_ended_is_left_as_it_is(outbox: Outbox, time: Time) -> None:
    for name in ("claimed", "ended"):
        outbox.announce(announcement(name), expires_at=time.now + 480)
    outbox.take()
    outbox.withdraw(RequestId("claimed"))
    outbox.withdrawn(RequestId("claimed"), ReleaseOutcome.CLAIMED)
    outbox.ordered(RequestId("ended"))
    outbox.take()
    assert outbox.condemn() == []
    assert outbox.take()[0].withdrawals == []
