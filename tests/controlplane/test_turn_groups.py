"""A turn that is looked for in several places is counted once, by what became of it as a whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane.client.model import ConversationKey, MissReason
from kvplane.client.turns import TurnsStream
from kvplane.controlplane import model as m
from kvplane.controlplane import turn_groups
from kvplane.controlplane.turn_groups import HIT, TurnGroups
from tests.controlplane.wire import KEY, SPEC, Wire, announcement

UNKNOWN, CLAIMED = m.MissReason.UNKNOWN_CONVERSATION, m.MissReason.CLAIMED


class Counted:
    def __init__(self) -> None:
        self.now = 0.0
        self.counts = [0] * (max(m.MissReason) + 1)
        self.groups = TurnGroups(self.counts, lambda: self.now)

    def seen(self) -> dict[int, int]:
        return {kind: n for kind, n in enumerate(self.groups.as_of_now()) if n}


def test_one_find_makes_it_a_hit_whatever_else_is_missed() -> None:
    c = Counted()
    c.groups.missed("a", UNKNOWN)
    c.groups.found("a")
    c.groups.found("a")
    c.groups.missed("a", CLAIMED)
    c.groups.found("b")
    c.now = 5.0
    assert c.seen() == {HIT: 2}
    c.groups.found("c")
    assert len(c.groups) == 1


def test_a_miss_counts_when_nothing_can_be_found_any_more_and_for_good() -> None:
    c = Counted()
    c.groups.missed("a", UNKNOWN)
    c.groups.missed("a", CLAIMED)
    c.groups.missed("a", UNKNOWN)
    c.now = 0.999
    assert c.seen() == {}
    c.now = 1.0
    assert c.seen() == {CLAIMED: 1}
    # Found too late: a counter does not go back.
    c.groups.found("a")
    assert c.seen() == {CLAIMED: 1, HIT: 1}


def test_as_many_are_open_as_there_is_room_for() -> None:
    c = Counted()
    for number in range(turn_groups._MOST + 5):
        c.groups.missed(str(number), UNKNOWN)
    assert len(c.groups) == turn_groups._MOST
    assert c.seen() == {UNKNOWN: 5}


TOLD = st.tuples(
    st.sampled_from("abc"), st.sampled_from([HIT, UNKNOWN, CLAIMED]), st.sampled_from([0.0, 0.4])
)


@given(st.lists(TOLD, max_size=30))
def test_no_count_is_ever_taken_back(told: list[tuple[str, int, float]]) -> None:
    c, before = Counted(), [0] * 20
    for group, outcome, later in told:
        if outcome == HIT:
            c.groups.found(group)
        else:
            c.groups.missed(group, m.MissReason(outcome))
        for _ in range(2):
            after = c.groups.as_of_now()
            assert all(new >= old for new, old in zip(after, before, strict=False))
            before = after
            c.now += later
    if told and all(later == 0.0 for _, _, later in told):
        c.now = 9.0
        groups = {group for group, _, _ in told}
        hits = {group for group, outcome, _ in told if outcome == HIT}
        seen = c.seen()
        assert (sum(seen.values()), seen.get(HIT, 0)) == (len(groups), len(hits))


async def test_over_the_wire_and_as_a_status(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    turn = (await wire.client.begin_turn(KEY, "r1", turn_group="first")).turn
    await wire.client.announce_location(SPEC.engine_id, epoch, announcement("q1", turn))
    other = ConversationKey("t", "m", "other")
    async with TurnsStream(wire.client.open_turns) as turns:
        assert isinstance(await turns.lookup_location(other, turn_group="second"), MissReason)
        assert (await turns.begin_turn(other, "r2", turn_group="second")).location is None
        assert (await turns.begin_turn(KEY, "r2", turn_group="second")).location is not None
        await turns.lookup_location(KEY)
    wire.clock.jump(1.5)
    counts = (await wire.client.get_status()).counts
    assert counts is not None
    assert (counts.turns, counts.hits) == (2, 1)
