"""Random histories of conversations, changed in the ways clients change them. Pure: the seed decides all.

A history is a tuple of messages, a message a role and pieces. Pieces are words where the conversation is held
over the chat API, and token ids where it is held over the completions API; there the prompt's tokens, and so
the place of every change, are known without a tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from deploy.demo.conversation import words

Piece = str | int

MARK_BEGIN, MARK_END = 1, 2
"""Token ids around a message, as in the tiny model's chat template."""
ROLE_TOKENS = {"system": 5, "user": 6, "assistant": 7}
FIRST_TOKEN, END_OF_TOKENS = 10, 4000
"""Token ids that pieces are drawn from: [FIRST_TOKEN, END_OF_TOKENS)."""


class Edit(StrEnum):
    """What is done to a history before the next turn."""

    CONTINUE = "continue"
    PIECE = "one character or token changed"
    MESSAGE = "message rewritten"
    INSERT = "message inserted"
    DELETE = "message deleted"
    SWAP = "two messages swapped"
    STRIP = "reasoning stripped"
    REGENERATE = "last reply asked for again"
    BRANCH = "another continuation of the history before"
    AT_ONCE = "two continuations at once"
    SYSTEM = "other system text"
    ADAPTER = "other adapter"
    OFFERED = "other adapter, offered the model's location"
    SALT = "other cache salt"


class Ask(StrEnum):
    """The path that is asked for."""

    PULL = "pull"
    DIRECT = "direct"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Message:
    """One message; the pieces are all words or all token ids."""

    role: str
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The content for the chat API."""
        return " ".join(str(piece) for piece in self.pieces)


History = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a plan. `seed` decides where and what is changed, `size` how long the new message is."""

    edit: Edit
    ask: Ask
    seed: str
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversation. With `as_tokens` it is held in token ids over the completions API."""

    name: str
    as_tokens: bool
    opening: History
    steps: tuple[Step, ...]


def plan(seed: int, number: int, *, adapters: bool = True) -> Plan:
    """Return the `number`-th conversation of a run; the same arguments, the same plan.

    The first edits go through all kinds in turn, so that a run of a dozen meets each; the rest is drawn.
    """
    name = f"{seed}-{number}"
    source = random.Random(f"plan {name}")
    kinds = [
        edit
        for edit in Edit
        if edit is not Edit.CONTINUE and (adapters or edit not in (Edit.ADAPTER, Edit.OFFERED))
    ]
    edits = [Edit.CONTINUE, kinds[number % len(kinds)]]
    if source.random() < 0.5:
        edits.insert(1, Edit.CONTINUE)
    edits.append(source.choice([Edit.CONTINUE, *kinds]))
    as_tokens = source.random() < 0.5
    steps = tuple(
        Step(
            edit,
            Ask.PULL if edit is Edit.OFFERED else source.choices(list(Ask), (5, 3, 2))[0],
            f"{name}-{turn}",
            source.randrange(3, 25),
        )
        for turn, edit in enumerate(edits)
    )
    opening = (
        Message("system", _pieces(f"system {name}", source.randrange(3, 15), as_tokens)),
        Message("user", _pieces(f"user {name}", source.randrange(20, 100), as_tokens)),
    )
    return Plan(name, as_tokens, opening, steps)


def reply_of(as_tokens: bool, text: str, tokens: Sequence[int]) -> Message:
    """Return a model's reply as a message of the history."""
    return Message("assistant", tuple(tokens) if as_tokens else tuple(text.split(" ")))


def next_prompts(step: Step, history: History, as_tokens: bool) -> list[History]:
    """Return the prompt of a turn after a history that ends in a reply; two where two are sent at once."""
    source = random.Random(step.seed)
    fresh = Message("user", _pieces(f"new {step.seed}", step.size, as_tokens))
    match step.edit:
        case Edit.REGENERATE:
            return [history[:-1]]
        case Edit.BRANCH:
            return [(*history[:-2], fresh)]
        case Edit.AT_ONCE:
            other = Message("user", _pieces(f"other {step.seed}", step.size, as_tokens))
            return [(*history, fresh), (*history, other)]
        case _:
            return [(*_edited(step, history, as_tokens, source), fresh)]


def chat(history: History) -> list[dict[str, str]]:
    """Return a history as the chat API takes it."""
    return [{"role": message.role, "content": message.text} for message in history]


def tokens(history: History) -> list[int]:
    """Return a history of token ids as the completions API takes it, ready for a reply."""
    rendered = list[int]()
    for message in history:
        rendered += [MARK_BEGIN, ROLE_TOKENS[message.role], *map(int, message.pieces), MARK_END]
    return [*rendered, MARK_BEGIN, ROLE_TOKENS["assistant"]]


def _edited(step: Step, history: History, as_tokens: bool, source: random.Random) -> History:
    """Return a history changed in place, never its roles' order alone."""
    size = source.randrange(3, 25)
    fresh = _pieces(f"edit {step.seed}", size, as_tokens)
    changed = list(history)
    match step.edit:
        case Edit.PIECE:
            at = source.choice([index for index, message in enumerate(history) if any(message.pieces)])
            changed[at] = _one_piece_changed(history[at], source)
        case Edit.MESSAGE:
            at = source.randrange(1, len(history))
            changed[at] = replace(history[at], pieces=fresh)
        case Edit.INSERT:
            changed.insert(source.randrange(len(history) + 1), Message("user", fresh))
        case Edit.DELETE:
            del changed[source.randrange(len(history))]
        case Edit.SWAP:
            one, other = source.sample(range(len(history)), 2)
            changed[one], changed[other] = changed[other], changed[one]
        case Edit.STRIP:
            changed = [
                replace(message, pieces=message.pieces[len(message.pieces) // 2 :])
                if message.role == "assistant"
                else message
                for message in history
            ]
        case Edit.SYSTEM:
            changed[0] = Message("system", fresh)
    return tuple(changed)


def _one_piece_changed(message: Message, source: random.Random) -> Message:
    at = source.choice([index for index, piece in enumerate(message.pieces) if piece])
    piece = message.pieces[at]
    if isinstance(piece, int):
        other: Piece = piece + 1 if piece < END_OF_TOKENS - 1 else FIRST_TOKEN
    else:
        character = source.randrange(len(piece))
        other = f"{piece[:character]}{'#' if piece[character] != '#' else '+'}{piece[character + 1 :]}"
    return replace(message, pieces=(*message.pieces[:at], other, *message.pieces[at + 1 :]))


def _pieces(seed: str, count: int, as_tokens: bool) -> tuple[Piece, ...]:
    if not as_tokens:
        return tuple(words(count, seed).split(" "))
    source = random.Random(seed)
    # About two tokens a word, as in text.
    return tuple(source.randrange(FIRST_TOKEN, END_OF_TOKENS) for _ in range(2 * count))
