"""A seeded source of inputs: mostly plausible, sometimes at a boundary, sometimes absurd."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

TEXTS = (
    "", "a", "default", "x" * 255, "x" * 256, "x" * 257, "é" * 128, "é" * 129, "\U0001f600" * 64, "\0", "\n",
    "../..", "a/b", "%2F", "{}", "null", "'\"\\", "\u202e", "\ufeff", "auto/1", "a#1", "http://x", " ", "-1",
    "NaN", "1e999", "[::1]:1", "quarantine", "Traceback",
)  # fmt: skip
_NUMBERS = (0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 1000, 1023, 1024, 1025, 65535, 65536, 65537)
BYTES = (
    b"", b"\0", b"\xff", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"{", b"[" * 600,
    b"\r\n", b"\xff" * 10, b"\x80" * 11, b"\x0a\x00", b"\x0b", b"\x0c", b"}" * 3, b'"', b"\\u006b",
    b"\\ud800", b"1e400", b"-", b"9" * 5000,
)  # fmt: skip


class Chance(random.Random):
    """Random choices; `wild` is the share of values that are to make no sense."""

    def __init__(self, seed: str, wild: float = 0.0) -> None:
        super().__init__(seed)
        self.wild = wild

    def odds(self, share: float) -> bool:
        """Return True in `share` of cases."""
        return self.random() < share

    def pick(self, values: Sequence[T]) -> T:
        """Return one of some values; quicker than `choice`."""
        return values[int(self.random() * len(values))]

    def below(self, most: int) -> int:
        """Return a number from 0 to `most` - 1."""
        return int(self.random() * most)

    def number(self, bits: int = 63, *, signed: bool = True) -> int:
        """Return an integer that fits: often a limit, or next to one."""
        most = 2**bits - 1
        kind = self.below(4)
        if kind == 0:
            value = self.pick(_NUMBERS)
        elif kind == 1:
            value = most - self.below(2)
        elif kind == 2:
            value = self.getrandbits(1 + self.below(bits))
        else:
            value = -self.pick(_NUMBERS) - self.below(2) if self.odds(0.5) else -most - 1
        return value if signed or value >= 0 else -value & most

    def text(self) -> str:
        """Return a text of which no two are alike in kind; never a lone surrogate."""
        kind = self.below(5)
        if kind < 3:
            return self.pick(TEXTS)
        if kind == 3:
            return "".join(chr(self.below(self.pick((128, 0xD800)))) for _ in range(self.below(9)))
        return self.pick(TEXTS[1:]) * self.pick((2, 3, 300, 20_000 if self.odds(0.02) else 5))

    def raw(self) -> bytes:
        """Return bytes of no meaning."""
        if self.odds(0.5):
            return self.pick(BYTES)
        return self.randbytes(self.below(self.pick((2, 16, 64, 300))))

    def spoiled(self, raw: bytes) -> bytes:
        """Return bytes with a few changes: bits, pieces removed, repeated, moved, put in, cut off."""
        for _ in range(self.pick((1, 1, 2, 5))):
            size = len(raw)
            at = self.below(size + 1)
            to = min(size, at + self.pick((1, 1, 2, 8, 40)))
            kind = self.below(7)
            if kind == 0 and at < size:
                raw = raw[:at] + bytes((raw[at] ^ (1 << self.below(8)),)) + raw[at + 1 :]
            elif kind == 1:
                raw = raw[:at] + raw[to:]
            elif kind == 2:
                raw = raw[:to] + raw[at:]
            elif kind == 3:
                raw = raw[:at] + self.raw() + raw[at:]
            elif kind == 4:
                raw = raw[:at]
            elif kind == 5 and at < size:
                raw = raw[:at] + bytes((self.below(256),)) + raw[at + 1 :]
            else:
                other = self.below(size + 1)
                raw = raw[:other] + raw[at:to] + raw[other:]
        return raw

    def pieces(self, raw: bytes) -> list[bytes]:
        """Return bytes cut anywhere; in one piece as often as in many, or in single bytes."""
        kind = self.below(6)
        if kind < 2 or len(raw) < 2:
            return [raw]
        if kind == 2 and len(raw) < 400:
            return [raw[at : at + 1] for at in range(len(raw))]
        cuts = sorted({0, len(raw), *(1 + self.below(len(raw) - 1) for _ in range(self.pick((1, 2, 9))))})
        return [raw[start:end] for start, end in itertools.pairwise(cuts)]
