"""Whose record goes first: checked against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.controlplane import keys
from kvplane.controlplane import model as m
from kvplane.controlplane.crowd import Crowd

TENANTS = ("", "a", "b", "ab", "\x00\x01")


def turns(tenant: str, name: int) -> bytes:
    return keys.turns(m.ConversationKey(tenant, "m", "", f"c{name}"))


def tenant_of(key: bytes) -> str:
    return keys.conversation_of(key).tenant_id


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "discard", "take", "put_back"]), st.sampled_from(TENANTS), st.integers(0, 5)
    ),
    max_size=60,
)


@given(STEPS)
def test_the_oldest_of_who_has_most_goes(steps: list[tuple[str, str, int]]) -> None:
    crowd, model = Crowd(), list[bytes]()  # the model: all keys, oldest first
    for step, tenant, name in steps:
        key = turns(tenant, name)
        if step == "add":
            crowd.add(key)
            model = [*(other for other in model if other != key), key]
        elif step == "discard":
            crowd.discard(key)
            model = [other for other in model if other != key]
        elif not model:
            with pytest.raises(KeyError):
                crowd.take()
        else:
            counts = {each: sum(tenant_of(key) == each for key in model) for each in TENANTS}
            taken = crowd.take()
            mine = [key for key in model if tenant_of(key) == tenant_of(taken)]
            assert counts[tenant_of(taken)] == max(counts.values())
            assert taken == mine[0]
            if step == "take":
                model.remove(taken)
            else:
                crowd.put_back(taken)
        assert len(crowd) == len(model)


def test_of_tenants_that_have_as_many_the_least_recent_writer_pays() -> None:
    crowd = Crowd()
    for tenant in "abc":
        crowd.add(turns(tenant, 0))
    crowd.add(turns("a", 0))
    assert [tenant_of(crowd.take()) for _ in range(3)] == ["b", "c", "a"]
