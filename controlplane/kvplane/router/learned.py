"""What the router learns from the answers it sees: sizes of prompts, rates of engines. Bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvplane.client.model import ConversationKey
from kvplane.router.openai import PromptText
from kvplane.router.policy import Rates

K = TypeVar("K")

DEFAULT_CHARACTERS_PER_TOKEN = 4.0
_MIN_RATIO, _MAX_RATIO = 0.25, 16.0
_MIN_SAMPLES = 3
_WEIGHT = 0.2
_MOST_MODELS = 1000
_MIN_TOKENS = 256
"""Shorter work says more about overheads than about rates."""
_FIRST_IDS, _LAST_IDS = 16_384, 1024
"""Token ids of a prompt that are compared with those of the last one."""


class Average:
    """An exponentially weighted average that is unknown before a few samples."""

    __slots__ = ("_count", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    def add(self, sample: float) -> None:
        """Take a sample."""
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        self._value += (sample - self._value) * weight

    @property
    def value(self) -> float | None:
        """The average, None while unknown."""
        return self._value if self._count >= _MIN_SAMPLES else None

    @property
    def value_or_last(self) -> float | None:
        """The average from the first sample on."""
        return self._value if self._count else None


@dataclass(frozen=True, slots=True)
class _Remembered:
    parts: int
    digest: int
    prompt_characters: int
    ratio: float | None
    prefill_url: str = ""
    """The prefill engine that computed the last prompt that one did."""
    prefill_tokens: int = 0
    """Its length."""
    ids: int = 0
    """Token ids of a prompt that was sent as such."""


class Memory:
    """Remembers of each recent conversation how its prompt began and how many characters a token has there.

    Losing it costs estimates, never correctness. At most `capacity` conversations.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._conversations: OrderedDict[ConversationKey, _Remembered] = OrderedDict()
        self._models: OrderedDict[tuple[str, str], Average] = OrderedDict()
        """By tenant and model: what one says moves no number that another sees."""
        self._held: OrderedDict[tuple[str, str], Average] = OrderedDict()
        """The same by what is held of conversations; it counts where no engine has told a prompt's length."""

    def estimate(self, key: ConversationKey, text: PromptText, held: int = 0) -> int:
        """Return how many tokens a prompt has.

        `held` are those of the conversation's last prompt and the reply to it, 0 if not known. A prompt that
        goes on from there has as many, and those of the text after the reply.
        """
        if text.tokens is not None:
            return text.tokens
        ratio = self._ratio(key)
        by_text = int(text.characters / ratio)
        if not held or not self._goes_on(key, text):
            return by_text
        return max(by_text, held) if text.since is None else held + int(text.since / ratio)

    def located(self, key: ConversationKey, text: PromptText, held: int) -> None:
        """Learn from what is held of a conversation: the tokens of its text as far as the last reply."""
        if text.since is None or text.partial or held <= 0 or not self._goes_on(key, text):
            return
        ratio = (text.characters - text.since) / held
        if _MIN_RATIO <= ratio <= _MAX_RATIO:  # else it is not this text that is held
            _add_to(self._held, key, ratio)

    def _ratio(self, key: ConversationKey) -> float:
        known, of = self._conversations.get(key), (key.tenant_id, key.model)
        if known is not None and known.ratio is not None:
            return known.ratio
        average = self._models.get(of) or self._held.get(of)
        return (average.value_or_last if average is not None else None) or DEFAULT_CHARACTERS_PER_TOKEN

    def _goes_on(self, key: ConversationKey, text: PromptText) -> bool:
        """Tell whether a prompt may begin with the conversation's last one and the reply to it."""
        if self.history_changed(key, text):
            return False
        known = self._conversations.get(key)
        if text.partial:
            return True
        if text.prompt is not None:
            return known is None or len(text.prompt) > known.prompt_characters
        return text.since is not None and (known is None or len(text.parts) > known.parts)

    def history_changed(self, key: ConversationKey, text: PromptText) -> bool:
        """Tell whether a prompt is known not to begin with the conversation's last one."""
        known = self._conversations.get(key)
        if known is None or text.partial:
            return False
        if text.ids is not None:
            return _ids_digest(text.ids, known.ids) != known.digest
        if text.prompt is not None:
            return hash(text.prompt[: known.prompt_characters]) != known.digest
        return hash(text.parts[: known.parts]) != known.digest

    def prefilled_by(self, key: ConversationKey) -> str:
        """Return the URL of the prefill engine that last computed a prompt of a conversation, "" if none."""
        known = self._conversations.get(key)
        return known.prefill_url if known is not None else ""

    def prompt_at(self, key: ConversationKey, url: str) -> int:
        """Return how many tokens the prompt had that this engine computed last, 0 if another did."""
        known = self._conversations.get(key)
        return known.prefill_tokens if known is not None and known.prefill_url == url else 0

    def remember(
        self,
        key: ConversationKey,
        text: PromptText,
        tokens: int | None,
        prefill_url: str = "",
        *,
        before: ConversationKey | None = None,
    ) -> None:
        """Keep what a turn's prompt was; `tokens` is its true length where an engine told it.

        `prefill_url` is the prefill engine that has computed it, "" if none has. `before` is under which the
        turn before is remembered, if not under `key`.
        """
        known = self._conversations.pop(key, None)
        if known is None and before is not None:
            known = self._conversations.get(before)
        ratio = known.ratio if known is not None else None
        ratio = self._measured(key, text, tokens) or ratio
        parts, ids, characters = text.parts, 0 if text.ids is None else len(text.ids), len(text.prompt or "")
        if text.partial:
            # How the whole prompt began is not seen, so nothing is known to have changed later.
            parts, digest = (), hash(())
        elif text.ids is not None:
            digest = _ids_digest(text.ids, ids)
        else:
            digest = hash(text.prompt) if text.prompt is not None else hash(text.parts)
        url, there = (known.prefill_url, known.prefill_tokens) if known is not None else ("", 0)
        if prefill_url and tokens:
            url, there = prefill_url, tokens
        self._conversations[key] = _Remembered(len(parts), digest, characters, ratio, url, there, ids)
        while len(self._conversations) > self._capacity:
            self._conversations.popitem(last=False)

    def learn(self, key: ConversationKey, text: PromptText, tokens: int) -> None:
        """Take the true length of a turn's prompt, which the answer told; the turn is remembered already."""
        ratio, known = self._measured(key, text, tokens), self._conversations.get(key)
        if ratio is not None and known is not None:
            self._conversations[key] = replace(known, ratio=ratio)

    def _measured(self, key: ConversationKey, text: PromptText, tokens: int | None) -> float | None:
        """Learn how many characters a token has; None where a prompt does not show that."""
        if not tokens or not text.characters or text.tokens is not None or text.partial:
            return None
        ratio = min(_MAX_RATIO, max(_MIN_RATIO, text.characters / tokens))
        _add_to(self._models, key, ratio)
        return ratio

    def __len__(self) -> int:
        return len(self._conversations)


def _add_to(models: OrderedDict[tuple[str, str], Average], key: ConversationKey, ratio: float) -> None:
    of = key.tenant_id, key.model
    average = models.pop(of, None) or Average()
    average.add(ratio)
    models[of] = average
    while len(models) > _MOST_MODELS:
        models.popitem(last=False)


def _ids_digest(ids: Sequence[object], count: int) -> int:
    """Return a hash over the first of `count` token ids and the last of them; over all if they are few."""
    first = ids[: min(count, _FIRST_IDS)]
    last = ids[max(_FIRST_IDS, count - _LAST_IDS) : count]
    try:
        return hash((count if count <= len(ids) else -1, *first, *last))
    except TypeError:  # no ids: the engine will say so
        return 0


class RateBook:
    """Learned rates: prompts computed per engine, KV moved per pair of engines. Bounded by the fleet's size.

    Entries of engines that went away stay until `capacity` is reached; the oldest go first.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self._capacity = capacity
        self._compute: OrderedDict[str, Average] = OrderedDict()
        self._transfer: OrderedDict[tuple[str, str], Average] = OrderedDict()
        """By the engine that holds and the one that reads."""
        self._hits: OrderedDict[str, Average] = OrderedDict()

    def rates(self, prefill_url: str | None, decode_url: str | None) -> Rates:
        """Return what is known of a pair."""
        return Rates(
            prefill=_value(self._compute.get(prefill_url or "")),
            decode_prefill=_value(self._compute.get(decode_url or "")),
            transfer=_value(self._transfer.get((decode_url or "", prefill_url or ""))),
            receive=_value(self._transfer.get((prefill_url or "", decode_url or ""))),
        )

    def compute(self, url: str) -> float | None:
        """Return how many tokens of prompts an engine computes in a second, None while unknown."""
        return _value(self._compute.get(url))

    def hit_share(self, url: str) -> float | None:
        """Return the share, 0 to 1, of the last prompt that an engine still has when the next one comes.

        None while unknown.
        """
        hits = self._hits.get(url)
        return hits.value_or_last if hits is not None else None

    def hit(self, url: str, expected: int, found: int) -> None:
        """An engine was expected to have so many tokens of a prompt in its prefix cache, and had so many."""
        if expected > 0:
            self._add(self._hits, url, min(1.0, found / expected))

    def received(self, prefill_url: str, decode_url: str, tokens: int, seconds: float) -> None:
        """A decode engine began its answer so long after it was told to read so many tokens."""
        if tokens >= _MIN_TOKENS and seconds > 0:
            self._add(self._transfer, (prefill_url, decode_url), tokens / seconds)

    def computed(self, url: str, tokens: int, seconds: float) -> None:
        """An engine computed so many tokens of prompts: those before it in its queue, and one's own."""
        if tokens >= _MIN_TOKENS and seconds > 0:
            self._add(self._compute, url, tokens / seconds)

    def pulled(self, decode_url: str, prefill_url: str, pulled: int, computed: int, seconds: float) -> None:
        """A prefill engine pulled so many tokens and computed so many."""
        rate = _value(self._compute.get(prefill_url))
        if pulled < _MIN_TOKENS or not rate:
            return
        moving = seconds - computed / rate
        if moving > 0:
            self._add(self._transfer, (decode_url, prefill_url), pulled / moving)

    def _add(self, book: OrderedDict[K, Average], key: K, sample: float) -> None:
        average = book.pop(key, None) or Average()
        average.add(sample)
        book[key] = average
        while len(book) > self._capacity:
            book.popitem(last=False)


def _value(average: Average | None) -> float | None:
    return average.value if average is not None else None
