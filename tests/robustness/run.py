"""The long run: python -m tests.robustness.run --seconds 600 --claims 1000000.

One fault after another, chosen by a seed, under traffic, until both the time is over and enough claims were
attempted; then the whole history is checked. Exit code 1 if any rule was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from deploy.rig.process import RigError
from tests.robustness.checker import Verdict
from tests.robustness.faults import FAULTS
from tests.robustness.fleet import Fleet, Plan, report

AWAY_S = (3.0, 15.0, 60.0)
"""Each of these is also an outage of all of etcd, once."""
_RECOVERY_S = 30.0
_REST_S = (0.5, 4.0)
_WITHOUT_ETCD = ("replica_paused", "engines_", "claimers_", "clients_")


def schedule(chance: Random, names: list[str], *, away: bool) -> Iterator[tuple[str, float]]:
    """Yield (fault, seconds) without end: all faults in a random order, then all in another one."""
    long_outages = [("etcd_away", seconds) for seconds in AWAY_S] if away else []
    while True:
        batch = [(name, FAULTS[name][1] * chance.uniform(0.7, 1.6)) for name in names]
        batch += long_outages
        long_outages = []
        chance.shuffle(batch)
        yield from batch


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run(options: argparse.Namespace, folder: Path) -> int:
    """Run; returns the exit code."""
    chance = Random(options.seed)
    plan = Plan(
        replicas=options.replicas,
        members=options.members,
        claimers=options.claimers,
        attempts_per_s=options.rate,
        requests_per_s=options.requests,
        seed=options.seed,
    )
    names = options.faults.split(",") if options.faults else list(FAULTS)
    if not plan.members:
        names = [name for name in names if name.startswith(_WITHOUT_ETCD)]
    with Fleet(folder, plan) as fleet:
        began = time.monotonic()
        say(f"up: {len(fleet.replicas)} replicas, {plan.members} etcd members, histories in {fleet.history}")
        broken = list[str]()
        for name, seconds in schedule(chance, names, away="etcd_away" in names):
            past = time.monotonic() - began
            if past > options.seconds and fleet.attempts >= options.claims:
                break
            if past > 3 * options.seconds:
                broken.append(f"only {fleet.attempts:,} claims in {past:.0f} s")
                break
            FAULTS[name][0](fleet, seconds, chance)
            mended = time.monotonic()
            try:
                recovery = f"a hit {fleet.until_hit(mended, _RECOVERY_S) - mended:.2f} s after"
            except RigError as error:
                recovery = f"NO HIT: {str(error).splitlines()[0]}"
                broken.append(f"{name}: {recovery}")
            if ended := fleet.ended():
                broken.append(f"{name}: ended by themselves: {ended}")
            say(f"{past:5.0f} s  {name:<20} {seconds:5.1f} s  {recovery}; {fleet.attempts:,} claims decided")
            time.sleep(chance.uniform(*_REST_S))
            if broken:
                break
        time.sleep(2.0)
        say("checking")
        verdict = fleet.verdict()
    print(report(verdict))
    for violation in verdict.violations[:50]:
        print(f"{violation.rule}: {violation.text}")
    for line in broken:
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(verdict), indent=1))
    return 1 if broken or verdict.violations else 0


def to_json(verdict: Verdict) -> dict[str, object]:
    """Return a verdict's figures, and its violations, as JSON has them."""
    figures: dict[str, object] = {name: getattr(verdict, name) for name in Verdict.__slots__}
    figures["counts"] = dict(verdict.counts)
    figures["violations"] = [[violation.rule, violation.text] for violation in verdict.violations]
    return figures


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--claims", type=int, default=1_000_000, help="claims to be decided at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--members", type=int, default=3, help="of etcd; 0: one replica, a store in memory")
    parser.add_argument("--claimers", type=int, default=2, help="in each of two processes")
    parser.add_argument("--rate", type=float, default=2000.0, help="claim attempts per second, all together")
    parser.add_argument("--requests", type=float, default=50.0, help="router-like requests per second")
    parser.add_argument("--faults", default="", help="only these, with commas between")
    parser.add_argument("--folder", type=Path, default=None, help="keep logs and histories here")
    parser.add_argument("--json", type=Path, default=None, help="write the verdict here")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-robustness-")))
        return run(options, folder)


if __name__ == "__main__":
    sys.exit(main())
