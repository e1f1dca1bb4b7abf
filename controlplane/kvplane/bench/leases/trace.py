"""Traces of requests in Mooncake's format, and which turn continues which.

A trace is one JSON object a line, in order of arrival; a file that begins as gzip does is unpacked:

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...]}

with one id per block of the prompt, the last one for what is left over. Equal ids stand for equal blocks
behind equal prefixes. There are no conversation ids. That request B continues request A is inferred, from
earlier requests only, where all of this holds:

- B arrives after A, and B's ids begin with the ids of all whole blocks of A's prompt;
- B's prompt is longer than A's, and as long as A's prompt and reply, less `SLACK_TOKENS` for replies that are
  trimmed or become other tokens when they are read again;
- A's last whole block is A's own: no more than `LINES` lines of requests had it before B. A line is a
  request, all that continues it, and repetitions of the same prompts. So a system prompt or document that
  many conversations begin with is no link, once that many of them have been seen;
- no other request has continued A.

Of several such A, the one with the most whole blocks is taken, of those the latest. A prompt that is shorter
than a block, or has no whole block of its own, is never continued: nothing in the trace would show it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BLOCK_TOKENS = 512
"""Tokens per block in Mooncake's traces."""
SLACK_TOKENS = 128
"""Tokens by which a prompt may fall short of the last one and its reply."""
LINES = 2
"""Lines of requests that may have a block in common before it says nothing of who continues whom."""
_GZIP = b"\x1f\x8b"
_MOST = 2**53
_SHOWN = 40
"""Characters of a wrong value that are shown."""


class TraceError(ValueError):
    """A trace cannot be read; the message is one line and names the line and the field."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace: arrival in milliseconds, tokens, and ids of the prompt's blocks."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as a turn of a conversation.

    Attributes:
        number: place in the trace, from 0.
        arrival_s: since the beginning of the trace.
        input_tokens: of the prompt.
        output_tokens: of the reply.
        turn_index: 1 for a conversation's first turn.
        previous: number of the turn that it continues, None for a first one.
    """

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    turn_index: int
    previous: int | None


def read(
    path: Path, block_tokens: int = BLOCK_TOKENS, told: Callable[[int], None] = lambda _: None
) -> list[Request]:
    """Return the requests of a trace. `told` is called with the number of bytes of each line.

    Raises:
        TraceError: it cannot be opened or unpacked, is empty, or a line is not what it should be.
    """
    requests = list[Request]()
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):
                told(len(line))
                if line.strip():
                    requests.append(_request(line, f"{path}, line {number}", block_tokens))
                    if len(requests) > 1 and requests[-1].timestamp_ms < requests[-2].timestamp_ms:
                        raise TraceError(f"{path}, line {number}: timestamp: earlier than the line before")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path}: {reason[:1].lower()}{reason[1:]}") from None
    if not requests:
        raise TraceError(f"{path}: holds no requests")
    return requests


def _opened(path: Path) -> gzip.GzipFile | IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path) if packed else path.open("rb")


def _request(line: bytes, where: str, block_tokens: int) -> Request:
    try:
        members = json.loads(line)
    except ValueError:
        raise TraceError(f"{where}: not JSON") from None
    except RecursionError:
        raise TraceError(f"{where}: nested too deeply") from None
    if not isinstance(members, dict):
        raise TraceError(f"{where}: not a JSON object")
    timestamp = _number(members, "timestamp", where, whole=False)
    input_tokens = int(_number(members, "input_length", where))
    output_tokens = int(_number(members, "output_length", where))
    ids = members.get("hash_ids")
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise TraceError(f"{where}: hash_ids: not a list of whole numbers")
    blocks = -(-input_tokens // block_tokens)
    if not input_tokens // block_tokens <= len(ids) <= blocks:
        raise TraceError(
            f"{where}: hash_ids: {len(ids)} ids for input_length {input_tokens}, which is {blocks} blocks of"
            f" {block_tokens}; is the trace's block of another size (--block-tokens)?"
        )
    return Request(timestamp, input_tokens, output_tokens, tuple(ids))


def _number(members: dict[str, Any], field: str, where: str, *, whole: bool = True) -> float:
    if field not in members:
        raise TraceError(f"{where}: {field}: missing")
    value = members[field]
    if type(value) is not int and (whole or type(value) is not float):
        raise TraceError(f"{where}: {field}: not a {'whole ' if whole else ''}number")
    if not 0 <= value <= _MOST:
        shown = str(value)
        raise TraceError(f"{where}: {field}: {shown[:_SHOWN]}{'…' * (len(shown) > _SHOWN)} is out of range")
    return float(value)


def link(requests: Sequence[Request], block_tokens: int = BLOCK_TOKENS) -> list[Turn]:
    """Return the requests as turns of conversations; how they are found says the module's docstring.

    Each turn depends on earlier requests only. O(blocks) for each request.
    """
    linker = _Linker(requests, block_tokens)
    begin = requests[0].timestamp_ms if requests else 0.0
    turns = list[Turn]()
    for number, request in enumerate(requests):
        previous = linker.take(number)
        index = 1 if previous is None else turns[previous].turn_index + 1
        arrival = (request.timestamp_ms - begin) / 1000.0
        turns.append(Turn(number, arrival, request.input_tokens, request.output_tokens, index, previous))
    return turns


class _Linker:
    """Finds what each request continues, one after the other."""

    def __init__(self, requests: Sequence[Request], block_tokens: int) -> None:
        self._requests = requests
        self._block_tokens = block_tokens
        self._open: defaultdict[int, list[int]] = defaultdict(list)
        """By the id of the last whole block: requests that none has continued, oldest first."""
        self._lines: defaultdict[int, set[int]] = defaultdict(set)
        """By block id: lines that had it, no more of them than it takes to make it common."""
        self._line_of: list[int] = []
        self._same: dict[tuple[int, int], int] = {}
        """By last id and length: the line of a prompt."""

    def take(self, number: int) -> int | None:
        """Return the request that this one continues. Requests have to come in order, from 0."""
        request = self._requests[number]
        whole = request.hash_ids[: request.input_tokens // self._block_tokens]
        previous = self._continued(request, whole)
        prompt = (request.hash_ids[-1] if request.hash_ids else -1, request.input_tokens)
        line = self._line_of[previous] if previous is not None else self._same.get(prompt, number)
        self._line_of.append(line)
        self._same[prompt] = line
        for block in whole:
            lines = self._lines[block]
            if len(lines) <= LINES:
                lines.add(line)
        if whole:
            self._open[whole[-1]].append(number)
        return previous

    def _continued(self, request: Request, whole: tuple[int, ...]) -> int | None:
        for block in reversed(whole):
            if block not in self._open or len(self._lines[block]) > LINES:
                continue
            candidates = self._open[block]
            for place in range(len(candidates) - 1, -1, -1):
                other = self._requests[candidates[place]]
                if (
                    request.timestamp_ms > other.timestamp_ms
                    and request.input_tokens > other.input_tokens
                    and request.input_tokens + SLACK_TOKENS >= other.input_tokens + other.output_tokens
                ):
                    return candidates.pop(place)
        return None
