"""The whole fleet under continuous traffic, every connection through a link that can be broken.

    claimers, engines, caller ──link per replica──▶ replicas ──link per replica and member──▶ etcd

Faults come from outside (see faults.py); the history is read back and checked at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.rig.etcd import EtcdCluster
from deploy.rig.process import RigError
from deploy.rig.proxy import Link, Proxies
from tests.robustness import history as h
from tests.robustness.checker import RULES, Limits, Verdict, check
from tests.robustness.index import time_of
from tests.robustness.processes import Replica, Worker

QUOTA_BYTES = 96 * 1024 * 1024
_POLL_S = 0.05
_WRITTEN_S = 0.2
"""By then a process has written what it knew."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, rates, and the fleet's durations in seconds: short ones, so that they pass within a test."""

    replicas: int = 2
    members: int = 3
    """Of etcd; 0 means one replica over a store in memory."""
    engine_workers: int = 2
    claim_workers: int = 2
    claimers: int = 2
    """In each claim worker."""
    attempts_per_s: float = 240.0
    """Over all claimers."""
    requests_per_s: float = 12.0
    conversations: int = 32
    engine_actions_per_s: float = 5.0
    deaths_per_s: float = 0.05
    """Of each engine, by itself, its process living on; some of them are resets of its cache."""
    seed: int = 1
    engine_lease_s: float = 6.0
    claim_timeout_s: float = 4.0
    min_remaining_s: float = 4.0
    location_ttl_s: float = 60.0
    margin_s: float = 1.5

    @property
    def limits(self) -> Limits:
        """What such a fleet promises."""
        return Limits(min_remaining_s=self.min_remaining_s, engine_lease_s=self.engine_lease_s)

    @property
    def flags(self) -> list[str]:
        """The same as flags of `kvplane serve`."""
        return [
            *("--engine-lease", f"{self.engine_lease_s}", "--claim-timeout", f"{self.claim_timeout_s}"),
            *("--min-remaining", f"{self.min_remaining_s}", "--location-ttl", f"{self.location_ttl_s}"),
        ]


@dataclass(slots=True)
class EngineIds:
    """Which engines a worker has."""

    stream: list[str] = field(default_factory=list)
    unary: list[str] = field(default_factory=list)


class Fleet:
    """Start it, break it, ask for a verdict, stop it. All in one thread, blocking."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        self.plan = plan = plan or Plan()
        self.history = folder / "history"
        self.history.mkdir(parents=True, exist_ok=True)
        self.cluster: EtcdCluster | None = None
        self.proxies = Proxies()
        if plan.members:
            flags = [
                *("--quota-backend-bytes", str(QUOTA_BYTES)),
                *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "20000"),
            ]
            # With fsync: without, etcd 3.5 keeps the end of its log in its own memory, which kill -9 takes.
            self.cluster = EtcdCluster(folder / "etcd", plan.members, flags=flags)
        self.store_links: list[list[Link]] = []
        self.client_links: list[Link] = []
        self.replicas: list[Replica] = []
        for number in range(plan.replicas if plan.members else 1):
            self._add_replica(number, folder)
        self.engine_ids: dict[str, EngineIds] = {}
        self.engines, self.claimers = list[Worker](), list[Worker]()
        self._add_traffic(folder)
        self.workers = [*self.engines, *self.claimers, self.caller]
        self._recorder = h.Recorder(self.history / "faults.jsonl")
        self._reader = h.Reader(self.history)
        self._events = list[h.Event]()
        self._requests = list[h.Request]()

    def _add_replica(self, number: int, folder: Path) -> None:
        links = list[Link]()
        for member in self.cluster.members if self.cluster is not None else ():
            links.append(self.proxies.link(member.client_port, name=f"replica{number}-{member.name}"))
        self.store_links.append(links)
        store = f"etcd://{','.join(link.address for link in links)}" if links else "memory://"
        replica = Replica(f"replica{number}", folder, store=store, flags=self.plan.flags)
        self.replicas.append(replica)
        self.client_links.append(self.proxies.link(replica.port, name=f"clients-replica{number}"))

    def _add_traffic(self, folder: Path) -> None:
        plan = self.plan
        addresses = ",".join(link.address for link in self.client_links)
        common: dict[str, object] = {"addresses": addresses}
        for number in range(plan.engine_workers):
            name = f"engines{number}"
            ids = EngineIds([f"s{number}a", f"s{number}b"], [f"u{number}"])
            self.engine_ids[name] = ids
            options = {
                "stream": ",".join(ids.stream),
                "unary": ",".join(ids.unary),
                "rate": plan.engine_actions_per_s,
                "deaths": plan.deaths_per_s,
                "conversations": plan.conversations,
                "margin": plan.margin_s,
                "seed": plan.seed,
            }
            self.engines.append(Worker(name, "engines", folder, self.history, {**common, **options}))
        rate = plan.attempts_per_s / max(1, plan.claim_workers * plan.claimers)
        for number in range(plan.claim_workers):
            name = f"claimers{number}"
            options = {
                "name": f"r{number}",
                "claimers": plan.claimers,
                "rate": rate,
                "conversations": plan.conversations,
                "seed": plan.seed,
            }
            self.claimers.append(Worker(name, "claimers", folder, self.history, {**common, **options}))
        options = {"rate": plan.requests_per_s, "margin": plan.margin_s}
        self.engine_ids["caller"] = EngineIds(["caller"])
        self.caller = Worker("caller", "caller", folder, self.history, {**common, **options})

    def start(self) -> None:
        """Start everything and wait until a request has been a hit. Raises RigError."""
        if self.cluster is not None:
            self.cluster.start()
            self.cluster.wait_ready()
        for replica in self.replicas:
            replica.start()
        for replica in self.replicas:
            replica.wait_ready(30.0)
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait_ready(30.0)
        self.until_hit(time.monotonic(), 30.0)

    def stop(self) -> None:
        """Stop everything, whatever state it is in. Idempotent."""
        with ExitStack() as stops:
            stops.callback(self.proxies.close)
            if self.cluster is not None:
                stops.callback(self.cluster.stop)
            for replica in self.replicas:
                stops.callback(replica.kill)
            for worker in self.workers:
                stops.callback(worker.kill)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def members(self) -> EtcdCluster:
        """The etcd cluster. Raises RigError if there is none."""
        if self.cluster is None:
            raise RigError("this fleet has no etcd")
        return self.cluster

    @contextmanager
    def fault(self, name: str, recovers_within_s: float = 15.0) -> Iterator[None]:
        """Write down when a fault began and ended."""
        began = time.monotonic()
        yield
        self._recorder.record(h.Fault(name, began, time.monotonic(), recovers_within_s))

    def kill_engines(self, worker: Worker) -> None:
        """Kill a process of engines; all of them are dead."""
        worker.kill()
        ids = self.engine_ids[worker.name]
        for engine_id in (*ids.stream, *ids.unary):
            self._recorder.record(h.Died(engine_id, time.monotonic()))

    def until_hit(self, since: float, timeout_s: float) -> float:
        """Wait for a hit of a request that began after `since`; returns when it was answered.

        Raises RigError, with what the processes say last.
        """
        ends = time.monotonic() + timeout_s
        while True:
            self.read()
            for request in reversed(self._requests):
                if request.outcome == "hit" and request.invoked >= since:
                    return request.answered
            if time.monotonic() > ends:
                tails = "\n".join(process.log_tail(5) for process in (*self.replicas, *self.workers))
                raise RigError(f"no hit within {timeout_s:g} s\n{tails}")
            time.sleep(_POLL_S)

    def read(self) -> None:
        """Read what the processes have written."""
        new = self._reader.new()
        self._events += new
        self._requests += [event for event in new if isinstance(event, h.Request)]

    @property
    def attempts(self) -> int:
        """Claims decided so far, as far as they were read."""
        counted = (event.counts for event in self._events if isinstance(event, h.Counted))
        return sum(counts.get("claims_decided", 0) for counts in counted)

    def verdict(self) -> Verdict:
        """Check the whole history up to now.

        Later events are left for the next time: the files are read one after the other, and one of them must
        not tell what another one has yet to explain.
        """
        now = time.monotonic()
        time.sleep(_WRITTEN_S)
        self.read()
        return check([event for event in self._events if time_of(event) <= now], self.plan.limits)

    def ended(self) -> list[str]:
        """Return which processes are not running: none should end by itself."""
        return [process.name for process in (*self.replicas, *self.workers) if not process.running]


def report(verdict: Verdict) -> str:
    """Return a verdict as a table for people."""
    counts = verdict.counts
    rows: list[tuple[str, object]] = [
        ("claims asked / decided", f"{counts['claims_asked']:,} / {verdict.attempts:,}"),
        ("claims granted (answers)", f"{verdict.grants:,}"),
        ("locations offered", f"{verdict.offers:,}"),
        *((f"violations: {rule}", len(verdict.of(rule))) for rule in RULES),
        ("least life left at an answer", f"{verdict.least_life_s:.2f} s"),
        ("least life left at a question", f"{verdict.least_margin_s:.2f} s"),
        ("longest offered after a death", f"{verdict.longest_after_death_s:.2f} s"),
        ("requests hit / cold / failed", f"{verdict.hits:,} / {verdict.cold:,} / {verdict.failed:,}"),
        ("slowest request", f"{verdict.slowest_s:.2f} s"),
        ("longest gap without a hit", f"{verdict.longest_gap_s:.2f} s"),
    ]
    lines = [f"{name:<34}{value}" for name, value in rows]
    lines += ["", f"{'fault':<34}{'longest gap':>12}{'recovery':>12}"]
    for name, gap in sorted(verdict.gaps.items()):
        recovery = verdict.recoveries.get(name)
        shown = f"{recovery:.2f} s" if recovery is not None else "none"
        lines.append(f"{name:<34}{gap:>10.2f} s{shown:>12}")
    lines += ["", f"{'count':<50}{'':>2}"]
    lines += [f"{name:<50}{counts[name]:>12,}" for name in sorted(counts)]
    return "\n".join(lines)
