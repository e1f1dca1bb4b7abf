"""Checks of the control plane, its store and its time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from kvplane.cli.doctor.facts import Facts, Offset, PlaneFacts
from kvplane.cli.doctor.findings import Finding, problem, warning
from kvplane.client import model as m

SLOW_STORE_S, STUCK_STORE_S = 0.1, 1.0
STEPPED_S = 2.0
SKEW_S = 2.0
QUOTA_SHARE = 0.8
ETCD_QUOTA_BYTES = 2 << 30
"""etcd's own default, for versions that do not say what was set."""
_LEAST_SPARE_S = 5.0
"""An engine refuses reads in the last seconds of its blocks' life."""


def check_reach(facts: Facts) -> Iterator[Finding]:
    """Does it answer, and serve?"""
    others = any(status.serving for status in facts.statuses)
    for plane in facts.planes:
        if plane.too_old:
            yield warning(
                "plane_too_old",
                f"the control plane at {plane.address} is older than this command and tells little",
                plane.trouble,
                "upgrade it: pip install the version of kvplane that runs here, replica by replica",
            )
        elif plane.refused:
            yield problem(
                "plane_refuses",
                f"the control plane at {plane.address} answers, but not to this caller",
                plane.trouble,
                "show it a certificate (--plane-cert, --plane-key) or a token (--plane-token-file)"
                " of the role"
                " viewer or admin",
            )
        elif plane.status is None:
            yield problem(
                "plane_unreachable",
                f"no control plane answers at {plane.address}: "
                + ("the others go on without it" if others else "nothing is reused"),
                plane.trouble,
                "start it (kvplane serve), or name where it is with --plane HOST:PORT; beyond its"
                " own machine it has to listen there (--grpc-host, and a firewall that lets its port"
                " through); where it has TLS, give --plane-ca, with --grpc-client-ca also --plane-cert"
                " and --plane-key, and a name of its certificate (in --plane, or --plane-server-name)",
            )
        elif not plane.status.serving:
            yield problem(
                "plane_not_serving",
                f"the control plane at {plane.address} answers, but does not serve",
                plane.status.store.trouble or f"staleness {plane.status.store.staleness_s:.1f} s",
                "its store does not answer it, or it fell behind: see its log (health_changed), and"
                " kvplane store check",
            )


def check_store(facts: Facts) -> Iterator[Finding]:
    """Is the store sound, quick, and not full?"""
    seen = set[tuple[str, str]]()
    for plane in facts.planes:
        if plane.status is None:
            continue
        for finding in _store(plane.address, plane.status):
            if (finding.code, finding.evidence) not in seen:
                seen.add((finding.code, finding.evidence))
                yield finding
    own = [plane for plane in facts.planes if plane.status is not None and not plane.status.store.shared]
    if len({plane.status.replica_id for plane in own if plane.status is not None}) > 1:
        yield problem(
            "replicas_share_nothing",
            "several control planes are named, and each has a memory of its own: they know of"
            " different turns",
            ", ".join(plane.address for plane in own),
            "give all of them the same --store etcd://..., or run one",
        )


def _store(address: str, status: m.PlaneStatus) -> Iterator[Finding]:
    store = status.store
    if store.trouble and status.serving:
        yield problem(
            "store_trouble",
            f"the store of the control plane at {address} is in trouble",
            store.trouble,
            "deploy/STORE.md says what its errors mean (NOSPACE: compact, defragment, disarm the alarm)",
        )
    if store.latency_s is not None and store.latency_s > SLOW_STORE_S:
        found = problem if store.latency_s > STUCK_STORE_S else warning
        yield found(
            "store_slow",
            f"the store of the control plane at {address} is slow: each decision waits for it",
            f"a read took {store.latency_s * 1000:.0f} ms",
            "give etcd disks with quick fsync and the control plane a short way to it (deploy/STORE.md)",
        )
    if store.staleness_s > status.settings.max_staleness_s / 2:
        yield warning(
            "store_stale",
            f"the control plane at {address} may be far behind its store",
            f"staleness {store.staleness_s:.1f} s; at {status.settings.max_staleness_s:g} s it"
            " stops answering",
            "see whether etcd's watch reaches it, and whether its process gets the processor time it needs",
        )
    if store.caution:
        yield problem(
            "store_unsound",
            "the store's version is known to lose data",
            store.caution,
            "upgrade etcd to 3.4.22, 3.5.6 or later",
        )
    quota = store.quota_bytes or (ETCD_QUOTA_BYTES if store.version.startswith("etcd") else 0)
    if quota and store.size_bytes >= quota * QUOTA_SHARE:
        assumed = "" if store.quota_bytes else ", if it has etcd's default quota"
        yield warning(
            "store_nearly_full",
            "the store is nearly full: at its quota it refuses all writes",
            f"{store.size_bytes / 2**20:,.0f} of {quota / 2**20:,.0f} MiB{assumed}",
            "compact and defragment it, or raise --quota-backend-bytes (deploy/STORE.md)",
        )


def check_settings(facts: Facts) -> Iterator[Finding]:
    """Do the durations of engines and of the control plane go together?"""
    status = next(iter(facts.statuses), None)
    if status is None:
        return
    plane = status.settings
    claim_life_s = plane.claim_timeout_s + plane.claim_grace_s
    for engine in facts.decode():
        said = engine.spec.settings
        if said is None:
            continue
        limits = [limit for limit in (said.max_ttl_s, said.kv_blocks_ttl_s) if limit]
        if not limits:
            continue
        lives_s = min(limits)
        named = f"kvplane_max_ttl_s {said.max_ttl_s:g}, decoder_kv_blocks_ttl {said.kv_blocks_ttl_s:g}"
        if min(lives_s, plane.location_ttl_s) <= plane.min_remaining_s + _LEAST_SPARE_S:
            yield problem(
                "ttl_too_short",
                f"what {engine.spec.engine_id} keeps is never handed out: it lives too short",
                f"{named}; --location-ttl {plane.location_ttl_s:g}, --min-remaining"
                f" {plane.min_remaining_s:g}",
                f"raise decoder_kv_blocks_ttl (and kvplane_max_ttl_s) on the engine well above"
                f" {plane.min_remaining_s + _LEAST_SPARE_S:g} s, or lower --min-remaining",
            )
        elif lives_s < claim_life_s:
            yield warning(
                "ttl_below_claim_life",
                f"{engine.spec.engine_id} keeps KV for less than a reader may take to begin",
                f"{named}; --claim-timeout {plane.claim_timeout_s:g} and {plane.claim_grace_s:g} s of grace",
                f"raise decoder_kv_blocks_ttl (and kvplane_max_ttl_s) above {claim_life_s:g} s, or lower"
                " --claim-timeout on all replicas",
            )
        if said.max_ttl_s > plane.location_ttl_s:
            yield warning(
                "ttl_above_plane",
                f"{engine.spec.engine_id} is set to keep KV longer than the control plane lets it be known",
                f"kvplane_max_ttl_s {said.max_ttl_s:g}, --location-ttl {plane.location_ttl_s:g}",
                "raise --location-ttl on all replicas (stop all of them to change it), or lower"
                " kvplane_max_ttl_s and decoder_kv_blocks_ttl on the engine",
            )


def check_replicas(facts: Facts) -> Iterator[Finding]:
    """Do the replicas agree on versions and on time?"""
    versions: dict[str, list[str]] = {}
    for status in facts.statuses:
        versions.setdefault(status.version, []).append("a control plane")
        for replica in status.replicas:
            versions.setdefault(replica.version, []).append("a control plane")
    for engine in facts.engines or ():
        said = engine.spec.settings
        if said is not None and said.kvplane_version:
            versions.setdefault(said.kvplane_version, []).append(engine.spec.engine_id)
    if len(versions) > 1:
        counted = (f"{v or '?'}: {', '.join(sorted(set(who))[:5])}" for v, who in sorted(versions.items()))
        yield warning(
            "versions_mixed",
            "several versions of kvplane run: fine while upgrading, not for long",
            "; ".join(counted),
            "bring all to the newest: control planes first, one by one, then engines and routers",
        )
    timed = [(plane.address, plane.fleet) for plane in facts.planes if plane.fleet is not None]
    shared = all(status.store.shared for status in facts.statuses)
    if len(timed) > 1 and shared:
        first, last = min(timed, key=lambda t: t[1].ahead_s), max(timed, key=lambda t: t[1].ahead_s)
        apart = last[1].ahead_s - first[1].ahead_s - first[1].error_s - last[1].error_s
        if apart > 1.0:
            yield problem(
                "replicas_disagree_on_time",
                "replicas judge deadlines by different times",
                f"{last[0]} is {apart:.1f} s ahead of {first[0]}",
                "see that all use the same --store and the same prefix of it, and restart the one"
                " that is off",
            )


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """Does each machine's clock tell the same time, and has none been stepped?"""
    for plane in facts.planes:
        if plane.fleet is None or plane.clock is None:
            continue
        stepped_s = plane.clock.ahead_s - plane.fleet.ahead_s
        if abs(stepped_s) > STEPPED_S:
            yield warning(
                "clock_stepped",
                f"the clock at {plane.address} was stepped, or differs from that of the other replicas",
                f"it is {_ahead(stepped_s)} the time by which this replica judges deadlines",
                "run NTP (chrony) on it; restart that replica when the clock is right, and all of"
                " them, one after"
                " the other, if their agreed time is what is wrong",
            )
    clocks = list(_clocks(facts))
    if not clocks:
        return
    # Of three or more, the middle one is likely right; of two nobody knows, and this machine's is taken.
    middle = statistics.median([0.0, *(offset.ahead_s for _, offset in clocks)]) if len(clocks) > 1 else 0.0
    for name, offset in clocks:
        off = offset.ahead_s - middle
        if abs(off) - offset.error_s > SKEW_S:
            yield warning(
                "clock_skew",
                f"the clock of {name} is not that of the others",
                f"it is {_ahead(off)} the others, give or take {offset.error_s:.1f} s",
                "run NTP (chrony) on that machine: logs, certificates and tokens go by its clock"
                " (durations do not)",
            )
    if abs(middle) > SKEW_S:
        yield warning(
            "clock_skew",
            "the clock of this machine is not that of the others",
            f"it is {_ahead(-middle)} the others",
            "run NTP (chrony) on this machine",
        )


def _clocks(facts: Facts) -> Iterator[tuple[str, Offset]]:
    plane: PlaneFacts
    for plane in facts.planes:
        if plane.clock is not None:
            yield f"the control plane at {plane.address}", plane.clock
    for router in facts.routers:
        if router.clock is not None:
            yield f"the router at {router.url}", router.clock
    for engine in facts.engine_https:
        if engine.clock is not None:
            yield f"the engine at {engine.url}", engine.clock


def _ahead(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"
