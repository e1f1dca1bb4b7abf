"""What all targets have in common: inputs by number, the oracle, findings, memory."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import structlog

from tests.fuzz.chance import Chance
from tests.fuzz.virtual import VirtualLoop

DEADLINE_S = 4000.0
"""Virtual seconds after which an input counts as hanging: longer than any time limit there is."""
SLOW_S = 3.0
"""Seconds of this process's own time after which an input counts as one that stops the others."""
MOST_GROWTH = 96 * 1024 * 1024
"""Bytes by which a target's memory may grow after its first lives."""
_PAGE = 4096
_SHOWN = 100_000
_WILD = (0.0, 0.0, 0.0, 0.01, 0.01, 0.03, 0.1, 0.5)


class Wrong(Exception):  # noqa: N818
    """An invariant does not hold; the text names it, always with the same words."""


class Target(ABC):
    """One kind of input. `once` makes one and feeds it; a status comes back, or an exception: a finding.

    A target is used as an async context manager for a life of some inputs at a time, so that what it holds
    is bounded, and what is left at its end is looked at. `real` ones need real time and sockets.
    """

    name: ClassVar[str]
    share: ClassVar[float] = 1.0
    """Of all inputs, beside the shares of the others."""
    life: ClassVar[int] = 2000
    real: ClassVar[bool] = False

    def __init__(self) -> None:
        self.input: object = None
        """What was fed last, for the corpus."""

    async def start(self) -> None:  # noqa: B027
        """Begin a life."""

    async def stop(self) -> None:  # noqa: B027
        """End it."""

    @abstractmethod
    async def once(self, chance: Chance) -> str:
        """Feed one input; returns what came of it, in a word."""


class PlainTarget(Target):
    """A target of plain functions, called outside of an event loop."""

    async def once(self, chance: Chance) -> str:
        return self.now(chance)

    @abstractmethod
    def now(self, chance: Chance) -> str:
        """As `once`."""


@dataclass
class Finding:
    """Something that must not happen."""

    target: str
    seed: int
    number: int
    problem: str
    detail: str
    input: object = None

    def save(self, folder: Path) -> Path:
        """Write it where it can be looked at, and made again from."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.target}-{self.seed}-{self.number}.json"
        shown = {**vars(self), "input": repr(self.input)[:_SHOWN]}
        file.write_text(json.dumps(shown, indent=1) + "\n")
        return file


@dataclass
class Report:
    """What came of a target's inputs. `seconds` are of the process's own time."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    """The first of each kind."""
    grown: int = 0
    """Bytes that the process grew by since the third life."""


class _Faults(logging.Handler):
    """Collects what is logged with an exception, or worse than an error, by whatever way."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[tuple[str, str]] = []
        """What each was, and its traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if not self.filters or self.filter(record):
                self.note(f"{record.name}: {record.getMessage()[:80]}", error)

    def note(self, event: str, error: object) -> None:
        """Note one of ours."""
        said = where(error) if isinstance(error, BaseException) else error
        trace = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        self.seen.append((f"logged {event}: {said}", trace))

    def process(self, _: Any, method: str, event: MutableMapping[str, Any]) -> str:
        """Be structlog's last processor."""
        error = event.get("exc_info")
        if error or method == "critical":
            error = sys.exc_info()[1] if error is True else error
            self.note(str(event.get("event")), error or method)
        if "Traceback (most recent" in str(event):
            self.note(str(event.get("event")), "a traceback in a field")
        return ""


def where(error: BaseException) -> str:
    """Return an exception's kind, and its innermost place in our code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/kvplane/" in f.filename]
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    said = f": {error}" if isinstance(error, Wrong) else ""
    return f"{type(error).__name__}{said}{at}"


@contextmanager
def listening() -> Iterator[_Faults]:
    """Have all logs go to the oracle, and nowhere else."""
    faults, root, before = _Faults(), logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [faults]
    before_hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda hooked: faults.note(f"unraisable {str(hooked.object)[:60]}", hooked.exc_value),
    )
    structlog.configure(
        processors=[faults.process],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield faults
    finally:
        sys.unraisablehook = before_hook
        root.handlers[:], root.level = handlers, level
        structlog.configure(**before)


def resident() -> int:
    """Return this process's memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Hunt:
    """Feeds a target its inputs from one number on."""

    def __init__(self, make: Callable[[], Target], seed: int, note: Callable[[Finding], None]) -> None:
        self._make = make
        self._seed = seed
        self._note = note
        target = make()
        self.report = Report(target.name)
        self._life, self._real = target.life, target.real
        self._lives = 0
        self._base = 0

    def run(self, first: int, inputs: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Feed the inputs `first` to `first + inputs - 1`; `first` has to begin a life, or nothing is said of
        what an input finds there.
        """
        end = first + inputs
        with listening() as faults:
            while first < end and not stop():
                upto = min(end, first - first % self._life + self._life)
                began = time.process_time()
                factory = None if self._real else VirtualLoop
                with asyncio.Runner(loop_factory=factory) as runner:
                    runner.run(self._live(first, upto, faults))
                self.report.seconds += time.process_time() - began
                self.report.inputs += upto - first
                first = upto
                self._weigh(first)

    def _weigh(self, number: int) -> None:
        self._lives += 1
        if self._lives < 3:
            return
        gc.collect()
        now = resident()
        self._base = self._base or now
        self.report.grown = now - self._base
        if self.report.grown > MOST_GROWTH:
            self._found(number - 1, "memory grows", f"by {self.report.grown} bytes", None)

    async def _live(self, first: int, upto: int, faults: _Faults) -> None:
        loop = asyncio.get_running_loop()
        target = self._make()
        if isinstance(loop, VirtualLoop):
            loop.faults.clear()
        await target.start()
        number = first
        try:
            for number in range(first, upto):
                await self._feed(target, number)
                self._look(target, number, faults)
        finally:
            await self._guard(target, number, target.stop)
            self._look(target, number, faults)

    async def _feed(self, target: Target, number: int) -> None:
        chance = Chance(f"{target.name} {self._seed} {number}")
        chance.wild = chance.pick(_WILD)
        target.input = None
        began = time.process_time()

        async def feed() -> None:
            self.report.statuses[await target.once(chance)] += 1

        await self._guard(target, number, feed)
        if (took := time.process_time() - began) > SLOW_S:
            self._found(number, "slow", f"{took:.1f} s", target.input)

    async def _guard(self, target: Target, number: int, work: Callable[[], Awaitable[None]]) -> None:
        limit_s, stacks = 60 if target.real else DEADLINE_S, list[str]()
        look = asyncio.get_running_loop().call_later(limit_s - 1, lambda: stacks.extend(_stacks()))
        try:
            async with asyncio.timeout(limit_s):
                await work()
        except TimeoutError:
            self._found(number, "hangs", "\n".join(stacks), target.input)
        except Exception as error:
            self._found(number, where(error), traceback.format_exc(), target.input)
        finally:
            look.cancel()

    def _look(self, target: Target, number: int, faults: _Faults) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop) and loop.faults:
            for context in loop.faults:
                error = context.get("exception")
                said = where(error) if isinstance(error, BaseException) else ""
                text = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
                self._found(number, f"loop: {context.get('message')} {said}", text, target.input)
            loop.faults.clear()
        for problem, trace in faults.seen:
            self._found(number, problem, trace, target.input)
        faults.seen.clear()

    def _found(self, number: int, problem: str, detail: str, fed: object) -> None:
        self.report.statuses["FOUND"] += 1
        if problem not in self.report.findings:
            finding = Finding(self.report.target, self._seed, number, problem, detail, fed)
            self.report.findings[problem] = finding
            self._note(finding)


def _stacks() -> Iterator[str]:
    """Return where all tasks are."""
    for task in asyncio.all_tasks():
        at = list[str]()
        waits: Any = task.get_coro()
        while waits is not None:
            frame = getattr(waits, "cr_frame", None) or getattr(waits, "ag_frame", None)
            if frame is not None:
                at.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)
        yield f"{task.get_name()} at {' > '.join(at)}"


def named(statuses: Mapping[str, int], most: int = 12) -> str:
    """Return how often each status was seen, the frequent ones first."""
    return " ".join(f"{name}:{count}" for name, count in Counter(statuses).most_common(most))
