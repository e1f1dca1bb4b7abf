"""Faults, by name: each breaks a part of a fleet for a while, mends it, and writes down when it did.

None of them waits for recovery; that is measured. `seconds` is how long the fault lasts.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from random import Random

from deploy.rig.etcd import EtcdServer
from deploy.rig.process import RigError
from deploy.rig.proxy import Fault, Link
from tests.robustness.fleet import QUOTA_BYTES, Fleet

_FILL_BYTES = 1_000_000
_FILLER = b"zz-filler/"
_READY_S = 30.0


def leader_killed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """kill -9 of the etcd leader; it comes back later."""
    leader = fleet.members.leader()
    with fleet.fault("leader_killed"):
        leader.kill()
        time.sleep(seconds)
        _start(leader)


def members_killed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """kill -9 of each etcd member in turn."""
    with fleet.fault("members_killed"):
        for member in fleet.members.members:
            member.kill()
            time.sleep(seconds / 3)
            _start(member)


def etcd_away(fleet: Fleet, seconds: float, chance: Random) -> None:
    """kill -9 of all members at once; nothing of etcd is there for a while."""
    with fleet.fault(f"etcd_away_{seconds:g}s"):
        for member in fleet.members.members:
            member.kill()
        time.sleep(seconds)
        for member in fleet.members.members:
            member.start()
        for member in fleet.members.members:
            member.wait_ready(_READY_S)


def leader_paused(fleet: Fleet, seconds: float, chance: Random) -> None:
    """SIGSTOP of the leader: its connections stay open and say nothing; then it wakes in an old term."""
    _pause_member(fleet, "leader_paused", fleet.members.leader(), seconds)


def member_paused(fleet: Fleet, seconds: float, chance: Random) -> None:
    """SIGSTOP of a follower."""
    _pause_member(fleet, "member_paused", chance.choice(fleet.members.followers()), seconds)


def _pause_member(fleet: Fleet, name: str, member: EtcdServer, seconds: float) -> None:
    with fleet.fault(name):
        member.pause()
        try:
            time.sleep(seconds)
        finally:
            member.resume()


def _start(member: EtcdServer) -> None:
    member.start()
    member.wait_ready(_READY_S)


def replica_killed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """kill -9 of a replica; it comes back on its address."""
    replica = chance.choice(fleet.replicas)
    with fleet.fault("replica_killed"):
        replica.kill()
        time.sleep(seconds)
        replica.start()
        replica.wait_ready(_READY_S)


def replica_paused(fleet: Fleet, seconds: float, chance: Random) -> None:
    """SIGSTOP of a replica, longer than leases: it wakes with an old view of everything."""
    replica = chance.choice(fleet.replicas)
    with fleet.fault("replica_paused"):
        replica.pause()
        try:
            time.sleep(seconds)
        finally:
            replica.resume()


def engines_killed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """kill -9 of a process of engines; they come back under the same ids."""
    worker = chance.choice(fleet.engines)
    with fleet.fault("engines_killed"):
        fleet.kill_engines(worker)
        time.sleep(seconds)
        worker.start()


def engines_paused(fleet: Fleet, seconds: float, chance: Random) -> None:
    """SIGSTOP of a process of engines, longer than their leases."""
    worker = chance.choice(fleet.engines)
    with fleet.fault("engines_paused"):
        worker.pause()
        try:
            time.sleep(seconds)
        finally:
            worker.resume()


def claimers_killed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """kill -9 of a process of claimers in the middle of their reading."""
    worker = chance.choice(fleet.claimers)
    with fleet.fault("claimers_killed"):
        worker.kill()
        time.sleep(seconds)
        worker.start()


def _break(
    fleet: Fleet, name: str, links: list[Link], seconds: float, fault: Fault, delay_s: float = 0.0
) -> None:
    with fleet.fault(name):
        for link in links:
            link.break_(fault, delay_s=delay_s)
        try:
            time.sleep(seconds)
        finally:
            for link in links:
                link.heal()


def store_delayed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """200 ms each way between one replica and etcd."""
    _break(fleet, "store_delayed", chance.choice(fleet.store_links), seconds, Fault.DELAY, 0.2)


def store_cut(fleet: Fleet, seconds: float, chance: Random) -> None:
    """One replica's connections to etcd are reset, and refused."""
    _break(fleet, "store_cut", chance.choice(fleet.store_links), seconds, Fault.CUT)


def store_half_open(fleet: Fleet, seconds: float, chance: Random) -> None:
    """One replica's connections to etcd are taken, and carry nothing."""
    _break(fleet, "store_half_open", chance.choice(fleet.store_links), seconds, Fault.HALF_OPEN)


def store_deaf(fleet: Fleet, seconds: float, chance: Random) -> None:
    """One replica's writes reach etcd and the answers are lost: every outcome is unknown."""
    _break(fleet, "store_deaf", chance.choice(fleet.store_links), seconds, Fault.DEAF)


def store_stalled(fleet: Fleet, seconds: float, chance: Random) -> None:
    """What one replica and etcd say to each other comes all at once, late."""
    _break(fleet, "store_stalled", chance.choice(fleet.store_links), seconds, Fault.STALL)


def clients_delayed(fleet: Fleet, seconds: float, chance: Random) -> None:
    """150 ms each way between all clients and one replica."""
    _break(fleet, "clients_delayed", [chance.choice(fleet.client_links)], seconds, Fault.DELAY, 0.15)


def clients_cut(fleet: Fleet, seconds: float, chance: Random) -> None:
    """All clients' connections to one replica are reset, and refused."""
    _break(fleet, "clients_cut", [chance.choice(fleet.client_links)], seconds, Fault.CUT)


def clients_half_open(fleet: Fleet, seconds: float, chance: Random) -> None:
    """All clients' connections to one replica are taken, and carry nothing."""
    _break(fleet, "clients_half_open", [chance.choice(fleet.client_links)], seconds, Fault.HALF_OPEN)


def clients_deaf(fleet: Fleet, seconds: float, chance: Random) -> None:
    """What clients ask of one replica is done, and they never hear of it."""
    _break(fleet, "clients_deaf", [chance.choice(fleet.client_links)], seconds, Fault.DEAF)


def clients_stalled(fleet: Fleet, seconds: float, chance: Random) -> None:
    """What clients said to one replica comes late, when they have long turned to another one."""
    _break(fleet, "clients_stalled", [chance.choice(fleet.client_links)], seconds, Fault.STALL)


def clock_ahead(fleet: Fleet, seconds: float, chance: Random) -> None:
    """The wall clock of a running replica steps 60 s ahead, and back."""
    _step_clock(fleet, "clock_ahead", seconds, chance, 60.0)


def clock_behind(fleet: Fleet, seconds: float, chance: Random) -> None:
    """The wall clock of a running replica steps 60 s back, and ahead again."""
    _step_clock(fleet, "clock_behind", seconds, chance, -60.0)


def _step_clock(fleet: Fleet, name: str, seconds: float, chance: Random, shift_s: float) -> None:
    replica = chance.choice(fleet.replicas)
    with fleet.fault(name):
        replica.step_clock(shift_s)
        try:
            time.sleep(seconds)
        finally:
            replica.step_clock(0.0)


def started_ahead(fleet: Fleet, seconds: float, chance: Random) -> None:
    """A replica is started anew with its wall clock 60 s ahead of the others'; then with a right one."""
    _restart_shifted(fleet, "started_ahead", seconds, chance, 60.0)


def started_behind(fleet: Fleet, seconds: float, chance: Random) -> None:
    """A replica is started anew with its wall clock 60 s behind the others'; then with a right one."""
    _restart_shifted(fleet, "started_behind", seconds, chance, -60.0)


def _restart_shifted(fleet: Fleet, name: str, seconds: float, chance: Random, shift_s: float) -> None:
    replica = chance.choice(fleet.replicas)
    with fleet.fault(name):
        for shift in (shift_s, 0.0):
            replica.kill()
            replica.step_clock(shift)
            replica.start()
            replica.wait_ready(_READY_S)
            time.sleep(seconds)


def compacted(fleet: Fleet, seconds: float, chance: Random) -> None:
    """etcd's history is compacted away while one replica cannot follow it."""
    links = chance.choice(fleet.store_links)
    with fleet.fault("compacted"):
        for link in links:
            link.break_(Fault.CUT)
        try:
            time.sleep(seconds)
            _compact(fleet)
        finally:
            for link in links:
                link.heal()
        time.sleep(0.5)
        _compact(fleet)


def no_space(fleet: Fleet, seconds: float, chance: Random) -> None:
    """etcd's quota is used up and it takes no more writes; then compacted, defragmented, disarmed."""
    members = fleet.members.members
    with fleet.fault("no_space"):
        try:
            _fill(members[0])
            time.sleep(seconds)
        finally:
            begin, end = _text(_FILLER), _text(_FILLER[:-1] + b"0")
            members[0].call("/v3/kv/deleterange", {"key": begin, "range_end": end})
            _compact(fleet)
            for member in members:
                member.call("/v3/maintenance/defragment", {})
            for alarm in members[0].call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", ()):
                body = {"action": "DEACTIVATE", "memberID": alarm["memberID"], "alarm": alarm["alarm"]}
                members[0].call("/v3/maintenance/alarm", body)


def _fill(member: EtcdServer) -> None:
    """Put until it is refused."""
    value = _text(bytes(_FILL_BYTES))
    for number in range(2 * QUOTA_BYTES // _FILL_BYTES):
        try:
            member.call("/v3/kv/put", {"key": _text(_FILLER + str(number).encode()), "value": value})
        except RigError:
            return
    raise RigError(f"etcd took {2 * QUOTA_BYTES:,} bytes and has a quota of {QUOTA_BYTES:,}")


def _compact(fleet: Fleet) -> None:
    member = fleet.members.members[0]
    header = member.call("/v3/kv/range", {"key": _text(b"none")})["header"]
    member.call("/v3/kv/compaction", {"revision": header["revision"], "physical": True})


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


Breaks = Callable[[Fleet, float, Random], None]
FAULTS: dict[str, tuple[Breaks, float]] = {
    "leader_killed": (leader_killed, 2.5),
    "members_killed": (members_killed, 4.5),
    "etcd_away": (etcd_away, 3.0),
    "leader_paused": (leader_paused, 3.0),
    "member_paused": (member_paused, 3.0),
    "replica_killed": (replica_killed, 1.0),
    "replica_paused": (replica_paused, 7.0),
    "engines_killed": (engines_killed, 2.0),
    "engines_paused": (engines_paused, 7.0),
    "claimers_killed": (claimers_killed, 1.0),
    "store_delayed": (store_delayed, 3.0),
    "store_cut": (store_cut, 3.0),
    "store_half_open": (store_half_open, 3.0),
    "store_deaf": (store_deaf, 3.0),
    "store_stalled": (store_stalled, 3.0),
    "clients_delayed": (clients_delayed, 3.0),
    "clients_cut": (clients_cut, 2.0),
    "clients_half_open": (clients_half_open, 3.5),
    "clients_deaf": (clients_deaf, 3.5),
    "clients_stalled": (clients_stalled, 4.5),
    "clock_ahead": (clock_ahead, 2.0),
    "clock_behind": (clock_behind, 2.0),
    "started_ahead": (started_ahead, 2.0),
    "started_behind": (started_behind, 2.0),
    "compacted": (compacted, 2.5),
    "no_space": (no_space, 1.5),
}
"""Each fault and how long it lasts in the short suite, in seconds. Leases are 6 s there."""
