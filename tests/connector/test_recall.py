from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvplane.client.model import ConversationKey
from kvplane.connector.fingerprint import Context, Item, make_chain
from kvplane.connector.recall import PromptMemory

CHUNK = 16
SYSTEM = list(range(100))


def key(name: str) -> ConversationKey:
    return ConversationKey("t", "m", name)


class Memory:
    """A PromptMemory that makes the chains itself."""

    def __init__(self) -> None:
        self.memory = PromptMemory(CHUNK)

    def remember(self, tokens: Sequence[int], name: str, salt: str = "", items: Sequence[Item] = ()) -> None:
        context = Context("m", cache_salt=salt)
        self.memory.remember(
            context.seed(), make_chain(context, tokens, CHUNK, items), tokens, key(name), items
        )

    def take(self, tokens: Sequence[int], salt: str = "", items: Sequence[Item] = ()) -> str | None:
        context = Context("m", cache_salt=salt)
        chain = make_chain(context, tokens, CHUNK, items)
        found = self.memory.take(context.seed(), chain, tokens, items)
        return found.conversation_id if found else None


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 100])
def test_who_begins_with_the_whole_prompt_goes_on_with_it(memory: Memory, length: int) -> None:
    memory.remember(SYSTEM[:length], "a")
    assert memory.take(SYSTEM[:length]) is None, "the same prompt is no continuation"
    assert memory.take([*SYSTEM[: length - 1], 7777, 1, 2]) is None
    assert memory.take([*SYSTEM[:length], 5]) == "a"
    assert memory.take([*SYSTEM[:length], 5]) is None, "each prompt goes on once"
    assert len(memory.memory) == 0


def test_a_common_beginning_is_nobodys(memory: Memory) -> None:
    memory.remember([*SYSTEM, 1, 1, 1], "a")
    memory.remember([*SYSTEM, 2, 2], "b")
    assert memory.take([*SYSTEM, 3, 3, 3, 3]) is None
    assert memory.take([*SYSTEM, 2, 2, 9]) == "b"
    assert memory.take([*SYSTEM, 1, 1, 1, 9]) == "a"


def test_the_longest_wins(memory: Memory) -> None:
    memory.remember(SYSTEM[:40], "short")
    memory.remember(SYSTEM[:43], "same chunk")
    memory.remember(SYSTEM[:90], "long")
    assert memory.take(SYSTEM) == "long"
    assert memory.take(SYSTEM) == "same chunk"
    assert memory.take(SYSTEM) == "short"


def test_what_two_had_alike_is_nobodys(memory: Memory) -> None:
    memory.remember(SYSTEM[:40], "a")
    memory.remember(SYSTEM[:40], "a")
    memory.remember(SYSTEM[:40], "b")
    assert memory.take(SYSTEM) is None
    memory.remember(SYSTEM[:40], "a")
    assert memory.take(SYSTEM) is None


def test_another_salt_is_another_prompt(memory: Memory) -> None:
    memory.remember(SYSTEM[:40], "a", salt="one")
    memory.remember(SYSTEM[:5], "b", salt="one")
    assert memory.take(SYSTEM, salt="two") is None
    assert memory.take(SYSTEM, salt="one") == "a"


@pytest.mark.parametrize("offset", [3, 34])
def test_another_picture_is_another_prompt(memory: Memory, offset: int) -> None:
    memory.remember(SYSTEM[:40], "a", items=[Item("cat", offset, 4)])
    assert memory.take(SYSTEM, items=[Item("dog", offset, 4)]) is None
    assert memory.take(SYSTEM, items=[Item("cat", offset, 4), Item("dog", 60, 4)]) == "a"


def test_memory_is_bounded(memory: Memory) -> None:
    rng = random.Random(1)
    for number in range(5000):
        memory.remember([number, *(rng.randrange(9) for _ in range(30))], f"c{number}")
    assert len(memory.memory) == 4096
    for number in range(100):
        memory.remember([*SYSTEM[:32], number], f"alike{number}")
    assert len(memory.memory) <= 4096
    assert memory.take([*SYSTEM[:32], 20, 1]) is None
    assert memory.take([*SYSTEM[:32], 99, 1]) == "alike99"
