"""What is told of a turn's chance of being continued: its lease class, a small int that crosses the fleet.

A class is the same on every engine and in every version: it is sent with an announcement, kept in the turn's
record, and handed to whichever engine runs the conversation's next turn. Ten bits, the most telling first,
so that dropping bits from the right gives ever coarser classes:

    bits 9-7  turn index: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16 and above
    bits 6-4  prompt tokens: below 1,024, 2,048, 4,096, 8,192, 16,384, 32,768, 65,536, and above
    bits 3-2  idle time before the turn: unknown (or a first turn), below 30 s, below 120 s, above
    bits 1-0  reply: below 32 tokens, below 256, longer or cut off ("length"), ended in tool calls
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

CLASSES = 1024
"""Lease classes are 0 to CLASSES - 1."""

COARSER = (2, 4, 7, 10)
"""Bits to drop from a class for each coarser one, ending with the one class of all turns."""

_TURNS = (2, 3, 4, 5, 7, 10, 16)
_PROMPT_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_IDLE_S = (30.0, 120.0)
_REPLY_TOKENS = (32, 256)
_CUT_OFF, _TOOL_CALLS = 2, 3


@dataclass(frozen=True, slots=True)
class Traits:
    """What an engine knows of a turn when it ends.

    Attributes:
        tenant_id: whose it is.
        turn_index: 1 for a conversation's first turn; anything below counts as 1.
        prompt_tokens: of the whole prompt.
        reply_tokens: generated.
        finish: why the reply ended: "stop", "length", "tool_calls", or anything else, taken as "stop".
        idle_s: from the end of the conversation's last turn to the beginning of this one, None if unknown.
    """

    tenant_id: str
    turn_index: int
    prompt_tokens: int
    reply_tokens: int
    finish: str = "stop"
    idle_s: float | None = None


def lease_class(traits: Traits) -> int:
    """Return a turn's lease class, 0 to 1023. Numbers out of range fall into the nearest bucket."""
    turn = bisect_right(_TURNS, traits.turn_index)
    prompt = bisect_right(_PROMPT_TOKENS, traits.prompt_tokens)
    idle_s = traits.idle_s
    # Neither below nor above anything: NaN is unknown.
    idle = 0 if idle_s is None or idle_s != idle_s else 1 + bisect_right(_IDLE_S, idle_s)
    if traits.finish == "tool_calls":
        reply = _TOOL_CALLS
    elif traits.finish == "length":
        reply = _CUT_OFF
    else:
        reply = bisect_right(_REPLY_TOKENS, traits.reply_tokens)
    return turn << 7 | prompt << 4 | idle << 2 | reply


def typical_tokens(lease_class: int) -> float:
    """Return about how many prompt tokens a turn of a class has: the middle of its bucket, by ratio."""
    return math.ldexp(724.0, lease_class >> 4 & 7)
