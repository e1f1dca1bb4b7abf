"""python -m tests.fuzz.run --inputs N --seed S [--target NAME ...]: feed inputs, say what came of them."""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import resource
import sys
import time
from pathlib import Path

from tests.fuzz.core import Finding, Hunt, Report, named
from tests.fuzz.registry import TARGETS

_STUCK_S = 600
CORPUS = Path(".cache/fuzz")


def shares(inputs: int, names: list[str]) -> dict[str, int]:
    """Return how many of all inputs each target gets; at least one."""
    whole = sum(TARGETS[name].share for name in names)
    return {name: max(1, round(inputs * TARGETS[name].share / whole)) for name in names}


def show(report: Report) -> str:
    """Return a report as a line."""
    rate = report.inputs / report.seconds if report.seconds else 0.0
    return (
        f"{report.target:12} {report.inputs:9,} inputs  {rate:7,.0f}/s  {len(report.findings)} findings"
        f"  {report.grown // 2**20:+4} MiB  {named(report.statuses)}"
    )


def hunt(inputs: int, seed: int, names: list[str], corpus: Path) -> int:
    """Feed inputs to some targets; returns the number of findings."""

    def note(finding: Finding) -> None:
        print(f"FOUND {finding.problem}\n      {finding.save(corpus)}", flush=True)

    found, fed, seconds = 0, 0, 0.0
    began = time.monotonic()
    for name, count in shares(inputs, names).items():
        faulthandler.dump_traceback_later(_STUCK_S + count // 50, exit=True)
        hunting = Hunt(TARGETS[name], seed, note)
        hunting.run(0, count)
        print(show(hunting.report), flush=True)
        found += len(hunting.report.findings)
        fed, seconds = fed + hunting.report.inputs, seconds + hunting.report.seconds
    faulthandler.cancel_dump_traceback_later()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"seed {seed}: {fed:,} inputs, {found} findings, {fed / max(seconds, 1e-9):,.0f} inputs a second of"
        f" process time ({seconds:.0f} s; {time.monotonic() - began:.0f} s by the wall), peak {peak} MiB"
    )
    return found


def again(file: Path, corpus: Path) -> int:
    """Feed the inputs of a finding's life up to it once more; returns the number of findings."""
    saved = json.loads(file.read_text())
    kind, number = TARGETS[saved["target"]], saved["number"]
    found = list[Finding]()
    first = number - number % kind.life
    Hunt(kind, saved["seed"], found.append).run(first, number + 1 - first)
    for finding in found:
        print(f"input {finding.number}: {finding.problem}\n{finding.detail}\n{finding.input!r}"[:8000])
    return len(found)


def main(arguments: list[str] | None = None) -> int:
    """Run; the result is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, shared between the targets")
    parser.add_argument("--seed", type=int, default=None, help="of all inputs; random unless given")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only this one; repeatable"
    )
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder that failing inputs are saved in")
    parser.add_argument("--again", type=Path, help="a saved finding to make again, instead")
    given = parser.parse_args(arguments)
    if given.again is not None:
        return 1 if again(given.again, given.corpus) else 0
    seed = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    return 1 if hunt(given.inputs, seed, given.target or list(TARGETS), given.corpus) else 0


if __name__ == "__main__":
    sys.exit(main())
