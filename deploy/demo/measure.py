"""What is measured, how often, and how the time of a turn is split.

For every prompt length and every path a conversation of its own is played, with text of its own from the
first word on. Turn 1 carries the long text and goes cold; P computes it and D keeps it. Then the user adds
about 20 words and the time to the first word of the answer is taken. "Off" is the cold path: P computes the
whole prompt again and D fetches from P only what its own prefix cache does not have, as a stock pair does.

Only turn 2 counts, at every length. Later turns of a conversation were seen to be cheaper on the direct path
(294 ms for turn 2, 152 and 139 ms for turns 3 and 4 at 4,000 tokens), so counting them at long prompts, where
conversations are dear, would flatter reuse just there. What is saved instead: the off path, whose time hardly
varies, is measured once at very long prompts (see `plan`).

How a turn's time is split: both engines serve nothing else, so the difference of their own counters before
and after the turn (deploy/rig/metrics.py) is the cost of this turn. Compute is the prefill time of P and D.
Transfer is the time the request was parked on P and on D while KV was read from the other engine. What is
left of the time to the first word (router, HTTP, tokenizing, scheduling between the legs) is called other.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from deploy.demo.conversation import DemoError, Message, Reply, ask, words
from deploy.rig import metrics
from deploy.rig.engines import MODEL_NAME

OFF, PULL, DIRECT = "cold", "pull", "direct"
PATHS = (OFF, PULL, DIRECT)
NEW_WORDS = 20
ANSWER_TOKENS = 12
FRAME_TOKENS = ANSWER_TOKENS + 16  # of a turn 2, what is not the user's words: answer and chat template
PAUSE_SECONDS = 0.3  # between turns: nobody reads an answer and writes the next message in no time
ATTEMPTS = 3  # conversations tried until the router takes the forced path; each miss counts in the hit rate
VERY_LONG = 6000


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured turn. Times in milliseconds; tokens by the engines' own count."""

    prompt_tokens: int
    ttft_ms: float
    compute_ms: float
    transfer_ms: float
    copy_ms: float
    """The part of `transfer_ms` in which NIXL itself was copying."""
    reused_tokens: int
    """Tokens whose KV the engine that computed the prompt did not compute: pulled by P, or D's own."""
    computed_tokens: int

    @property
    def other_ms(self) -> float:
        """Neither compute nor transfer."""
        return max(0.0, self.ttft_ms - self.compute_ms - self.transfer_ms)


@dataclass(slots=True)
class Row:
    """All samples of one prompt length, by path, and how often reuse was asked for and happened."""

    length: int
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {path: [] for path in PATHS})
    reuse_turns: int = 0
    hits: int = 0

    def median(self, path: str, member: str) -> float:
        """The median of one member of the samples of a path."""
        values: list[float] = [getattr(sample, member) for sample in self.samples[path]]
        return median(values)


def plan(length: int, repeat: int) -> dict[str, int]:
    """How many conversations are played on each path, one measured turn in each."""
    return {OFF: 1 if length > VERY_LONG else repeat, PULL: repeat, DIRECT: repeat}


def weight(length: int) -> float:
    """A rough cost of one cold turn, in seconds of the two-core machine; for the progress bar only."""
    return length / 650 * (1 + length / 9000)


class Measurement:
    """Plays the conversations on one pair of engines and collects rows."""

    def __init__(
        self, router_url: str, prefill_url: str, decode_url: str, *, advance: Callable[[str, float], None]
    ) -> None:
        """`advance` is told what is being done and how much of the weight has just been finished."""
        self._router_url = router_url
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._advance = advance
        self._tokens_per_word = 1.0
        self._run = uuid.uuid4().hex[:8]

    def warm_up(self) -> None:
        """Run every path once (NIXL handshakes in both directions, first use of each kernel) and learn how
        many tokens a word has. Raises DemoError when a path cannot be had.
        """
        probe_words = 400
        for path in PATHS:
            self._advance(f"warming up: {path}", 0.0)
            for attempt in range(ATTEMPTS):
                talk = _Talk(self, f"warm-{path}-{attempt}", probe_words)
                talk.say(OFF)
                reply = talk.say(path)
                self._tokens_per_word = (reply.prompt_tokens - FRAME_TOKENS) / (probe_words + NEW_WORDS)
                if reply.path == path:
                    break
                time.sleep(1.0)
            else:
                raise DemoError(f"asked for path {path}, the router took {reply.path}: {reply.reason}")

    def row(self, length: int, repeat: int, out_of_time: Callable[[], bool]) -> Row:
        """Measure one prompt length; once `out_of_time`, one conversation per path is all."""
        row = Row(length)
        conversations = plan(length, repeat)
        for number in range(repeat):
            for offset in range(len(PATHS)):
                path = PATHS[(number + offset) % len(PATHS)]  # another one begins each time
                if number >= conversations[path]:
                    continue
                if row.samples[path] and out_of_time():
                    self._advance("", weight(length) * (2 if path == OFF else 1))
                    continue
                self._converse(row, path, number)
        return row

    def _converse(self, row: Row, path: str, number: int) -> None:
        """Play one conversation and add its measured turn to the row."""
        label = f"{row.length:,} tokens, {'off' if path == OFF else path}"
        count = max(20, round((row.length - FRAME_TOKENS) / self._tokens_per_word) - NEW_WORDS)
        for attempt in range(ATTEMPTS):
            talk = _Talk(self, f"{row.length}-{path}-{number}-{attempt}", count)
            self._advance(f"{label}: turn 1", 0.0)
            talk.say(OFF)
            self._advance(f"{label}: turn 2", 0.0 if attempt else weight(row.length))
            sample, reply = self._measured(talk, path)
            hit = reply.path == path and (path == OFF or sample.reused_tokens > 0)
            if path == OFF:
                self._advance("", 0.0 if attempt else weight(row.length))
            else:
                row.reuse_turns += 1
                row.hits += hit
            if hit:
                row.samples[path].append(sample)
                return
        raise DemoError(
            f"{label}: the router took {reply.path} ({reply.reason}), "
            f"{sample.reused_tokens} tokens were reused"
        )

    def _measured(self, talk: "_Talk", path: str) -> tuple[Sample, Reply]:
        """Say one turn between two readings of both engines' counters."""
        before_p, before_d = metrics.read(self._prefill_url), metrics.read(self._decode_url)
        reply = talk.say(path)
        # An engine counts a request a moment after it sent the last byte.
        deadline = time.monotonic() + 3.0
        while True:
            cost_d = metrics.read(self._decode_url) - before_d
            if cost_d.requests >= 1 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        cost_p = metrics.read(self._prefill_url) - before_p
        if reply.path == DIRECT:
            reused, computed = cost_d.cached_tokens, cost_d.computed_tokens
        else:
            reused, computed = cost_p.transferred_tokens, cost_p.computed_tokens
        sample = Sample(
            prompt_tokens=reply.prompt_tokens,
            ttft_ms=reply.ttft_ms,
            compute_ms=(cost_p.prefill_seconds + cost_d.prefill_seconds) * 1000,
            transfer_ms=(cost_p.wait_seconds + cost_d.wait_seconds) * 1000,
            copy_ms=(cost_p.copy_seconds + cost_d.copy_seconds) * 1000,
            reused_tokens=round(reused),
            computed_tokens=round(computed),
        )
        return sample, reply

    def ask(self, name: str, messages: Sequence[Message], path: str) -> Reply:
        """Send one turn of the conversation `name`."""
        return ask(
            self._router_url,
            messages,
            model=MODEL_NAME,
            conversation_id=f"demo-{self._run}-{name}",
            path=path,
            max_tokens=ANSWER_TOKENS,
        )


class _Talk:
    """One conversation: a long first message, short ones after it, and the model's real answers between."""

    def __init__(self, measurement: Measurement, name: str, first_words: int) -> None:
        self._measurement = measurement
        self._name = name
        self._first_words = first_words
        self._messages: list[Message] = []
        self.turn = 0

    def say(self, path: str) -> Reply:
        if self.turn:
            time.sleep(PAUSE_SECONDS)
        self.turn += 1
        count = self._first_words if self.turn == 1 else NEW_WORDS
        text = words(count, f"{self._name}/{self.turn}")
        self._messages.append({"role": "user", "content": text})
        reply = self._measurement.ask(self._name, self._messages, path)
        self._messages.append({"role": "assistant", "content": reply.text})
        return reply
