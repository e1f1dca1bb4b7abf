"""`kvplane serve` whose wall clock another process may step: python stepped_serve.py CLOCK serve [flags].

CLOCK is a file of eight bytes, a double: seconds added to the wall clock, read anew at each look at it. The
monotonic clock is left alone, as it is when an operator or NTP steps a machine's time.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path

from kvplane.cli import run
from kvplane.cli.main import main
from kvplane.store.clock import SystemClock

SHIFT = struct.Struct("<d")


class SteppedClock(SystemClock):
    """The machine's clock, and the shift that the file has now."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        with path.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), SHIFT.size)

    def now_ms(self) -> int:
        """See Clock. Unlike a kept contract has it, this may step back: that is the fault."""
        shift_s: float = SHIFT.unpack_from(self._shift)[0]
        return super().now_ms() + round(shift_s * 1000)


def step(path: Path, seconds: float) -> None:
    """Set the shift of the replica that reads `path`, running or yet to be started."""
    if not path.exists():
        path.write_bytes(SHIFT.pack(seconds))
        return
    with path.open("r+b") as file:
        file.write(SHIFT.pack(seconds))


if __name__ == "__main__":
    clock = Path(sys.argv.pop(1))
    vars(run)["SystemClock"] = lambda: SteppedClock(clock)  # the fault's way in
    sys.exit(main())
